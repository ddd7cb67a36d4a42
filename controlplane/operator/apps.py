from django.contrib.admin.apps import AdminConfig


class OperatorConfig(AdminConfig):
    """Django's admin, with our site in place of its own."""

    default_site = "controlplane.operator.site.OperatorSite"

    def ready(self) -> None:
        super().ready()
        # Registers our pages, and removes some that other apps have registered.
        from controlplane.operator import admin  # noqa: F401
