"""Back the installation up into a folder: database and object store. The platform may run.

A second backup into the same folder copies only new objects. The pepper and the keys of the object
store are not in it: keep the pepper elsewhere, without it no API key works after a restore.
"""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error

from controlplane.infra.storage import STORAGE_ERRORS
from controlplane.maintenance.backups.backing_up import back_up
from controlplane.maintenance.backups.folder import BackupError


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path)
        parser.add_argument(
            "--keep", type=int, help="number of backups to keep; older ones are removed"
        )

    def handle(self, *, folder: Path, keep: int | None, **options: Any) -> None:
        if keep is not None and keep < 1:
            raise CommandError("--keep must be at least 1")
        try:
            manifest = back_up(folder, say=self._say, keep=keep)
        except (BackupError, Error, OSError, *STORAGE_ERRORS) as error:
            raise CommandError(f"no backup was made: {str(error).strip()}") from error
        if manifest.num_missing:
            self._say(
                f"warning: rows name {manifest.num_missing} objects that the store does not have, "
                f"as {manifest.missing[0]}: see `missing` in the manifest"
            )
        self._say(
            f"made {folder}/backups/{manifest.name}: {sum(manifest.tables.values())} rows, "
            f"{manifest.objects['count']} objects"
        )

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()
