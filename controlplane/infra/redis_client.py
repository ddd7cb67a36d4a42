"""The queue's Redis, for code that needs it rarely: each block opens its own connection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis
from django.conf import settings
from redis.exceptions import RedisError

from controlplane.errors import Unavailable


@contextlib.contextmanager
def redis_client() -> Iterator[Any]:
    """Yield a client. Raises Unavailable when Redis does not answer inside the block."""
    try:
        with redis.Redis.from_url(settings.REDIS_URL, protocol=2, socket_timeout=5) as client:
            yield client
    except RedisError as error:
        raise Unavailable("The queue does not answer.") from error
