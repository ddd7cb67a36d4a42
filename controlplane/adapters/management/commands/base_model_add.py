"""Add or update the base model of a folder: prints {"id", "name", "revision"}.

The folder is a Hugging Face model; lorikeet.json ({"name", "revision"}) is optional. Without an
argument, the folder is LORIKEET_BASE_MODEL.
"""

import json
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from contract.adapters import base_claim
from contract.adapters.base_model import NotABaseModel, find_base_model
from controlplane.adapters import services
from controlplane.adapters.base_model_folder import configured_base_model
from controlplane.errors import ApiError


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path, nargs="?")
        parser.add_argument(
            "--known-name",
            action="append",
            default=[],
            help="another name of it, such as org/name on the Hub, which adapters may claim as "
            "their base; may be repeated",
        )

    def handle(self, *, folder: Path | None, known_name: list[str], **options: Any) -> None:
        try:
            found = find_base_model(folder) if folder else configured_base_model()
            if found is None:
                raise CommandError("name a folder, or set LORIKEET_BASE_MODEL")
            names = [*known_name, *base_claim.repositories(str(found.path))]
            if folder is None and settings.BASE_MODEL_REPOSITORY:
                names.append(settings.BASE_MODEL_REPOSITORY)
            base_model = services.base_model_add(
                name=found.name, revision=found.revision, config=found.config(), known_names=names
            )
        except NotABaseModel as error:
            raise CommandError(str(error)) from error
        except ApiError as error:
            raise CommandError(error.message) from error
        self.stdout.write(
            json.dumps(
                {
                    "id": str(base_model.id),
                    "name": base_model.name,
                    "revision": base_model.revision,
                }
            )
        )
