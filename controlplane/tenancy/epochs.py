"""Epochs show a gateway without PostgreSQL whether its cached rows are still valid.

Redis has one counter, the clock, for the platform. Each committed write to a watched table (keys,
roles, models, limits) advances it and notes the new time as the one at which its tenant moved, or
all tenants. A gateway reads the clock twice a second, and stamps rows that it reads from PostgreSQL
with the time that it knew before. Stamped rows are valid if neither their tenant nor all have moved
since. So reading and stamping cost a request nothing; Redis is asked only while PostgreSQL is away.

The database backend finds the writes, so that no code can forget to report them. The epoch moves
after the commit: a reader that saw the rows before has an older stamp. If Redis does not take it, a
thread tries again for as long as anything older may be used. If that fails, too (its process died
just then), cached rows end `settings.DATABASE_AWAY_S` after they were read, at the latest. After
Redis has restarted, or lost its data, no older stamp is valid: a move may be lost, too.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import re
import secrets
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

import redis
from django.conf import settings
from django.db.models import Model
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from controlplane.infra.outages import REDIS_OUTAGE
from controlplane.tenancy.scope import current

log = logging.getLogger(__name__)

CLOCK_KEY = "epochs"
#: Stands in place of a tenant's id.
ALL = "*"
READ_INTERVAL_S = 0.5
_RETRY_S = 0.5
#: Time limit of one call of Redis, for which a write or a request waits.
_TIMEOUT_S = 1.0

_MOVE = """
redis.call('HSETNX', KEYS[1], 'of', ARGV[1])
local now = redis.call('HINCRBY', KEYS[1], 'now', 1)
redis.call('SET', KEYS[2], now, 'EX', ARGV[2])
"""


class Time(NamedTuple):
    """A time of the clock; `clock` differs when Redis has restarted or lost its data."""

    clock: str
    now: int


class Stamp(NamedTuple):
    """The time at which something was read from PostgreSQL."""

    at: float  # time.monotonic()
    time: Time | None  # None: nothing was known of the clock

    @property
    def is_recent(self) -> bool:
        """Return whether its age still allows its use without PostgreSQL."""
        return time.monotonic() < self.at + settings.DATABASE_AWAY_S


_known: Time | None = None
#: Reader of this process, while it runs.
_reader: EpochReader | None = None


def stamp() -> Stamp:
    """Return the stamp for rows that are read from now on."""
    return Stamp(time.monotonic(), _known)


class _Watched(NamedTuple):
    ignored: frozenset[str]
    is_shared: bool
    has_inserts: bool


_watched: dict[str, _Watched] = {}
_WRITE = re.compile(r'\s*(update|delete\s+from|insert\s+into|merge\s+into)\s+"?(\w+)', re.I)
#: An UPDATE that assigns values, up to its WHERE.
_ASSIGNED = re.compile(r'UPDATE "\w+" SET ((?:"\w+" = (?:%s|NULL)(?:, )?)+) WHERE ')


def watch(
    model: type[Model],
    *,
    ignored: Iterable[str] = (),
    is_shared: bool = False,
    has_inserts: bool = False,
) -> None:
    """Let writes to the model's table move epochs.

    ignored      columns that say nothing about what anybody may do
    is_shared    its rows belong to no tenant: each write moves all epochs
    has_inserts  new rows also take rights away
    """
    _watched[model._meta.db_table] = _Watched(frozenset(ignored), is_shared, has_inserts)


def moved_by(sql: str) -> str | None:
    """Return the epoch that a statement moves: the id of the tenant in scope, `ALL`, or None."""
    write = _WRITE.match(sql)
    watched = _watched.get(write[2]) if write else None
    if write is None or watched is None:
        return None
    if write[1].lower().startswith("insert") and not watched.has_inserts:
        return None
    if watched.ignored and (assigned := _ASSIGNED.match(sql)):
        if watched.ignored.issuperset(re.findall(r'"(\w+)"', assigned[1])):
            return None
    scope = current.get()
    return str(scope) if isinstance(scope, uuid.UUID) and not watched.is_shared else ALL


def moved_key(whose: str) -> str:
    """Return the key of the time at which a tenant, or `ALL`, last moved."""
    return f"{CLOCK_KEY}:{whose}"


_late: collections.deque[tuple[str, float]] = collections.deque()
_late_lock = threading.Lock()


def move(whose: str) -> None:
    """Move the epoch of a tenant, or of `ALL`. Does not raise: it may happen later."""
    with _late_lock:
        if not _late:
            try:
                _move_now(whose)
                return
            except RedisError as error:
                log.warning("the epoch of %s moves later: %r", whose, error)
            threading.Thread(target=_move_late, name="late-epochs", daemon=True).start()
        _late.append((whose, time.monotonic()))


def _move_now(whose: str) -> None:
    # The time of a move outlives all cached rows that may be used without PostgreSQL.
    ttl_s = 2 * settings.MAX_DATABASE_AWAY_S
    _client()[1](keys=[CLOCK_KEY, moved_key(whose)], args=[secrets.token_hex(8), ttl_s])


def _move_late() -> None:
    """Move epochs that could not be moved in time, while it matters."""
    while True:
        time.sleep(_RETRY_S)
        is_away = False
        while not is_away:
            with _late_lock:
                whose, since = _late[0]
            try:
                if time.monotonic() < since + settings.DATABASE_AWAY_S:
                    _move_now(whose)
            except RedisError:
                is_away = True
                continue
            with _late_lock:
                _late.popleft()
                if not _late:
                    return


@functools.cache
def _client() -> tuple[Any, Any]:
    """Return this process's client and its script."""
    client = redis.Redis.from_url(
        settings.REDIS_URL,
        protocol=2,
        socket_connect_timeout=_TIMEOUT_S,
        socket_timeout=_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),  # in case Redis has closed the connection
    )
    return client, client.register_script(_MOVE)


