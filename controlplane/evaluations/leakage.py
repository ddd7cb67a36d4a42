"""Find cases whose prompts are among the rows that a version was trained on.

Such a case tells what the version knows by heart. Prompts are compared without regard to case,
blanks and Unicode's forms; a prompt is what comes before any answer of the assistant.
"""

from __future__ import annotations

import hashlib
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from django.db.models import Q

from contract import chat_rows
from contract.line_reader import lines
from contract.row_messages import Row
from controlplane.errors import Unavailable
from controlplane.infra import storage
from controlplane.training import contents
from controlplane.training.models import TrainingRun

#: Of versions that begin from each other. A dataset that grows has most rows of those before.
MOST_GENERATIONS = 8

#: Each message's role and text.
Messages = Sequence[Mapping[str, Any]]


class RowsGone(Exception):
    """The rows that a version was trained on are no longer stored."""


def prompt_digest(messages: Messages) -> str:
    """Return the digest of a prompt.

    System messages, which many prompts share, count only where there are no others.
    """
    digest = hashlib.sha256()
    others = [each for each in messages if each["role"] not in ("system", "developer")]
    for message in others or messages:
        text = unicodedata.normalize("NFKC", str(message.get("content") or ""))
        digest.update(f"{message['role']}\0{' '.join(text.casefold().split())}\0".encode())
    return digest.hexdigest()


def digests_of_rows(rows: Iterable[Row | chat_rows.Problem]) -> Iterator[str]:
    """Yield the digests of the prompts in rows of a dataset, some of them more than once."""
    for row in rows:
        if not isinstance(row, chat_rows.Problem):
            for end in _ends(row):
                yield prompt_digest(row.messages[:end])


def _ends(row: Row) -> Iterator[int]:
    for number, message in enumerate(row.messages):  # a completion has none, and no case is one
        if message["role"] == "assistant":
            yield number


def trained_digests(version_id: uuid.UUID, among: Set[str]) -> set[str]:
    """Return which of some digests are of prompts on which a version was trained.

    So was the version that it begins from; of those before, MOST_GENERATIONS are looked at, if
    their rows are still stored. Of an uploaded version none is known. A dataset's own digests may
    be many: they are not kept. Raises RowsGone, Unavailable when the store does not answer.
    """
    known: set[str] = set()
    for number, sha256 in enumerate(_trained_on(version_id)):
        try:
            found = lines(contents.pieces(sha256), max_bytes=chat_rows.MAX_LINE_BYTES)
            digests = digests_of_rows(chat_rows.read_rows(found))
            known |= {digest for digest in digests if digest in among}
        except storage.ObjectMissing as error:
            if not number:
                raise RowsGone from error
        except storage.STORAGE_ERRORS as error:
            raise Unavailable("The object store does not answer.") from error
    return known


def _trained_on(version_id: uuid.UUID) -> list[str]:
    """Return the contents of a version's datasets: its own, and those that it began from."""
    found: list[str] = []
    maker: uuid.UUID | None = version_id
    for _ in range(MOST_GENERATIONS):
        made_it = Q(version_id=maker) | Q(checkpoints__version_id=maker)
        run = TrainingRun.objects.filter(made_it).first() if maker else None
        if run is None:
            break
        found.append(run.dataset_sha256)
        maker = run.warm_start_id
    return list(dict.fromkeys(found))
