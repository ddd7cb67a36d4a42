from django.apps import AppConfig


class LimitsConfig(AppConfig):
    name = "controlplane.usage.limits"

    def ready(self) -> None:
        from controlplane.tenancy import epochs
        from controlplane.tenants import key_grants
        from controlplane.usage.limits import services
        from controlplane.usage.limits.models import Budget, RateLimit

        key_grants.limited_keys.connect(services.limited_keys)
        epochs.watch(RateLimit, has_inserts=True)
        epochs.watch(Budget, has_inserts=True)
