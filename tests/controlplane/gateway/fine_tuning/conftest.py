"""A real web server over real servers; no trainer is started, so jobs wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live import LiveStack
from tests.site import Site


@pytest.fixture(scope="module")
def site(live: LiveStack) -> Iterator[Site]:
    pool = live.with_pool("jobs")
    web, url = pool.start_web("jobs-web", LORIKEET_TENANT_TRAINING_RUNS="6")
    site = Site(pool, url, web)
    yield site
    with site.database() as connection:  # other modules' tests are on the same platform
        connection.execute("update training_trainingrun set status = 'cancelled'")
    web.stop()
