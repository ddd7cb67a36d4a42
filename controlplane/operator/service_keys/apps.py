from django.apps import AppConfig


class ServiceKeysConfig(AppConfig):
    name = "controlplane.operator.service_keys"
