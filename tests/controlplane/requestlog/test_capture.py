"""Requests that are kept to train on: which, how many, how long; feedback; the data set of them."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from contract.messages.protocol import CALL_BEGIN, CALL_END
from controlplane.errors import Conflict, InvalidRequest, NotFound
from controlplane.events.audit.models import AuditEvent
from controlplane.infra import storage
from controlplane.requestlog import capture, captured, retention, sealing
from controlplane.requestlog.capture import CaptureRule, capture_policy_set, captures_keep
from controlplane.requestlog.captured import (
    Filter,
    captured_get,
    dataset_note,
    feedback_give,
    row_of,
    rows_of,
)
from controlplane.requestlog.models import CapturedRequest, CapturePolicy, Feedback
from controlplane.requestlog.services import Words
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import services as tenants
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import Membership
from controlplane.tenants.permissions import Permission
from controlplane.training.datasets import contents, pulls
from controlplane.training.datasets.captured_rows import dataset_from_captured
from controlplane.training.models import Dataset
from tests.controlplane.conftest import Party

pytestmark = pytest.mark.django_db

ON: dict[str, Any] = {
    "share": 1.0,
    "shares": {},
    "days": 30,
    "max_rows": 100,
    "max_bytes": capture.MIN_BYTES,
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def words(party: Party, text: str = "hello", **fields: Any) -> Words:
    given: dict[str, Any] = {
        "tenant_id": party.tenant.pk,
        "request_id": f"req_{uuid.uuid4().hex}",
        "store": None,
        "prompt": {"messages": [{"role": "user", "content": text}]},
        "outputs": [f"answer to {text}"],
        "finish_reason": "stop",
        "is_truncated": False,
        "model": "support",
        "is_row": True,
    }
    return Words(**{**given, **fields})


def switch_on(party: Party, **fields: Any) -> None:
    with tenant_scope(party.tenant.pk):
        capture_policy_set(**{**ON, **fields})


def kept(party: Party) -> list[str]:
    with tenant_scope(party.tenant.pk):
        rows = CapturedRequest.objects.order_by("created_at", "pk")
        return list(rows.values_list("request_id", flat=True))


def the_row(party: Party, request_id: str) -> dict[str, Any]:
    with tenant_scope(party.tenant.pk):
        found = captured_get(request_id=request_id)
        return row_of(found, CapturePolicy.objects.get())


def test_nothing_is_kept_of_who_did_not_ask(acme: Party, globex: Party) -> None:
    switch_on(acme)
    mine, others = words(acme), words(globex)
    assert captures_keep([mine, others]) == 1
    assert (kept(acme), kept(globex)) == ([mine.request_id], [])
    switch_on(acme, share=0.0)  # off again: what is kept stays
    assert captures_keep([words(acme)]) == 0
    assert kept(acme) == [mine.request_id]


def test_only_whole_chats_of_clients_are_kept(acme: Party) -> None:
    switch_on(acme)
    for fields in (
        {"store": False},
        {"is_row": False},
        {"is_truncated": True},
        {"finish_reason": "length"},
        {"outputs": [""]},
        {"outputs": []},
        {"prompt": {"text": "x"}},
    ):
        assert captures_keep([words(acme, **fields)]) == 0, fields


def test_a_share_is_sampled_the_same_everywhere(acme: Party) -> None:
    rule = CaptureRule(0.25, {"support": 1.0, "quiet": 0.0})
    ids = [f"req_{number}" for number in range(4000)]
    taken = [each for each in ids if rule.takes(each, "other", None)]
    assert 800 < len(taken) < 1200
    assert taken == [each for each in ids if rule.takes(each, "other", True)]
    assert all(rule.takes(each, "support", None) for each in ids)
    assert not any(rule.takes(each, "quiet", True) for each in ids)
    assert not any(rule.takes(each, "support", False) for each in ids)


def test_the_oldest_make_room_and_those_with_feedback_last(acme: Party) -> None:
    switch_on(acme, max_rows=3)
    all_words = [words(acme, str(number)) for number in range(5)]
    captures_keep(all_words[:2])
    with tenant_scope(acme.tenant.pk):
        feedback_give(request_id=all_words[0].request_id, rating="good")
    for each in all_words[2:]:
        captures_keep([each])
    assert kept(acme) == [all_words[n].request_id for n in (0, 3, 4)]
    # Bytes are bounded, too.
    switch_on(acme, max_rows=50, max_bytes=capture.MIN_BYTES)
    noise = "".join(uuid.uuid4().hex for _ in range(8000))
    captures_keep([words(acme, f"{number}{noise}") for number in range(12)])
    with tenant_scope(acme.tenant.pk):
        sizes = CapturedRequest.objects.values_list("num_bytes", flat=True)
        assert 0 < sum(sizes) <= capture.MIN_BYTES
    assert all_words[0].request_id in kept(acme)


def test_rows_keep_tools_and_learn_the_last_answer_alone(acme: Party) -> None:
    switch_on(acme)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]
    said = f'{CALL_BEGIN}{{"name": "add", "arguments": {{"b": [2]}}}}{CALL_END}'
    found = words(acme, prompt={"messages": messages}, tools=(TOOL,), outputs=[said])
    captures_keep([found])
    row = the_row(acme, found.request_id)
    assert row["tools"] == [TOOL]
    *before, learned = row["messages"]
    assert [message["role"] for message in before] == ["system", "user", "assistant", "tool"]
    assert before[2]["weight"] == 0 and json.loads(
        before[2]["tool_calls"][0]["function"]["arguments"]
    ) == {"a": 1}
    (made,) = learned["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"b": [2]}'}

    # A corrected answer stands in its place, as a text or as calls.
    with tenant_scope(acme.tenant.pk):
        given = feedback_give(request_id=found.request_id, rating="bad", answer="It is 2.")
    assert (given.rating, given.has_corrected_answer, given.is_captured) == ("bad", True, True)
    assert the_row(acme, found.request_id)["messages"][-1] == {
        "role": "assistant",
        "content": "It is 2.",
    }
    told = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    with tenant_scope(acme.tenant.pk):
        feedback_give(request_id=found.request_id, answer={"tool_calls": [told]})
    learned = the_row(acme, found.request_id)["messages"][-1]
    assert learned == {"role": "assistant", "tool_calls": [told]}
    with tenant_scope(acme.tenant.pk):
        assert Feedback.objects.get().rating == "bad"  # what is left out stays


@pytest.mark.parametrize(
    ("answer", "param"),
    [
        (" ", "corrected_answer.content"),
        ({"content": None}, "corrected_answer.content"),
        ({"content": 3}, "corrected_answer.content"),
        ({"tool_calls": [{}]}, "corrected_answer.tool_calls"),
    ],
)
def test_an_answer_that_is_no_rows_is_refused(acme: Party, answer: Any, param: str) -> None:
    switch_on(acme)
    found = words(acme)
    captures_keep([found])
    with tenant_scope(acme.tenant.pk), pytest.raises(InvalidRequest) as caught:
        feedback_give(request_id=found.request_id, answer=answer)
    assert str(caught.value.param).startswith(param)


def test_feedback_is_the_tenants_own(acme: Party, globex: Party) -> None:
    switch_on(acme)
    found = words(acme)
    captures_keep([found])
    with tenant_scope(globex.tenant.pk), pytest.raises(NotFound):
        feedback_give(request_id=found.request_id, rating="bad")
    with tenant_scope(acme.tenant.pk), pytest.raises(NotFound):
        feedback_give(request_id=found.request_id, rating="bad", may_name=lambda model: False)
    with tenant_scope(acme.tenant.pk), pytest.raises(NotFound):
        feedback_give(request_id=f"req_{uuid.uuid4().hex}", rating="bad")
    assert captured.request_id_of(f"chatcmpl-{'a' * 32}") == f"req_{'a' * 32}"
    for name in ("", "req_x", f"req_{'a' * 33}", f"req_{'A' * 32}", "req_\0"):
        with pytest.raises(NotFound):
            captured.request_id_of(name)


def rate(party: Party, found: Words, **fields: Any) -> None:
    with tenant_scope(party.tenant.pk):
        feedback_give(request_id=found.request_id, **fields)


def test_filters_choose_the_rows(acme: Party) -> None:
    switch_on(acme)
    good, bad, fixed, plain = (words(acme, name) for name in ("good", "bad", "fixed", "plain"))
    other = words(acme, "other", model="sales")
    captures_keep([good, bad, fixed, plain, other])
    rate(acme, good, rating="good")
    rate(acme, bad, rating="bad")
    rate(acme, fixed, rating="bad", answer="right")

    def asked(**fields: Any) -> set[str]:
        with tenant_scope(acme.tenant.pk):
            rows = rows_of(Filter(**fields))
        found = [json.loads(line) for line in rows.content.splitlines()]
        assert rows.num_rows == len(found)
        return {row["messages"][0]["content"] for row in found}

    assert asked() == {"good", "fixed", "plain", "other"}
    assert asked(only="good") == {"good", "fixed"}
    assert asked(only="corrected") == {"fixed"}
    assert asked(only="any", model="support") == {"good", "bad", "fixed", "plain"}
    now = timezone.now()
    assert asked(after=now) == set()
    assert asked(before=now, only="good") == {"good", "fixed"}


def key_of(party: Party, *scopes: Permission) -> dict[str, str]:
    """A key of the owner's with these scopes alone."""
    with tenant_scope(party.tenant.pk):
        rules = KeyRules(scopes=tuple(scope.value for scope in scopes))
        owner = Membership.objects.get(user=party.owner)
        _, text = tenants.api_key_create(name="capture", rules=rules, owner=owner)
    return {"HTTP_AUTHORIZATION": f"Bearer {text}"}


