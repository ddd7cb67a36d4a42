from django.apps import AppConfig


class DeletionConfig(AppConfig):
    name = "controlplane.deletion"
