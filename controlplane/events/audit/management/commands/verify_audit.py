"""Verify every audit trail: print {"chains", "events", "faults"}, and fail if there are faults.

--heads FILE also detects a trail that was cut at its end: the command writes the last event of each
chain to FILE and checks that the events of the run before still exist. Keep FILE where the
database's administrators cannot write.
"""

import json
import uuid
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.events.audit.services import Head, chain_ids, verify

_PLATFORM = "platform"


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--heads", type=Path)

    def handle(self, *, heads: Path | None, **options: Any) -> None:
        known = _read(heads)
        found: dict[str, Head] = {}
        faults: dict[str, list[str]] = {}
        for name in sorted({*map(_name, chain_ids()), *known}):
            tenant_id = None if name == _PLATFORM else uuid.UUID(name)
            found[name], wrong = verify(tenant_id, known.get(name))
            if wrong:
                faults[name] = wrong
        num_events = sum(head.seq for head in found.values())
        report = {"chains": len(found), "events": num_events, "faults": faults}
        self.stdout.write(json.dumps(report))
        if faults:
            raise CommandError(f"{len(faults)} audit trails were tampered with")
        if heads:
            heads.write_text(json.dumps({name: [h.seq, h.hash] for name, h in found.items()}))


def _name(tenant_id: uuid.UUID | None) -> str:
    return str(tenant_id) if tenant_id else _PLATFORM


def _read(heads: Path | None) -> dict[str, Head]:
    if heads is None or not heads.exists():
        return {}
    try:
        return {name: Head(*head) for name, head in json.loads(heads.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CommandError(f"{heads} was not written by this command: {error}") from error
