"""Django's cache, in the queue's Redis."""

from __future__ import annotations

from django.core.cache.backends.redis import RedisCache

_BATCH = 500


class SharedCache(RedisCache):
    """The counters of sign-in attempts and the used codes, shared by all processes."""

    def clear(self) -> None:
        """Delete the cached entries; other data in this Redis stays."""
        client = self._cache.get_client(write=True)  # type: ignore[attr-defined]
        keys = list(client.scan_iter(match=self.make_key("*"), count=_BATCH))
        for start in range(0, len(keys), _BATCH):
            client.delete(*keys[start : start + _BATCH])
