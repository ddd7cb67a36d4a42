"""Create an operator's service key, or find it: prints {"public_id", "name", "scopes", "created"}.

The output also has "key" when the key is new or --rotate gives it a new secret; the key cannot be
shown again. After a rotation the previous secret works for one more day.
"""

import datetime as dt
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.errors import ApiError
from controlplane.operator.service_keys.scopes import Scope
from controlplane.operator.service_keys.services import service_key_ensure
from controlplane.tenancy.scoping import all_tenants


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--name", required=True)
        parser.add_argument(
            "--scope",
            required=True,
            action="append",
            dest="scopes",
            metavar="SCOPE",
            help=f"one of {', '.join(Scope)}; repeat it for more",
        )
        parser.add_argument(
            "--expires-days", type=int, help="days until a new key expires; left out: never"
        )
        parser.add_argument(
            "--rotate", action="store_true", help="if the key exists, give it a new secret"
        )

    def handle(
        self,
        *,
        name: str,
        scopes: list[str],
        expires_days: int | None,
        rotate: bool,
        **options: Any,
    ) -> None:
        if expires_days is not None and not 1 <= expires_days <= 3650:
            raise CommandError("--expires-days must be from 1 to 3650")
        expires_at = timezone.now() + dt.timedelta(days=expires_days) if expires_days else None
        try:
            with all_tenants(reason="service keys belong to no tenant"):
                service_key, text, is_new = service_key_ensure(
                    name=name, scopes=scopes, expires_at=expires_at, is_rotated=rotate
                )
        except ApiError as error:
            raise CommandError(error.message) from error
        told = {
            "public_id": service_key.public_id,
            "name": service_key.name,
            "scopes": service_key.scopes,
            "created": is_new,
        }
        self.stdout.write(json.dumps(told if text is None else {**told, "key": text}))
