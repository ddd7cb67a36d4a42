"""Give a person a role in a tenant: prints {"tenant", "email", "role"}.

With --password-stdin the first line of standard input becomes the person's password.
"""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from controlplane.errors import ApiError
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import services
from controlplane.tenants.management.commands import find_tenant, read_password
from controlplane.tenants.models import Role


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True, help="its slug")
        parser.add_argument("--email", required=True)
        parser.add_argument("--role", choices=Role.values, required=True)
        parser.add_argument("--password-stdin", action="store_true")

    def handle(
        self, *, tenant: str, email: str, role: str, password_stdin: bool, **options: Any
    ) -> None:
        password = read_password() if password_stdin else None
        try:
            with transaction.atomic(), tenant_scope(find_tenant(tenant).id):
                member = services.member_add(email=email, role=Role(role), password=password)
                if password is not None and not member.user.check_password(password):
                    services.user_password_set(user=member.user, password=password)
        except ApiError as error:
            raise CommandError(error.message) from error
        self.stdout.write(json.dumps({"tenant": tenant, "email": member.user.email, "role": role}))
