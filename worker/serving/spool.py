"""Terminal records on the worker's disk while Redis is away, should the worker end meanwhile.

One file per worker id, a line per record, synced before the flusher waits on. What a line says is
published again at the next start; the scripts refuse what has been told already, and the database
takes a request's usage once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from contract.protocol import DoneRecord, TokenEvent
from worker.serving.streams import EventUpdate

log = logging.getLogger(__name__)


class Spool:
    """Owns one file. Not safe for two processes; a worker id has one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spooled: set[str] = set()

    def add(self, gateway_id: str, news: Sequence[EventUpdate]) -> None:
        """Keep what ends requests among these news, each once. A full disk is logged and survived.

        An end of several choices is several news: the scripts take the last only after the others.
        """
        ended = {item.event.request_id for item in news if item.done is not None} - self._spooled
        lines = [
            json.dumps(
                {
                    "gateway": gateway_id,
                    "event": item.event.to_dict(),
                    "entry": item.entry_id.decode(),
                    "counts": [item.emitted, item.prompt_tokens, item.cached_tokens],
                    "done": None if item.done is None else item.done.to_dict(),
                }
            )
            for item in news
            if item.event.request_id in ended
        ]
        if not lines:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write("".join(line + "\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            log.error("the spool cannot be written: %r", error)
            return
        self._spooled.update(ended)

    def read(self) -> list[tuple[str, EventUpdate]]:
        """What an earlier run left, as (gateway, news). A line that was cut off is left out."""
        found = []
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                fields = json.loads(line)
                emitted, prompt_tokens, cached_tokens = fields["counts"]
                done = fields["done"]
                news = EventUpdate(
                    event=TokenEvent.from_dict(fields["event"]),
                    entry_id=fields["entry"].encode(),
                    emitted=emitted,
                    prompt_tokens=prompt_tokens,
                    cached_tokens=cached_tokens,
                    done=None if done is None else DoneRecord.from_dict(done),
                )
                found.append((fields["gateway"], news))
            except (ValueError, TypeError, KeyError):
                log.warning("a line of the spool was cut off")
        return found

    def clear(self) -> None:
        """Everything has reached Redis."""
        if self._spooled or self._path.exists():
            self._path.unlink(missing_ok=True)
            self._spooled.clear()