def test_a_data_set_is_made_of_them(acme: Party, globex: Party, client: Any) -> None:
    switch_on(acme)
    found = [words(acme, f"question {number}") for number in range(3)]
    captures_keep(found)
    rate(acme, found[1], answer="corrected")
    path = "/api/v1/datasets/from-users/from-captured"
    send: dict[str, Any] = {"data": "{}", "content_type": "application/json"}
    poor = key_of(acme, Permission.READ, Permission.TRAINING_WRITE)
    assert client.post(path, **send, **poor).status_code == 403
    rich = key_of(acme, Permission.READ, Permission.TRAINING_WRITE, Permission.REQUESTS_CONTENT)
    made = client.post(path, **send, **rich)
    assert made.status_code == 201, made.content
    assert made.json()["dataset"]["num_rows"] == 3 and made.json()["num_left_out"] == 0
    with tenant_scope(acme.tenant.pk):
        content = storage.read_bytes(Dataset.objects.get().key, max_bytes=10_000)
    answers = [json.loads(line)["messages"][-1]["content"] for line in content.splitlines()]
    assert answers == ["answer to question 0", "corrected", "answer to question 2"]
    # The stranger has none, and sees none.
    theirs = key_of(globex, Permission.READ, Permission.TRAINING_WRITE, Permission.REQUESTS_CONTENT)
    none = client.post(path, **send, **theirs)
    assert (none.status_code, none.json()["error"]["code"]) == (400, "nothing_captured")
    one = f"/api/v1/captured-requests/{found[0].request_id}"
    assert client.get(one, **theirs).status_code == 404
    assert client.get(one, **poor).status_code == 403
    assert client.get(one, **rich).json()["row"]["messages"][1]["content"].startswith("answer")


