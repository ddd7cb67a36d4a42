from django.apps import AppConfig


class PrimitivesConfig(AppConfig):
    name = "controlplane.training.primitives"

    def ready(self) -> None:
        from controlplane.training.primitives import states
        from controlplane.usage.limits import quotas

        quotas.USES["storage_bytes"].connect(states.storage_used)
