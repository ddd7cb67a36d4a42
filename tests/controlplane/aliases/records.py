"""Ended requests of an alias's targets, and how the accountant takes them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from contract.messages.protocol import DoneRecord
from controlplane.aliases import services
from controlplane.aliases.models import Alias, AliasRevision
from controlplane.usage.services import usage_settle

KEY_ID = str(uuid.uuid4())
Commits = Callable[..., Any]


def record(alias: Alias, target: str, *, number: int | None = None, **fields: Any) -> DoneRecord:
    """A request that a target of the alias's current (or numbered) revision has answered."""
    return DoneRecord(
        **{
            "request_id": f"req_{uuid.uuid4().hex}",
            "tenant_id": str(alias.tenant_id),
            "api_key_id": KEY_ID,
            "worker_id": "w1",
            "lease": 1,
            "model": alias.name,
            "base_model": "tiny",
            "adapter_version_id": None,
            "alias_revision_id": str(services.revision_get(alias=alias, number=number).pk),
            "alias_target": target,
            "digests": ("d",),
            "finish_reason": "stop",
            "error_code": None,
            "prompt_tokens": 11,
            "cached_tokens": 0,
            "completion_tokens": 11,
            "created_at": timezone.now().timestamp(),
            "queue_ms": 900.0,
            "load_ms": 80.0,
            "first_token_ms": 1000.0,
            "total_ms": 1200.0,
            **fields,
        }
    )


def records(alias: Alias, target: str, count: int, **fields: Any) -> list[DoneRecord]:
    return [record(alias, target, **fields) for _ in range(count)]


def failed(alias: Alias, target: str, count: int) -> list[DoneRecord]:
    return records(alias, target, count, finish_reason="error", error_code="internal")


@pytest.fixture
def settle(django_capture_on_commit_callbacks: Commits) -> Callable[..., None]:
    """Settle records as the accountant does, and do what follows the commit."""

    def run(*batches: list[DoneRecord]) -> None:
        with django_capture_on_commit_callbacks(execute=True):
            usage_settle([record for batch in batches for record in batch])

    return run


def now_of(alias: Alias) -> AliasRevision:
    alias.refresh_from_db()
    return services.revision_get(alias=alias)
