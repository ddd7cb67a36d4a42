from django.apps import AppConfig


class FilesConfig(AppConfig):
    name = "controlplane.files"

    def ready(self) -> None:
        from controlplane.files import services
        from controlplane.usage.limits import quotas

        quotas.USES["storage_bytes"].connect(services.storage_used)
