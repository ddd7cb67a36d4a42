from __future__ import annotations

import pytest

from controlplane.adapters.models import BaseModel
from controlplane.gateway.fine_tuning.views import JobsView
from controlplane.infra.web import threads
from controlplane.infra.web.threads import query_in_thread
from tests.controlplane.conftest import Party
from tests.controlplane.management.bound_world import World, make_world


@pytest.fixture
def world(acme: Party, base_model: BaseModel) -> World:
    return make_world(acme, base_model)


@pytest.fixture
def gateway_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have views of /v1 use the test's connection: they would close it, or take another."""
    monkeypatch.setattr(threads, "close_old_connections", lambda: None)
    monkeypatch.setattr(JobsView, "run_in_thread", staticmethod(query_in_thread))
