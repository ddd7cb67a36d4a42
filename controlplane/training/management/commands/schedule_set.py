"""Set when a tenant's adapter is retrained: prints {"adapter", "cron", "timezone", "next_run_at"}.

--hyperparameters takes a JSON object; the trainer's defaults apply to all other hyperparameters.
--base-model makes the adapter if there is none. --run-now starts a run at once, too.
"""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.adapters.services import adapter_get
from controlplane.errors import ApiError
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.management.commands import find_tenant
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import schedules
from controlplane.training.schedules import services as schedule_services


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True, help="its slug")
        parser.add_argument("--adapter", required=True)
        parser.add_argument("--dataset", required=True)
        parser.add_argument("--cron", required=True, help='for example "30 2 * * *"')
        parser.add_argument("--timezone", default="UTC")
        parser.add_argument("--hyperparameters", default="{}")
        parser.add_argument("--base-model", default=None)
        parser.add_argument("--run-now", action="store_true")

    def handle(self, *, tenant: str, adapter: str, **options: Any) -> None:
        try:
            with tenant_scope(find_tenant(tenant).id):
                base_model = options["base_model"]
                schedule = schedule_services.schedule_set(
                    adapter=run_services.adapter_for(adapter, base_model)
                    if base_model
                    else adapter_get(name=adapter),
                    dataset_name=options["dataset"],
                    cron_line=options["cron"],
                    timezone_name=options["timezone"],
                    hyperparameters=json.loads(options["hyperparameters"]),
                )
                if options["run_now"]:
                    schedules.schedule_run_now(schedule)
        except ValueError as error:
            raise CommandError(f"--hyperparameters is not JSON: {error}") from error
        except ApiError as error:
            where = f"{error.param}: " if error.param else ""
            raise CommandError(where + error.message) from error
        self.stdout.write(
            json.dumps(
                {
                    "adapter": adapter,
                    "cron": schedule.cron,
                    "timezone": schedule.timezone,
                    "next_run_at": schedule.next_run_at.isoformat(),
                }
            )
        )
