from django.apps import AppConfig


class SignInConfig(AppConfig):
    name = "controlplane.console.signin"
    label = "signin"

    def ready(self) -> None:
        from controlplane.tenants import signin_audit

        signin_audit.connect()
