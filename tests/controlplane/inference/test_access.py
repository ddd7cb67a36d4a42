"""What is kept in memory of who asks for what, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from controlplane import asgi
from controlplane.adapters.models import BaseModel
from controlplane.gateway import last_uses
from controlplane.inference import access
from controlplane.inference.model_selector import ModelSelector
from controlplane.tenants import auth
from tests.controlplane.conftest import Party

TINY = ModelSelector.model("tiny")


def slowly(query: Callable[..., Any]) -> Callable[..., Any]:
    """The query of a database that is busy."""

    def asked(*args: Any) -> Any:
        found = query(*args)
        time.sleep(access.CACHE_S)
        return found

    return asked


def test_what_took_its_time_to_be_found_is_kept_no_longer(
    acme: Party, base_model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the model was when it was asked for: it may have been deleted meanwhile."""
    principal = auth.authenticate(acme.header)
    access.resolve_now(principal, TINY)
    known = (acme.api_key.id, "tiny")
    assert access._names_known.fresh(known)
    monkeypatch.setattr(access, "model_resolve", slowly(access.model_resolve))
    monkeypatch.setattr(access, "limits_for", slowly(access.limits_for))
    access.resolve_now(principal, TINY)
    assert access._names_known.fresh(known) is None


async def test_a_server_that_ends_notes_whose_keys_were_used(
    acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[auth.Principal] = []
    monkeypatch.setattr(auth, "touch", noted.extend)
    principal = auth.Principal(tenant=acme.tenant, role=auth.Role.OWNER, api_key=acme.api_key)
    last_uses.note(principal)
    assert noted == []

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.shutdown"}

    async def send(event: Any) -> None:
        assert event == {"type": "lifespan.shutdown.complete"}

    await asgi.application({"type": "lifespan"}, receive, send)
    assert noted == [principal]
