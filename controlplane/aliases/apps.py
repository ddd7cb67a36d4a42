from django.apps import AppConfig


class AliasesConfig(AppConfig):
    name = "controlplane.aliases"

    def ready(self) -> None:
        from controlplane.adapters import users
        from controlplane.aliases import protection, watching
        from controlplane.aliases.models import Alias
        from controlplane.tenancy import epochs
        from controlplane.usage import services as usage

        users.before_versions_go.connect(protection.versions_check)
        users.before_name.connect(protection.adapter_name_check)
        usage.records_settled.connect(watching.records_note)
        # A new alias may take a name that an adapter had alone.
        epochs.watch(Alias, has_inserts=True)
