from django.contrib.admin.apps import AdminConfig


class OperatorConfig(AdminConfig):
    """Django's admin, with our site in place of its own."""

    default_site = "controlplane.operator.site.OperatorSite"
