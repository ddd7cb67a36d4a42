"""The time that a schema takes does not disclose what another tenant has sent."""

from __future__ import annotations

import random
import re
import time
import uuid
from typing import Any

import pytest

from controlplane.schemas import BadSchema, Plan, plan
from controlplane.tenancy.scoping import all_tenants, tenant_scope

DRAW = random.Random()
ONE, OTHER = uuid.uuid4(), uuid.uuid4()


def new_name() -> str:
    return "".join(DRAW.choices("abcdefghij", k=12))


def new_schema(num_properties: int = 12) -> dict[str, Any]:
    """Return a schema, with patterns, that nobody has sent before."""
    items = [{"type": "string", "pattern": f"^{new_name()}[0-9]{{1,9}}$"} for _ in range(10)]
    return {
        "type": "object",
        "properties": {
            new_name(): {"type": "array", "items": items[number % 10]}
            for number in range(num_properties)
        },
    }


def of(tenant: uuid.UUID, schema: dict[str, Any]) -> Plan:
    with tenant_scope(tenant):
        return plan(schema)


def test_a_plan_is_kept_for_its_tenant_alone() -> None:
    schema = new_schema()
    made = of(ONE, schema)
    assert of(ONE, schema) is made
    assert of(OTHER, schema) is not made
    assert of(ONE, schema) is made
    assert plan(schema) is not plan(schema), "nothing is kept outside a tenant's scope"
    with all_tenants(reason="a test"):
        assert plan(schema) is not plan(schema)


def test_so_is_a_refusal() -> None:
    schema = new_schema(60) | {"$ref": "#"}

    def seconds(tenant: uuid.UUID) -> float:
        began = time.thread_time()
        with tenant_scope(tenant), pytest.raises(BadSchema, match="without end"):
            plan(schema)
        return time.thread_time() - began

    first, known = seconds(ONE), min(seconds(ONE) for _ in range(5))
    assert known < first / 2
    assert seconds(OTHER) > first / 2


def test_python_keeps_no_pattern_of_a_tenants() -> None:
    """It keeps compiled ones for the whole process."""
    pattern, name, wrong = (f"^{new_name()}" for _ in range(3))
    of(ONE, {"type": "string", "pattern": pattern})
    of(ONE, {"type": "object", "patternProperties": {name: {}}})
    with pytest.raises(BadSchema):
        of(ONE, {"type": "string", "pattern": f"{wrong}("})
    kept = str([*re._cache, *getattr(re, "_cache2", ())])  # type: ignore[attr-defined]
    for each in (pattern, name, wrong):
        assert each not in kept


def test_a_schema_of_another_tenant_takes_the_time_of_a_new_one() -> None:
    same, fresh = [], []
    for _ in range(12):
        theirs, mine = new_schema(), new_schema()
        of(ONE, theirs)
        for schema, times in DRAW.sample([(theirs, same), (mine, fresh)], 2):
            began = time.thread_time()
            of(OTHER, schema)
            times.append(time.thread_time() - began)
    assert 0.6 < min(same) / min(fresh) < 1.7
