from django.apps import AppConfig


class LimitsConfig(AppConfig):
    name = "controlplane.limits"

    def ready(self) -> None:
        from controlplane.limits import services
        from controlplane.tenants import key_grants

        key_grants.LIMITED.append(services.limited_keys)
