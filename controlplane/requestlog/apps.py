from django.apps import AppConfig


class RequestLogConfig(AppConfig):
    name = "controlplane.requestlog"
