"""Spool: keeps the ends of requests on the worker's disk while Redis is away.

The worker may end before Redis is back. There is one file per worker id with a line per record,
synced before the flusher waits on. At the next start the lines are published again; the scripts
refuse what Redis already has, and the database stores a request's usage once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from contract.messages.protocol import DoneRecord, TokenEvent
from worker.serving.streams import EventUpdate

log = logging.getLogger(__name__)


class Spool:
    """Owns one file. Not safe for two processes; a worker id has one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spooled: set[str] = set()

    def add(self, gateway_id: str, news: Sequence[EventUpdate]) -> None:
        """Write the ends of requests among these updates, each once. A full disk is only logged.

        A request with several choices ends with several updates, which are taken in their order.
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
        """Return what an earlier run left, as (gateway, update), without an incomplete line."""
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
        """Remove the file: everything has reached Redis."""
        if self._spooled or self._path.exists():
            self._path.unlink(missing_ok=True)
            self._spooled.clear()
