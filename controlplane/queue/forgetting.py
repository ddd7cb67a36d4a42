"""Drop deleted data from Redis's append-only file.

Redis appends every command to its file, so prompts and answers stay there after their requests have
ended and their keys are gone. Only a rewrite of the file, from the keys that exist, drops them.
"""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from redis.exceptions import ResponseError

log = logging.getLogger(__name__)

#: The lock of the last process that had the file rewritten; it expires when the next may.
KEY = "aof:rewritten"


def file_rewrite_if_due(client: Any) -> bool:
    """Have Redis rewrite its file in the background, at most once in a while.

    Raises redis.exceptions.RedisError when Redis does not answer.
    """
    if not client.set(KEY, 1, nx=True, ex=settings.REDIS_REWRITE_S):
        return False
    try:
        state = client.info("persistence")
        if not state.get("aof_enabled"):
            return False  # it would write one all the same
        if state.get("aof_last_bgrewrite_status") != "ok":
            log.error("Redis could not rewrite its file: ended requests' words are still in it")
        if client.config_get("aof-use-rdb-preamble").get("aof-use-rdb-preamble") != "no":
            # Blocks of streams would be copied as they are in memory, with what was deleted.
            log.warning("Redis needs --aof-use-rdb-preamble no to forget ended requests' words")
        client.bgrewriteaof()
    except ResponseError as error:  # a rewrite is under way, or this user may not
        log.warning("Redis does not rewrite its file: %s", error)
        return False
    return True
