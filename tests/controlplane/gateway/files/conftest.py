"""A real web server for files: no worker is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live import LiveStack
from tests.site import Site


@pytest.fixture(scope="module")
def site(live: LiveStack) -> Iterator[Site]:
    pool = live.with_pool("files")
    web, url = pool.start_web(
        "files-web", LORIKEET_TENANT_STORAGE_BYTES=str(64 * 1024**2), DATABASE_POOL_SIZE="4"
    )
    site = Site(pool, url, web)
    for tenant in live.tenants:  # what other modules' tests, on the same platform, have left
        client = site.client(tenant)
        for file in client.files.list():
            client.files.delete(file.id)
    yield site
    web.stop()
