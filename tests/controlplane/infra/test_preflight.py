"""What cannot be used at the start is named, with what to do about it, within seconds."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings as configured

from controlplane.infra import preflight, storage


def test_servers_that_are_well_pass(settings: Any) -> None:
    preflight.check_database("the application", configured.DATABASES["default"])
    preflight.check_redis("REDIS_URL", settings.REDIS_URL)
    settings.S3_BUCKET = f"preflight-{time.time_ns()}"
    preflight.check_store()  # makes the bucket
    preflight.check_store()
    assert list(storage.keys("")) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"PASSWORD": "wrong"}, "password authentication failed.*was made with another password"),
        ({"PORT": "1"}, "use PostgreSQL at 127.0.0.1:1: .*refused"),
        (
            {"HOST": "nowhere.invalid"},
            "use PostgreSQL at nowhere.invalid.*Name or service not known",
        ),
        ({"NAME": "nothing"}, 'database "nothing" does not exist'),
    ],
)
def test_a_database_that_cannot_be_used(change: dict[str, str], said: str) -> None:
    began = time.monotonic()
    with pytest.raises(preflight.NotReady, match=f"^the application cannot.*{said}"):
        preflight.check_database("the application", configured.DATABASES["default"] | change)
    assert time.monotonic() - began < 10


def test_a_redis_that_cannot_be_used() -> None:
    port = urlsplit(configured.REDIS_URL).port
    with pytest.raises(preflight.NotReady, match="REDIS_URL: Redis refuses the password"):
        preflight.check_redis("REDIS_URL", f"redis://:wrong@127.0.0.1:{port}/0")
    with pytest.raises(preflight.NotReady, match="REDIS_URL: Redis does not answer"):
        preflight.check_redis("REDIS_URL", "redis://127.0.0.1:1/0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"S3_ENDPOINT_URL": "http://127.0.0.1:1"}, "cannot be reached"),
        ({"S3_ACCESS_KEY_ID": "nobody"}, "it does not know S3_ACCESS_KEY_ID"),
        ({"S3_SECRET_ACCESS_KEY": "wrong"}, "S3_SECRET_ACCESS_KEY is not the one of"),
    ],
)
def test_a_store_that_cannot_be_used(
    settings: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    for name, value in change.items():
        setattr(settings, name, value)
    storage._client.cache_clear()
    try:
        began = time.monotonic()
        with pytest.raises(preflight.NotReady, match=said):
            preflight.check_store()
        assert time.monotonic() - began < 10
    finally:
        storage._client.cache_clear()