def test_new_ones_are_appended_once(acme: Party, globex: Party, client: Any) -> None:
    """By call and by a source's cron line; also what was rated long after it was captured."""
    for party in (acme, globex):
        switch_on(party)
    first, second = (words(acme, name) for name in ("first", "second"))
    captures_keep([first, second, words(globex, "theirs")])
    rate(acme, first, rating="good")
    path = "/api/v1/datasets/from-users/from-captured"
    scopes = (Permission.READ, Permission.TRAINING_WRITE, Permission.REQUESTS_CONTENT)
    headers = key_of(acme, *scopes)

    def append(**fields: Any) -> tuple[int, int, int]:
        body = json.dumps({"only": "good", "append": True, **fields})
        made = client.post(path, data=body, content_type="application/json", **headers)
        assert made.status_code == 201, made.content
        dataset = made.json()["dataset"]
        return made.json()["num_added"], dataset["num_rows"], dataset["version"]

    assert append() == (1, 1, 1)
    assert append() == (0, 1, 1)
    rate(acme, second, rating="good")
    assert append() == (1, 2, 2)
    # A source with a cron line does the same.
    source = "/api/v1/datasets/from-users/source"
    body = json.dumps({"kind": "captured", "only": "all", "cron": "0 1 * * *"})
    send: dict[str, Any] = {"data": body, "content_type": "application/json"}
    poor = key_of(acme, Permission.READ, Permission.TRAINING_WRITE)
    assert client.put(source, **send, **poor).status_code == 403
    wrong = {**send, "data": json.dumps({"kind": "captured", "only": "some"})}
    assert client.put(source, **wrong, **headers).json()["error"]["param"] == "only"
    assert client.put(source, **send, **headers).status_code == 200
    captures_keep([words(acme, "third")])
    pulls_of = "/api/v1/datasets/from-users/pulls"
    for status, version in (("added", 3), ("unchanged", None)):
        assert client.post(pulls_of, **headers).status_code == 202
        assert pulls.pull_next() and not pulls.pulls_due()
        told = client.get(pulls_of, **headers).json()["data"][0]
        assert (told["status"], told["version"], told["error"]) == (status, version, "")
    with tenant_scope(acme.tenant.pk):
        dataset = Dataset.objects.get()
        lines = b"".join(contents.pieces(dataset.sha256)).splitlines()
    asked = [json.loads(line)["messages"][0]["content"] for line in lines]
    assert asked == ["first", "second", "third"]
    # Made anew, it has all rows once, and is appended to from there.
    assert append(append=False, only="all") == (3, 3, 4)
    assert append(only="all") == (0, 3, 4)


