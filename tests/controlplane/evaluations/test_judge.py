"""A judge behind a real HTTP server: its marks, its failures, and its key."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import timezone

from controlplane.adapters.models import Adapter
from controlplane.evaluations import execution
from controlplane.evaluations.models import Evaluation, Judge, Result
from controlplane.infra.outbound.outbound_policy import OutboundPolicy
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.controlplane.evaluations.conftest import Skill, begin
from tests.receiver import Receiver, answer, receiving

KEY = "sk-of-the-tenant"


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    settings.OUTBOUND = OutboundPolicy(
        hosts=frozenset({"127.0.0.1"}), allowed=(ipaddress.ip_network("127.0.0.0/8"),)
    )
    with receiving() as made:
        yield made


def completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


@pytest.fixture
def judged(
    gated: Adapter,
    pool: dict[str, Skill],
    scope: Party,
    receiver: Receiver,
) -> Evaluation:
    """An evaluation of one case whose answers only a judge can check."""
    client = as_key(scope)
    body = {"url": f"http://127.0.0.1:{receiver.port}/v1", "model": "strict-1", "api_key": KEY}
    told = client.put("/api/v1/judges/strict", body, format="json").json()
    assert told["name"] == "strict" and KEY not in json.dumps(told)
    case = {
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "expected": "4",
        "checks": [{"type": "exact"}, {"type": "judge", "judge": "strict", "rubric": "Be fair."}],
    }
    client.post("/api/v1/suites/totals/versions", {"cases": [case]}, format="json")
    pool["invoices@1"] = lambda case: True
    evaluation = begin("invoices@1")
    assert execution.evaluate_next()
    evaluation.refresh_from_db()
    assert (evaluation.status, Result.objects.get().scores) == ("judging", [1.0, None])
    return evaluation


def test_a_judges_mark_is_a_score(judged: Evaluation, receiver: Receiver) -> None:
    receiver.behave = answer(200, completion("7"))
    assert execution.judge_next()
    judged.refresh_from_db()
    assert (judged.status, judged.summary["score"]) == ("succeeded", pytest.approx(0.85))
    [received] = receiver.received
    assert received.path == "/v1/chat/completions"
    assert received.headers["authorization"] == f"Bearer {KEY}"
    asked = json.loads(received.body)["messages"][0]["content"]
    assert all(text in asked for text in ("What is 2 + 2?", "Be fair.", "4"))
    assert KEY.encode() not in bytes(Judge.objects.get().sealed)


def test_a_judge_that_is_away_is_asked_again(judged: Evaluation, receiver: Receiver) -> None:
    receiver.behave = answer(503)
    assert execution.judge_next()
    judged.refresh_from_db()
    assert (judged.status, judged.error) == ("judging", "The judge strict failed: It answered 503.")
    assert not execution.judge_next()
    Evaluation.objects.update(lease_until=timezone.now())
    receiver.behave = answer(200, completion("10"))
    assert execution.judge_next()
    judged.refresh_from_db()
    assert (judged.status, judged.summary["score"]) == ("succeeded", 1.0)


@pytest.mark.parametrize(
    ("status", "body", "ends", "error"),
    [
        (401, b"{}", "failed", "It answered 401."),
        (200, b"not JSON", "failed", "not a chat completion"),
        (200, completion("excellent"), "succeeded", ""),
        (200, completion("99"), "succeeded", ""),
        (200, b"x" * 300_000, "judging", "longer than"),
        (302, b"", "failed", "It answered 302."),
    ],
)
def test_what_is_no_mark(
    judged: Evaluation, receiver: Receiver, status: int, body: bytes, ends: str, error: str
) -> None:
    receiver.behave = answer(status, body)
    assert execution.judge_next()
    judged.refresh_from_db()
    assert judged.status == ends and error in judged.error
    if ends == "succeeded":
        result = Result.objects.get()
        assert result.scores == [1.0, 0.0] and "no number from 0 to 10" in result.error


def test_a_judge_inside_is_refused(scope: Party) -> None:
    for url in ("http://127.0.0.1:1/v1", "https://10.0.0.1/v1", "https://169.254.169.254/v1"):
        body = {"url": url, "model": "m"}
        answer = as_key(scope).put("/api/v1/judges/inner", body, format="json")
        assert_error(answer, 400, "url")
    body = {"url": "https://example.com/v1", "model": "m"}
    assert_error(as_user(scope.viewer).put("/api/v1/judges/x", body, format="json"), 403)
    assert not Judge.objects.exists()
