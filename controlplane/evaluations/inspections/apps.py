from django.apps import AppConfig


class InspectionsConfig(AppConfig):
    name = "controlplane.evaluations.inspections"

    def ready(self) -> None:
        from controlplane.adapters.probing import watch_inspectors

        watch_inspectors()