def test_corrected_answers_make_pairs(acme: Party, client: Any) -> None:
    switch_on(acme)
    fixed, good, same = (words(acme, text) for text in ("fixed", "good", "same"))
    captures_keep([fixed, good, same])
    rate(acme, fixed, rating="bad", answer="better")
    rate(acme, good, rating="good")
    rate(acme, same, answer="answer to same")
    headers = key_of(acme, Permission.READ, Permission.TRAINING_WRITE, Permission.REQUESTS_CONTENT)
    url = "/api/v1/datasets/preferred/from-captured"
    answer = client.post(url, data={"only": "pairs"}, content_type="application/json", **headers)
    assert answer.status_code == 201, answer.content
    told = answer.json()
    assert (told["num_added"], told["num_left_out"]) == (1, 1)
    with tenant_scope(acme.tenant.pk):
        (line,) = b"".join(contents.pieces(Dataset.objects.get().sha256)).splitlines()
    assert json.loads(line) == {
        "input": {"messages": [{"role": "user", "content": "fixed"}]},
        "preferred_output": [{"role": "assistant", "content": "better"}],
        "non_preferred_output": [{"role": "assistant", "content": "answer to fixed"}],
    }


def test_two_calls_at_once_add_a_request_once(acme: Party) -> None:
    switch_on(acme)
    captures_keep([words(acme, "one")])
    with tenant_scope(acme.tenant.pk):
        made = dataset_from_captured(name="d", wanted=Filter())
        captures_keep([words(acme, "two")])
        (new,) = rows_of(Filter(unless_in=made.dataset.pk)).keys
        with transaction.atomic():
            dataset_note(dataset_id=made.dataset.pk, keys=[new], appends=True)
        with pytest.raises(Conflict) as caught, transaction.atomic():
            dataset_note(dataset_id=made.dataset.pk, keys=[new], appends=True)
    assert caught.value.code == "append_under_way"


