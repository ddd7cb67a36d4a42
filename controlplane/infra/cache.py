"""Django's cache, in the Redis that the platform has anyway."""

from __future__ import annotations

from django.core.cache.backends.redis import RedisCache

_BATCH = 500


class SharedCache(RedisCache):
    """Counters of sign-in attempts and used codes: every process has to see the same ones."""

    def clear(self) -> None:
        """Forget what is cached, and nothing else of this Redis."""
        client = self._cache.get_client(write=True)  # type: ignore[attr-defined]
        keys = list(client.scan_iter(match=self.make_key("*"), count=_BATCH))
        for start in range(0, len(keys), _BATCH):
            client.delete(*keys[start : start + _BATCH])
