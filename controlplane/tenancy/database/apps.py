from django.apps import AppConfig


class DatabaseConfig(AppConfig):
    name = "controlplane.tenancy.database"
    label = "database"

    def ready(self) -> None:
        # Registers the check.
        from controlplane.tenancy.database import checks  # noqa: F401
