from django.apps import AppConfig


class MaintenanceConfig(AppConfig):
    name = "controlplane.maintenance"
