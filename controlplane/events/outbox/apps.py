from django.apps import AppConfig


class OutboxConfig(AppConfig):
    name = "controlplane.events.outbox"
