"""Add or update the base model of a folder: prints {"id", "name", "revision"}.

The folder is a Hugging Face model with config.json and lorikeet.json ({"name", "revision"}).
"""

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.adapters import services
from controlplane.errors import ApiError


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path)

    def handle(self, *, folder: Path, **options: Any) -> None:
        try:
            config = json.loads((folder / "config.json").read_text())
            manifest = json.loads((folder / "lorikeet.json").read_text())
            base_model = services.base_model_add(
                name=manifest["name"], revision=manifest["revision"], config=config
            )
        except (OSError, ValueError, KeyError) as error:
            raise CommandError(f"{folder} is not a base model's folder: {error}") from error
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
