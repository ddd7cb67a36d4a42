"""The queue's Redis: clients that count its failures, and one for code that needs it rarely."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import redis
import redis.asyncio.retry
from django.conf import settings
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from controlplane.errors import Unavailable
from controlplane.infra.metrics import REDIS_ERRORS


class _Counting:
    """A mixin for redis-py's `Retry` that counts attempts without an answer."""

    def call_with_retry(self, do: Any, fail: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def counted(*failure: Any) -> Any:
            REDIS_ERRORS.inc()
            return fail(*failure)

        return super().call_with_retry(do, counted, *args, **kwargs)  # type: ignore[misc]


class CountingRetry(_Counting, Retry):
    """A client's `retry`."""


class AsyncCountingRetry(_Counting, redis.asyncio.retry.Retry):
    """The same for a client of asyncio."""


@contextlib.contextmanager
def redis_client() -> Iterator[Any]:
    """Yield a client. Raises Unavailable when Redis does not answer inside the block."""
    try:
        with redis.Redis.from_url(
            settings.REDIS_URL,
            protocol=2,
            socket_timeout=5,
            retry=CountingRetry(ExponentialBackoff(cap=0.5, base=0.05), 3),
        ) as client:
            yield client
    except RedisError as error:
        raise Unavailable("The queue does not answer.") from error
