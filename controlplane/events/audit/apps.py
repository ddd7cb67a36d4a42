from django.apps import AppConfig


class AuditConfig(AppConfig):
    name = "controlplane.events.audit"