class EpochReader:
    """A reader of the epochs for a gateway.

    client  of redis.asyncio
    """

    def __init__(self, client: Any) -> None:
        self._redis = client

    async def run(self) -> None:
        """Keep the clock's time known, and answer `hold`, until cancelled."""
        global _reader
        _reader = self
        try:
            while True:
                try:
                    await self.read()
                except REDIS_OUTAGE as error:
                    log.debug("the clock of epochs was not read: %r", error)
                await asyncio.sleep(READ_INTERVAL_S)
        finally:
            if _reader is self:
                _reader = None

    async def read(self) -> None:
        global _known
        _known, _ = await self._ask()

    async def _ask(self, *whose: str) -> tuple[Time, list[int]]:
        """Return the clock's time, and the times of these epochs' last moves (0: not lately)."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.hsetnx(CLOCK_KEY, "of", secrets.token_hex(8))
        pipe.hmget(CLOCK_KEY, "of", "now")
        pipe.info("server")
        for each in whose:
            pipe.get(moved_key(each))
        _, (of, now), server, *moved = await pipe.execute()
        clock = Time(f"{of.decode()} {server['run_id']}", int(now or 0))
        return clock, [int(value or 0) for value in moved]

    async def hold(self, tenant_id: uuid.UUID | None, read: Stamp) -> bool:
        """Return whether rows read at this time or later may be used without PostgreSQL.

        tenant_id  the owner; None: the platform
        False in any doubt, also when Redis does not answer.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                time, moved = await self._ask(ALL, *([] if tenant_id is None else [str(tenant_id)]))
        except (*REDIS_OUTAGE, TimeoutError) as error:
            log.warning("Redis does not answer while PostgreSQL is away: %r", error)
            return False
        return (
            read.is_recent
            and read.time is not None
            and read.time.clock == time.clock
            and max(moved) <= read.time.now <= time.now
        )


async def hold(tenant_id: uuid.UUID | None, read: Stamp) -> bool:
    """Do as `EpochReader.hold`; False in a process that reads no epochs."""
    return _reader is not None and await _reader.hold(tenant_id, read)
