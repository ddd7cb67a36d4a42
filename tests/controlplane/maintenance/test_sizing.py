"""What a request takes of Redis and PostgreSQL, as docs/sizing.md says."""

from __future__ import annotations

import dataclasses
import re
import uuid
from pathlib import Path

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenancy.scoping import tenant_scope
from controlplane.usage.models import UsageRecord
from demo.stack import EmbeddedStack
from tests.controlplane.conftest import Party
from tests.queue_rig import QueueRig

DOC = (Path(__file__).parents[3] / "docs" / "sizing.md").read_text()
PROMPT = 4000
NUMBER = 2000


def said(pattern: str) -> float:
    found = re.search(pattern, DOC)
    assert found is not None, pattern
    return float(found[1])


def test_a_waiting_request_takes_its_prompt_and_a_kilobyte_or_two(stack: EmbeddedStack) -> None:
    rig = QueueRig(stack.env["REDIS_URL"].removesuffix("/0") + "/10")
    try:
        rig.client.flushdb()
        before = rig.client.info("memory")["used_memory"]
        for _ in range(NUMBER):
            job = dataclasses.replace(rig.job("tenant"), text="x" * PROMPT)
            rig.admit(job)
        each = (rig.client.info("memory")["used_memory"] - before) / NUMBER
    finally:
        rig.client.flushdb()
        rig.close()
    beyond = (each - PROMPT) / 1000
    limit = said(r"its prompt and at most (\d+) KB")
    assert limit / 3 < beyond < limit, beyond


@pytest.mark.django_db
def test_rows_per_million_requests(acme: Party) -> None:
    now = timezone.now()
    common = {
        "api_key_id": acme.api_key.id,
        "model": "invoices",
        "base_model": "llama-3.1-8b",
        "prompt_tokens": 500,
        "completion_tokens": 100,
        "finish_reason": "stop",
    }
    with tenant_scope(acme.tenant.id):
        for model in (UsageRecord, InferenceRequest):
            for _ in range(4):
                rows = []
                for _ in range(NUMBER // 4):
                    name = uuid.uuid4()
                    fields = {**common, "request_id": name.hex, "adapter_version_id": name}
                    if model is UsageRecord:
                        fields["occurred_at"] = now
                    else:
                        fields |= {
                            "accepted_at": now,
                            "worker_id": "worker-0",
                            "endpoint": "/v1/chat/completions",
                            "digests": [name.hex * 2],
                            "weights": [1.0],
                            "sampling": {"temperature": 0.7, "max_tokens": 256},
                        }
                    rows.append(model(**fields))
                model.objects.bulk_create(rows)
    # In tables of their own: what other tests took back counts in the size of the real ones.
    with connection.cursor() as cursor, tenant_scope(acme.tenant.id):
        total = 0
        for number, model in enumerate((UsageRecord, InferenceRequest)):
            table = model._meta.db_table
            cursor.execute(f"create temp table sized{number} (like {table} including all)")
            cursor.execute(f"insert into sized{number} select * from {table}")
            cursor.execute(f"select count(*) from sized{number}")
            assert cursor.fetchone() == (NUMBER,)
            cursor.execute(f"select pg_total_relation_size('sized{number}')")
            total += int(cursor.fetchone()[0])
        gigabytes = total / NUMBER * 1e6 / 1e9
    limit = said(r"a million requests take at most (\d+\.?\d*) GB")
    assert limit / 2.5 < gigabytes < limit, gigabytes
