"""Add or update the base model of a folder: prints {"id", "name", "revision"}.

The folder is a Hugging Face model; lorikeet.json ({"name", "revision"}) is optional. Without an
argument, the folder is LORIKEET_BASE_MODEL.
"""

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from contract.base_model import NotABaseModel, find_base_model
from controlplane.adapters import services
from controlplane.adapters.base_model_folder import configured_base_model
from controlplane.errors import ApiError


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path, nargs="?")

    def handle(self, *, folder: Path | None, **options: Any) -> None:
        try:
            found = find_base_model(folder) if folder else configured_base_model()
            if found is None:
                raise CommandError("name a folder, or set LORIKEET_BASE_MODEL")
            base_model = services.base_model_add(
                name=found.name, revision=found.revision, config=found.config()
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
