from django.apps import AppConfig


class MorningConfig(AppConfig):
    name = "controlplane.evaluations.morning"
