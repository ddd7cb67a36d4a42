"""An adapter with a gate, and a pool that answers as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from django.db import transaction

from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.evaluations import asking, services, suites
from controlplane.evaluations.asking import Asked
from controlplane.evaluations.models import Case, Evaluation
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.conftest import Party, as_key

NUM_CASES = 120
EXACT = [{"type": "exact"}]
Source = AdapterVersion.Source
#: Model -> whether it answers a case right.
Skill = Callable[[Case], bool]


@pytest.fixture
def scope(acme: Party, base_model: BaseModel) -> Iterator[Party]:
    with tenant_scope(acme.tenant.id):
        yield acme


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> dict[str, Skill]:
    """What each model can; it answers in place of workers."""
    skills: dict[str, Skill] = {}

    def ask(
        evaluation: Evaluation, caller: Any, cases: Sequence[Case], is_held: Any
    ) -> list[Asked]:
        can = skills[evaluation.model]
        found = [(case, can(case)) for case in cases]
        return [
            Asked(
                case=case,
                output=case.expected if is_right else "?",
                finish_reason="stop",
                logprob=-2.0 if is_right else -9.0,
                num_tokens=4,
            )
            for case, is_right in found
        ]

    monkeypatch.setattr(asking, "ask", ask)
    return skills


def cases(num: int = NUM_CASES) -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": f"What is {number}?"}],
            "expected": f"It is {number}.",
            "checks": EXACT,
            "slice": ("even", "odd")[number % 2],
        }
        for number in range(num)
    ]


def add_version(adapter: Adapter, source: str = Source.TRAINING) -> AdapterVersion:
    """A version that has just passed its checks."""
    number = adapter.versions.count() + 1
    version = AdapterVersion.objects.create(
        adapter=adapter,
        number=number,
        status=AdapterVersion.Status.READY,
        source=source,
        digest=f"{number:064d}",
    )
    with transaction.atomic():
        promotion.ready_apply(promotion.lock(adapter.pk), version)
    return version


@pytest.fixture
def gated(scope: Party, base_model: BaseModel) -> Adapter:
    """An adapter whose version 1 is live, and whose policy is gate."""
    adapter = Adapter.objects.create(name="invoices", base_model=base_model)
    add_version(adapter, Source.UPLOAD)
    suites.suite_version_create(name="totals", cases=cases(), origin={"kind": "api"})
    answer = as_key(scope).patch(
        "/api/v1/adapters/invoices", {"gate": {"suite": "totals"}}, format="json"
    )
    assert answer.json()["promotion_policy"] == "gate", answer.json()
    return Adapter.objects.get(pk=adapter.pk)


def begin(model: str) -> Evaluation:
    suite = suites.suite_version_get(suite=suites.suite_get(name="totals"))
    principal = asking.principal_of(suite.tenant)
    return services.evaluation_create(principal=principal, model=model, suite_version=suite)
