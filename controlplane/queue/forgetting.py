"""What Redis has forgotten leaves its file too.

Redis appends every command to its file: prompts and answers among them, which so rest there after
their requests have ended and their keys are gone. Only writing the file anew, from what Redis still
has, drops them.
"""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from redis.exceptions import ResponseError

log = logging.getLogger(__name__)

#: Held by whoever has had the file written anew, until the next time.
KEY = "aof:rewritten"


def file_rewrite_if_due(client: Any) -> bool:
    """Have Redis write its file anew, in the background; once in a while, whoever asks.

    Raises redis.exceptions.RedisError when Redis does not answer.
    """
    if not client.set(KEY, 1, nx=True, ex=settings.REDIS_REWRITE_S):
        return False
    try:
        state = client.info("persistence")
        if not state.get("aof_enabled"):
            return False  # it would write one all the same
        if state.get("aof_last_bgrewrite_status") != "ok":
            log.error("Redis could not write its file anew: ended requests' words are still in it")
        if client.config_get("aof-use-rdb-preamble").get("aof-use-rdb-preamble") != "no":
            # Blocks of streams would be copied as they are in memory, with what was deleted.
            log.warning("Redis needs --aof-use-rdb-preamble no to forget ended requests' words")
        client.bgrewriteaof()
    except ResponseError as error:  # one is going on, or this user may not
        log.warning("Redis does not write its file anew: %s", error)
        return False
    return True
