"""Find cases whose prompts are among the rows that a version was trained on.

The version may know the answer to such a case by heart. Prompts are compared without regard to
case, blanks and Unicode's forms; a prompt is all messages before the first answer of the assistant.
"""

from __future__ import annotations

import hashlib
import unicodedata
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from django.db.models import Q

from contract.process.line_reader import lines
from contract.training import chat_rows
from contract.training.row_messages import Row
from controlplane.errors import Unavailable
from controlplane.infra import storage
from controlplane.training.datasets import contents
from controlplane.training.models import TrainingRun

#: Number of ancestors of a version that are searched: a growing dataset has their rows, too.
MOST_GENERATIONS = 8

#: The role and text of each message.
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
    """Yield the digests of the prompts in a dataset's rows, some of them repeatedly."""
    for row in rows:
        if not isinstance(row, chat_rows.Problem):
            for end in _ends(row):
                yield prompt_digest(row.messages[:end])


def _ends(row: Row) -> Iterator[int]:
    for number, message in enumerate(row.messages):  # no case is a completion, which has none
        if message["role"] == "assistant":
            yield number


def trained_digests(version_id: uuid.UUID, among: Set[str]) -> set[str]:
    """Return those of the digests whose prompts a version was trained on.

    Its ancestors count, too: MOST_GENERATIONS are searched, if their rows are still stored. An
    uploaded version has no known prompts. A dataset's digests may be many and are not kept. Raises
    RowsGone, Unavailable when the store does not answer.
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
    """Return the contents of a version's datasets: its own, and those of its ancestors."""
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
