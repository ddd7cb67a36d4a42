"""Restore the newest backup of a folder, or the one named by --at, into an empty installation.

The platform's processes must be stopped. The backup is checked as a whole first; --check does only
that. A backup of an older version is migrated. --force replaces what the installation has.
"""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error

from controlplane.infra.storage import STORAGE_ERRORS
from controlplane.maintenance.backups.folder import BackupError
from controlplane.maintenance.backups.restoring import check, notes, restore


class Command(BaseCommand):
    help = __doc__
    # Checks would need tables.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path)
        parser.add_argument("--at", help="the name of a backup in the folder")
        parser.add_argument("--check", action="store_true", help="only check the backup")
        parser.add_argument("--force", action="store_true")

    def handle(
        self, *, folder: Path, at: str | None, check: bool, force: bool, **options: Any
    ) -> None:
        try:
            if check:
                _, manifest = _check(folder, name=at, say=self._say)
                self._say(f"the backup {manifest.name} is complete")
                return
            manifest = restore(folder, name=at, force=force, say=self._say)
        except (BackupError, Error, OSError, *STORAGE_ERRORS) as error:
            raise CommandError(str(error).strip()) from error
        self._say(
            f"restored {manifest.name}: {sum(manifest.tables.values())} rows, "
            f"{manifest.objects['count']} objects"
        )
        for note in notes():
            self._say(f"next: {note}")

    def _say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


_check = check
