"""Create an operator, who may use /admin: prints {"email", "created"}.

The password is the first line of standard input; an existing operator gets it as the new password.
"""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ApiError
from controlplane.tenants import services
from controlplane.tenants.management.commands import read_password
from controlplane.tenants.models import User


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--email", required=True)
        parser.add_argument(
            "--password-stdin", action="store_true", help="the default; may be left out"
        )

    def handle(self, *, email: str, **options: Any) -> None:
        password = read_password()
        user = User.objects.filter(email=email.strip().lower()).first()
        try:
            if user is None:
                services.user_create(
                    email=email, password=password, is_operator=True, is_proven=True
                )
            elif user.is_staff:
                services.user_password_set(user=user, password=password)
            else:
                raise CommandError(f"{email} is a member of a tenant: choose another address")
        except ApiError as error:
            raise CommandError(error.message) from error
        self.stdout.write(json.dumps({"email": email, "created": user is None}))
