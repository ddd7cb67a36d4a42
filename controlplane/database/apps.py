from django.apps import AppConfig


class DatabaseConfig(AppConfig):
    name = "controlplane.database"

    def ready(self) -> None:
        # Registers the check.
        from controlplane.database import checks  # noqa: F401
