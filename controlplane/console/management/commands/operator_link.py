"""Print a link to choose an operator's password, which works once: {"email", "link"}.

Use it for the first sign-in, or when the password is lost.
"""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.console.signin.first_operator import password_link
from controlplane.tenants.models import User


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--email", required=True)

    def handle(self, *, email: str, **options: Any) -> None:
        user = User.objects.filter(email=email.strip().lower(), is_staff=True).first()
        if user is None:
            raise CommandError(f"there is no operator {email}: see operator_create")
        self.stdout.write(json.dumps({"email": user.email, "link": password_link(user)}))
