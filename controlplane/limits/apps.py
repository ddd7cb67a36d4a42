from django.apps import AppConfig


class LimitsConfig(AppConfig):
    name = "controlplane.limits"

    def ready(self) -> None:
        from controlplane.limits import services
        from controlplane.limits.models import Budget, RateLimit
        from controlplane.tenancy import epochs
        from controlplane.tenants import key_grants

        key_grants.limited_keys.connect(services.limited_keys)
        epochs.watch(RateLimit, has_inserts=True)
        epochs.watch(Budget, has_inserts=True)
