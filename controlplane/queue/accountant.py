"""Write the workers' terminal records into PostgreSQL.

A record leaves Redis only when its rows are committed, and rows are unique by request, so a crash
anywhere repeats work and never counts twice. A record that can never become a row goes to the
dead letters. While PostgreSQL or Redis is away, the accountant waits.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from threading import Event
from typing import Any

import redis
from django.db import DataError, IntegrityError, connection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from contract.messages import protocol
from contract.messages.protocol import DoneRecord
from controlplane.infra.health.liveness import note_alive, show_alive
from controlplane.infra.metrics import USAGE_RECORDS
from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.infra.redis_client import CountingRetry
from controlplane.queue.dead_letters import dead_letters_collect, quarantine_sync
from controlplane.queue.reaper import Reaper
from controlplane.usage.services import usage_settle

log = logging.getLogger(__name__)

BATCH = 500
BLOCK_MS = 1000
#: Another accountant that has held records for this long without settling them is dead.
CLAIM_IDLE_MS = 60_000
MAX_BACKOFF_S = 10.0
LETTERS_INTERVAL_S = 2.0

#: What is raised for a record that can never become a row.
POISON = (ValueError, TypeError, KeyError, AttributeError, OverflowError, DataError, IntegrityError)

Entry = tuple[bytes, dict[bytes, bytes] | None]


class Accountant:
    """One consumer of a pool's `done` stream.

    stop  set it to end `run` after the batch in hand
    """

    def __init__(self, redis_url: str, pool: str, *, name: str | None = None) -> None:
        self.stop = Event()
        self._redis: Any = redis.Redis.from_url(
            redis_url,
            protocol=2,
            socket_connect_timeout=5,
            socket_timeout=5 + BLOCK_MS / 1000,
            # Asked again by the client, Redis would skip what the lost reply had brought.
            retry=CountingRetry(NoBackoff(), 0),
        )
        self._pool = pool
        self._reaper = Reaper(redis_url, pool)
        self._next_letters = 0.0
        self._key = protocol.done_key(pool)
        self._dead_letters = protocol.dead_letter_key(pool)
        self._name = name or socket.gethostname()
        self._backoff_s = 0.0

    def run(self) -> None:
        """Settle records until told to stop."""
        is_ready = False
        while not self.stop.is_set():
            note_alive()
            show_alive("accountant")
            try:
                if not is_ready:
                    self._prepare()
                    self._settle_pending()
                    is_ready = True
                self._settle(self._read(">"))
                self._settle(self._claim())
                self._look_after_the_pool()
                self._backoff_s = 0.0
            except (RedisError, *DATABASE_OUTAGE) as error:
                is_ready = False  # what was read and not settled is pending now
                connection.close()
                self._wait(error)

    def _look_after_the_pool(self) -> None:
        """Do what one process of the pool must do now and then."""
        self._reaper.turn_if_due()
        if time.monotonic() >= self._next_letters:
            self._next_letters = time.monotonic() + LETTERS_INTERVAL_S
            dead_letters_collect(self._redis, self._pool)
            quarantine_sync(self._redis, self._pool)

    def _wait(self, error: Exception) -> None:
        self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2 or 0.25)
        log.warning("records wait %.2g s: %r", self._backoff_s, error)
        self.stop.wait(self._backoff_s)

    def _prepare(self) -> None:
        try:
            self._redis.xgroup_create(self._key, protocol.ACCOUNTANT_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _settle_pending(self) -> None:
        """Settle what an earlier run read and did not; settled records leave the list."""
        while entries := self._read("0"):
            self._settle(entries)

    def _read(self, after: str) -> list[Entry]:
        reply = self._redis.xreadgroup(
            protocol.ACCOUNTANT_GROUP, self._name, {self._key: after}, count=BATCH, block=BLOCK_MS
        )
        return [entry for _, entries in reply for entry in entries]

    def _claim(self) -> list[Entry]:
        reply = self._redis.xautoclaim(
            self._key, protocol.ACCOUNTANT_GROUP, self._name, CLAIM_IDLE_MS, count=BATCH
        )
        claimed: list[Entry] = reply[1]
        return claimed

    def _settle(self, entries: list[Entry]) -> None:
        if not entries:
            return
        records: dict[bytes, DoneRecord] = {}
        for entry_id, fields in entries:
            payload = (fields or {}).get(protocol.PAYLOAD_FIELD, b"")
            try:
                records[entry_id] = DoneRecord.decode(payload)
            except POISON as error:
                self._dead_letter(entry_id, payload, error)
        try:
            usage_settle(list(records.values()))
        except POISON:
            self._settle_singly(records)
        self._forget(records)
        USAGE_RECORDS.labels("settled").inc(len(records))
        log.debug("settled %d records", len(records))

    def _settle_singly(self, records: dict[bytes, DoneRecord]) -> None:
        """Separate the records that fit from those that spoilt the batch."""
        for entry_id, record in list(records.items()):
            try:
                usage_settle([record])
            except POISON as error:
                del records[entry_id]
                self._dead_letter(entry_id, record.encode(), error)

    def _forget(self, entry_ids: Iterable[bytes]) -> None:
        ids = list(entry_ids)
        if ids:
            pipe = self._redis.pipeline()
            pipe.xack(self._key, protocol.ACCOUNTANT_GROUP, *ids)
            pipe.xdel(self._key, *ids)
            pipe.execute()

    def _dead_letter(self, entry_id: bytes, payload: bytes, error: Exception) -> None:
        log.error("a terminal record cannot be settled: %r", error)
        USAGE_RECORDS.labels("rejected").inc()
        self._redis.xadd(
            self._dead_letters,
            {protocol.PAYLOAD_FIELD: payload, b"source": self._key, b"reason": repr(error)[:500]},
            maxlen=protocol.DEAD_LETTER_MAX_LEN,
        )
        self._forget([entry_id])
