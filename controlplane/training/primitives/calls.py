"""The calls of training clients in Redis: queued, done by a trainer, and asked for by their client.

A client's calls are done in the order in which they came. All keys have the tenant's id: a client
finds its own tenant's calls alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis
from django.conf import settings
from redis.exceptions import RedisError

from controlplane.errors import PayloadTooLarge, RateLimited, Unavailable

#: Bounds of a tenant's calls that wait.
MAX_PENDING, MAX_PENDING_BYTES = 64, 64 << 20
#: Bound of a tenant's results that are kept.
MAX_KEPT_BYTES = 128 << 20
#: Seconds until a call that no trainer took is forgotten, and a result that nobody fetched.
QUEUED_S, DONE_S = 6 * 3600, 900
#: Seconds for which a result is kept that was fetched, in case its client did not get it.
FETCHED_S = 60
#: Seconds without a word from a trainer after which another one may begin.
LEASE_S = 30

#: Keys that are looked at together.
_SCAN = 1000

_ENQUEUE = """
if redis.call('exists', KEYS[1]) == 1 then return 0 end
local size, sizes = tonumber(ARGV[2]), redis.call('hvals', KEYS[3])
if #sizes >= tonumber(ARGV[3]) then return 1 end
for _, each in ipairs(sizes) do size = size + tonumber(each) end
if size > tonumber(ARGV[4]) then return 1 end
redis.call('hset', KEYS[1], 'kind', ARGV[6], 'said', ARGV[7], 'body', ARGV[8])
redis.call('expire', KEYS[1], ARGV[5])
redis.call('hset', KEYS[3], ARGV[1], ARGV[2])
redis.call('rpush', KEYS[2], ARGV[1])
redis.call('sadd', KEYS[4], ARGV[9])
return 0
"""
_FINISH = """
local is_known = redis.call('exists', KEYS[1])
if is_known == 1 then
  redis.call('hdel', KEYS[1], 'body')
  redis.call('hset', KEYS[1], 'result', ARGV[2], 'out', ARGV[3])
  redis.call('expire', KEYS[1], ARGV[4])
end
redis.call('hdel', KEYS[3], ARGV[1])
redis.call('lrem', KEYS[2], 1, ARGV[1])
if redis.call('llen', KEYS[2]) == 0 then redis.call('srem', KEYS[4], ARGV[5]) end
return is_known
"""
_RENEW = """
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('expire', KEYS[1], ARGV[2]) end
return 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a client.

    id    the client's name of it, unique in the tenant
    kind  what is to be done; `said` with what, and `body`, the rows of a pass
    """

    id: str
    tenant_id: uuid.UUID
    base_id: uuid.UUID
    client_id: uuid.UUID
    kind: str
    said: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    @property
    def _keys(self) -> list[str]:
        own = _key(f"{self.tenant_id}:")
        return [
            f"{own}call:{self.id}",
            f"{own}queue:{self.client_id}",
            f"{own}pending",
            _key(f"waiting:{self.base_id}"),
        ]

    @property
    def _place(self) -> str:
        return f"{self.tenant_id} {self.client_id}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call: `said`, with `error` and `category` if it failed; `out`, bytes."""

    said: dict[str, Any]
    out: bytes = b""


def _key(rest: str) -> str:
    return f"tk:{{{settings.POOL}}}:{rest}"


@functools.cache
def _client(url: str) -> Any:
    return redis.Redis.from_url(url, protocol=2, socket_timeout=5, socket_connect_timeout=5)


@contextlib.contextmanager
def _redis() -> Iterator[Any]:
    try:
        yield _client(settings.REDIS_URL)
    except RedisError as error:
        raise Unavailable("The queue does not answer.") from error


def enqueue(call: Call) -> None:
    """Queue a call; one with the same id is not queued again. Raises RateLimited, Unavailable."""
    size = len(call.body)
    if size > MAX_PENDING_BYTES:
        raise PayloadTooLarge(f"A call may have {MAX_PENDING_BYTES} bytes at most.")
    check_room(call.tenant_id)
    bounds = (MAX_PENDING, MAX_PENDING_BYTES, QUEUED_S)
    said = json.dumps(call.said)
    with _redis() as client:
        is_refused = client.eval(
            _ENQUEUE,
            4,
            *call._keys,
            call.id,
            size,
            *bounds,
            call.kind,
            said,
            call.body,
            call._place,
        )
    if is_refused:
        raise RateLimited(
            f"{MAX_PENDING} calls, or {MAX_PENDING_BYTES >> 20} MiB, of your organization wait for "
            "the trainer. Wait for some of their results.",
            code="too_many_training_calls",
            retry_after_s=2,
        )


def check_room(tenant_id: uuid.UUID) -> None:
    """Raise RateLimited if the tenant's results fill the room that it has for them."""
    key = _kept_key(tenant_id)
    with _redis() as client:
        client.zremrangebyscore(key, 0, time.time())
        kept = sum(int(each.partition(b" ")[0]) for each in client.zrange(key, 0, -1))
    if kept > MAX_KEPT_BYTES:
        raise RateLimited(
            f"{MAX_KEPT_BYTES >> 20} MiB of results of your organization's calls are kept. Fetch "
            f"them, and wait {FETCHED_S} seconds.",
            code="too_many_training_results",
            retry_after_s=FETCHED_S,
        )