def test_they_are_erased(acme: Party, client: Any) -> None:
    switch_on(acme)
    found = [words(acme, str(number), model=f"m{number % 2}") for number in range(5)]
    captures_keep(found)
    headers = key_of(acme, Permission.REQUESTS_READ, Permission.REQUESTS_CONTENT)
    path = "/api/v1/captured-requests"
    listed = client.get(f"{path}?model=m0", **headers).json()["data"]
    assert [row["id"] for row in listed] == [found[n].request_id for n in (4, 2, 0)]
    assert "hello" not in json.dumps(listed)
    assert client.delete(f"{path}/{found[0].request_id}", **headers).status_code == 204
    assert client.delete(f"{path}?model=m0", **headers).json()["deleted"] == 2
    with tenant_scope(acme.tenant.pk):
        key = bytes(CapturePolicy.objects.get().wrapped_key)
        left = CapturedRequest.objects.first()
    assert left is not None
    assert client.delete(path, **headers).json()["deleted"] == 2 and kept(acme) == []
    with tenant_scope(acme.tenant.pk):
        after = bytes(CapturePolicy.objects.get().wrapped_key)
        assert AuditEvent.objects.filter(action="captured_request.deleted").exists()
    assert after != key
    with pytest.raises(sealing.Unreadable):
        sealing.unseal(bytes(left.sealed), after)
    for wrong in ("?only=x", "?captured_after=x", "?model=%00"):
        assert client.get(f"{path}{wrong}", **headers).status_code == 400, wrong


def test_they_expire(acme: Party) -> None:
    switch_on(acme, days=2)
    old, new = words(acme), words(acme)
    captures_keep([old, new])
    with tenant_scope(acme.tenant.pk):
        before = timezone.now() - dt.timedelta(days=3)
        CapturedRequest.objects.filter(request_id=old.request_id).update(created_at=before)
        with pytest.raises(NotFound):  # also before the sweep
            captured_get(request_id=old.request_id)
    counts = retention.requests_forget(now=timezone.now())
    assert counts["captured"] == 1 and kept(acme) == [new.request_id]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"share": 1.5}, "share"),
        ({"share": float("nan")}, "share"),
        ({"shares": {"m": -1}}, "shares.m"),
        ({"shares": {"": 1}}, "shares"),
        ({"shares": {"\ud800": 1}}, "shares"),
        ({"shares": {str(n): 1 for n in range(51)}}, "shares"),
        ({"days": 0}, "days"),
        ({"max_rows": 10**6}, "max_rows"),
        ({"max_bytes": 1}, "max_bytes"),
    ],
)
def test_settings_are_bounded(acme: Party, fields: dict[str, Any], param: str) -> None:
    with tenant_scope(acme.tenant.pk), pytest.raises(InvalidRequest) as caught:
        capture_policy_set(**{**ON, **fields})
    assert caught.value.param == param


def test_the_setting_is_the_owners(acme: Party, client: Any) -> None:
    send: dict[str, Any] = {"data": '{"share": 0.5}', "content_type": "application/json"}
    few = key_of(acme, Permission.READ)
    assert client.get("/api/v1/capture", **few).json()["share"] == 0
    assert client.put("/api/v1/capture", **send, **few).status_code == 403
    owner = key_of(acme, Permission.READ, Permission.TENANT_MANAGE)
    assert client.put("/api/v1/capture", **send, **owner).json()["share"] == 0.5
    assert client.get("/api/v1/capture", **few).json()["share"] == 0.5
    with tenant_scope(acme.tenant.pk):
        event = AuditEvent.objects.filter(action="capture_policy.changed").get()
    assert event.after["share"] == 0.5


def test_a_model_may_be_called_token(acme: Party) -> None:
    """The audit trail takes no field of this name, but a model's name is none."""
    with tenant_scope(acme.tenant.pk):
        capture_policy_set(share=0, shares={"token": 0.5}, days=1, max_rows=1, max_bytes=1 << 20)
        event = AuditEvent.objects.get(action="capture_policy.changed")
    assert event.after["shares"] == [["token", 0.5]]


def test_pairs_count_when_their_answer_was_corrected(acme: Party, globex: Party) -> None:
    switch_on(acme)
    corrected, rated = words(acme), words(acme)
    captures_keep([corrected, rated])
    since = timezone.now()
    with tenant_scope(acme.tenant.pk):
        feedback_give(request_id=corrected.request_id, rating="bad", answer="It is 2.")
        feedback_give(request_id=rated.request_id, rating="good")
        until = timezone.now()
        assert captured.num_pairs(since, until) == 1
        assert captured.num_pairs(since, until, "support") == 1
        assert captured.num_pairs(since, until, "other") == 0
        assert captured.num_pairs(until, timezone.now()) == 0
    with tenant_scope(globex.tenant.pk):
        assert captured.num_pairs(since, until) == 0
