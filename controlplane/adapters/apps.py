from django.apps import AppConfig


class AdaptersConfig(AppConfig):
    name = "controlplane.adapters"

    def ready(self) -> None:
        from controlplane.adapters import deletion, services
        from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
        from controlplane.tenancy import epochs
        from controlplane.usage.limits import quotas

        quotas.USES["storage_bytes"].connect(services.storage_used)
        quotas.USES["storage_bytes"].connect(deletion.storage_used)
        quotas.USES["adapter_checks"].connect(services.checks_waiting)
        epochs.watch(Adapter)
        epochs.watch(AdapterVersion)
        epochs.watch(BaseModel, is_shared=True)
