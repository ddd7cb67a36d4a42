from django.apps import AppConfig


class AdaptersConfig(AppConfig):
    name = "controlplane.adapters"

    def ready(self) -> None:
        from controlplane.adapters import deletion, services
        from controlplane.limits import quotas

        quotas.USES["storage_bytes"].append(services.storage_used)
        quotas.USES["storage_bytes"].append(deletion.storage_used)
        quotas.USES["adapter_checks"].append(services.checks_waiting)
