from django.apps import AppConfig


class SignInConfig(AppConfig):
    name = "controlplane.signin"

    def ready(self) -> None:
        from controlplane.signin import trail

        trail.connect()
