from django.apps import AppConfig


class ServiceKeysConfig(AppConfig):
    name = "controlplane.service_keys"
