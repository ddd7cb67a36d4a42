"""Create an API key of a tenant, or find it: prints {"public_id", "name", "created"}.

The output also has "key" when the key is new or --rotate gives it a new secret; the key cannot be
shown again. After a rotation the previous secret works for one more day.
"""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ApiError
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.key_services import operator_key_ensure
from controlplane.tenants.management.commands import find_tenant


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True, help="its slug")
        parser.add_argument("--name", required=True)
        parser.add_argument(
            "--rotate", action="store_true", help="if the key exists, give it a new secret"
        )

    def handle(self, *, tenant: str, name: str, rotate: bool, **options: Any) -> None:
        try:
            with tenant_scope(find_tenant(tenant).id):
                api_key, text, is_new = operator_key_ensure(name=name, is_rotated=rotate)
        except ApiError as error:
            raise CommandError(error.message) from error
        told = {"public_id": api_key.public_id, "name": api_key.name, "created": is_new}
        self.stdout.write(json.dumps(told if text is None else {**told, "key": text}))