def _kept_key(tenant_id: uuid.UUID) -> str:
    return _key(f"{tenant_id}:kept")


def _note_kept(client: Any, tenant_id: uuid.UUID, call_id: str, out: bytes, keep_s: int) -> None:
    """Count a result's bytes until it is forgotten."""
    key = _kept_key(tenant_id)
    client.zadd(key, {f"{len(out)} {call_id}": time.time() + keep_s})
    client.expire(key, DONE_S)


def waiting(base_id: uuid.UUID) -> list[tuple[uuid.UUID, uuid.UUID]]:
    """Return the tenants and clients of a base that have calls in their queues."""
    with _redis() as client:
        places = client.smembers(_key(f"waiting:{base_id}"))
    pairs = (place.decode().split() for place in places)
    return [(uuid.UUID(tenant), uuid.UUID(client)) for tenant, client in pairs]


def head(base_id: uuid.UUID, tenant_id: uuid.UUID, client_id: uuid.UUID) -> Call | None:
    """Return a client's first call; None: it has none, or it was forgotten."""
    of_whom: dict[str, Any] = {"tenant_id": tenant_id, "base_id": base_id, "client_id": client_id}
    with _redis() as client:
        queue = Call(id="", kind="", **of_whom)._keys[1]
        found = client.lindex(queue, 0)
        call_id = "" if found is None else found.decode()
        kept = client.hgetall(Call(id=call_id, kind="", **of_whom)._keys[0])
    if b"kind" in kept:
        said = json.loads(kept[b"said"])
        kind, body = kept[b"kind"].decode(), kept[b"body"]
        return Call(id=call_id, kind=kind, said=said, body=body, **of_whom)
    finish(Call(id=call_id, kind="", **of_whom), Result({}))  # it expired: the next one's turn
    return None


def finish(call: Call, result: Result) -> None:
    """Keep a call's result for its client, and let the client's next call follow."""
    with _redis() as client:
        said = json.dumps(result.said)
        args = (*call._keys, call.id, said, result.out, DONE_S, call._place)
        if client.eval(_FINISH, 4, *args):
            _note_kept(client, call.tenant_id, call.id, result.out, DONE_S)


def find(tenant_id: uuid.UUID, call_id: str) -> tuple[str, Result | None] | None:
    """Return a call's kind, and its result once it is there; None: there is no such call."""
    with _redis() as client:
        key = f"{_key(f'{tenant_id}:')}call:{call_id}"
        kind, said, out = client.hmget(key, "kind", "result", "out")
        if said is not None:
            client.expire(key, FETCHED_S)
            _note_kept(client, tenant_id, call_id, out or b"", FETCHED_S)
    if kind is None:
        return None
    return kind.decode(), None if said is None else Result(json.loads(said), out or b"")


def note_sample(tenant_id: uuid.UUID, call_id: str, result: Result | None, keep_s: int) -> None:
    """Keep a sample, which needs no trainer, or its result, for these seconds."""
    key = f"{_key(f'{tenant_id}:')}call:{call_id}"
    said: dict[str, Any] = {"kind": "sample"}
    if result is not None:
        said |= {"result": json.dumps(result.said), "out": result.out}
    with _redis() as client:
        client.hset(key, mapping=said)
        client.expire(key, keep_s)
        if result is not None:
            _note_kept(client, tenant_id, call_id, result.out, keep_s)


def forget(tenant_id: uuid.UUID) -> int:
    """Remove all calls of a tenant that is deleted. -> the number of keys"""
    with _redis() as client:
        for key in client.scan_iter(match=_key("waiting:*"), count=_SCAN):
            for place in client.sscan_iter(key, match=f"{tenant_id} *", count=_SCAN):
                client.srem(key, place)
        own = client.scan_iter(match=_key(f"{tenant_id}:*"), count=_SCAN)
        return sum(client.delete(key) for key in own)


def lease_take(base_id: uuid.UUID, boot: str) -> bool:
    """Become the trainer of a base's clients; False: there is one."""
    with _redis() as client:
        return bool(client.set(_key(f"trainer:{base_id}"), boot, nx=True, ex=LEASE_S))


def lease_renew(base_id: uuid.UUID, boot: str) -> bool:
    """Stay it; False: another one is."""
    with _redis() as client:
        return bool(client.eval(_RENEW, 1, _key(f"trainer:{base_id}"), boot, LEASE_S))


def lease_drop(base_id: uuid.UUID, boot: str) -> None:
    """Let another trainer begin at once."""
    with _redis() as client:
        client.eval(_RENEW, 1, _key(f"trainer:{base_id}"), boot, 0)


def has_trainer(base_id: uuid.UUID) -> bool:
    """Return whether a base's clients have a trainer now."""
    with _redis() as client:
        return bool(client.exists(_key(f"trainer:{base_id}")))


def wants_trainer(base_id: uuid.UUID) -> bool:
    """Return whether a message for a trainer is due: there is none, and none was sent just now."""
    if has_trainer(base_id):
        return False
    with _redis() as client:
        return bool(client.set(_key(f"sent:{base_id}"), 1, nx=True, ex=10))
