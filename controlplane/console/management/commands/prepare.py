"""Prepare an installation's start: check its servers, migrate, print how to sign in.

Compose runs it at every start, before the other processes; a second run changes nothing. It makes
the bucket and lets the console's pages upload to it. If a server cannot be used, it ends within
seconds and says what to do. Until an operator has a password, it prints a link to choose one.
"""

from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from controlplane.console.signin.first_operator import first_operator, password_link
from controlplane.errors import ApiError
from controlplane.infra.health import preflight


class Command(BaseCommand):
    help = __doc__
    # They would need the database.
    requires_system_checks = []

    def handle(self, **options: Any) -> None:
        try:
            preflight.check_database("the owner of the tables", settings.DATABASE_OWNER)
            preflight.check_database("the application", settings.DATABASES["default"])
            preflight.check_redis("REDIS_URL", settings.REDIS_URL)
            preflight.check_redis("CELERY_BROKER_URL", settings.CELERY_BROKER_URL)
            preflight.check_store()
            kept = preflight.allow_uploads()
        except preflight.NotReady as error:
            raise CommandError(str(error)) from error
        call_command("migrate", interactive=False, verbosity=options["verbosity"])
        try:
            operator = first_operator(settings.OPERATOR_EMAIL)
        except ApiError as error:
            raise CommandError(f"LORIKEET_OPERATOR_EMAIL: {error.message}") from error
        if kept:
            self.stderr.write(kept)
        lines = ["", f"Lorikeet will be at {settings.BASE_URL}/admin/ (operators) and"]
        lines.append(f"{settings.BASE_URL}/console/ (tenants).")
        if operator is not None:
            lines += [
                f"The first operator is {operator.email}. Choose the password here, once:",
                f"  {password_link(operator)}",
            ]
        self.stdout.write("\n".join([*lines, ""]))
