from django.apps import AppConfig


class TenantsConfig(AppConfig):
    name = "controlplane.tenants"

    def ready(self) -> None:
        from controlplane.tenancy import epochs
        from controlplane.tenants.models import ApiKey, Membership, ServiceAccount, Tenant, User

        epochs.watch(ApiKey, ignored=["last_used_at"])
        epochs.watch(Membership)
        epochs.watch(ServiceAccount)
        epochs.watch(Tenant)
        epochs.watch(User, ignored=["last_login", "password"], is_shared=True)
