"""What is kept of requests: the tenant's choice, sealed words, days, and who may read them."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.errors import InvalidRequest, NotFound
from controlplane.events.audit.models import AuditEvent
from controlplane.requestlog import retention, sealing, services
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import LogPolicy, RefusalHour, RequestContent
from controlplane.requestlog.refusals import RefusalKey, refusals_add
from controlplane.requestlog.services import Words
from controlplane.tenancy.scoping import all_tenants, current_tenant_id, tenant_scope
from controlplane.tenants import services as tenants
from controlplane.tenants.models import Role
from controlplane.usage.models import UsageRecord
from controlplane.usage.services import usage_settle
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.controlplane.queue.test_accountant import record

LOG, REQUESTS = "/api/v1/request-log", "/api/v1/requests"
SECRET = "the patient's name is Ada"


def words(party: Party, request_id: str = "req_1", **fields: Any) -> Words:
    return Words(
        **{
            "tenant_id": party.tenant.id,
            "request_id": request_id,
            "store": None,
            "prompt": {"messages": [{"role": "user", "content": SECRET}]},
            "outputs": ["hello", "\ud800 lone"],
            "finish_reason": "stop",
            "is_truncated": False,
            **fields,
        }
    )


def choose(party: Party, content: str = "all", **days: int) -> LogPolicy:
    with tenant_scope(party.tenant.id):
        return services.log_policy_set(
            content=content, **{"content_days": 30, "metadata_days": 90, **days}
        )


def stored(party: Party) -> set[str]:
    with tenant_scope(party.tenant.id):
        return set(RequestContent.objects.values_list("request_id", flat=True))


class TestChoice:
    @pytest.mark.parametrize(
        ("content", "kept"),
        [("off", set()), ("on_request", {"yes"}), ("all", {"yes", "nothing"})],
    )
    def test_tenant_and_request_both_have_a_say(
        self, acme: Party, content: str, kept: set[str]
    ) -> None:
        choose(acme, content)
        said = {"yes": True, "no": False, "nothing": None}
        services.contents_keep([words(acme, name, store=store) for name, store in said.items()])
        assert stored(acme) == kept

    def test_without_a_choice_no_word_is_kept(self, acme: Party) -> None:
        assert services.contents_keep([words(acme, store=True)]) == 0
        assert services.content_choices() == {}

    def test_one_tenants_choice_is_not_anothers(self, acme: Party, globex: Party) -> None:
        choose(acme)
        services.contents_keep([words(acme), words(globex, "req_2")])
        assert (stored(acme), stored(globex)) == ({"req_1"}, set())
        assert services.content_choices() == {acme.tenant.id: "all"}

    def test_off_makes_what_is_stored_unreadable_at_once_and_for_good(self, acme: Party) -> None:
        choose(acme)
        services.contents_keep([words(acme)])
        choose(acme, "off")
        with tenant_scope(acme.tenant.id):
            assert bytes(LogPolicy.objects.get().wrapped_key) == b""
            with pytest.raises(NotFound):
                services.content_get(request_id="req_1")
        choose(acme, "all")
        with tenant_scope(acme.tenant.id), pytest.raises(NotFound):
            services.content_get(request_id="req_1")

    def test_days_have_bounds(self, acme: Party) -> None:
        for days in ({"content_days": 0}, {"content_days": 366}, {"metadata_days": 731}):
            with pytest.raises(InvalidRequest):
                choose(acme, **days)

    def test_a_choice_is_in_the_trail_and_its_key_is_not(self, acme: Party) -> None:
        choose(acme)
        choose(acme)  # changes nothing
        with tenant_scope(acme.tenant.id):
            [event] = AuditEvent.objects.filter(action="log_policy.changed")
        assert event.after == {"content": "all", "content_days": 30, "metadata_days": 90}


class TestWords:
    def test_come_back_as_they_were(self, acme: Party) -> None:
        choose(acme)
        services.contents_keep([words(acme, is_truncated=True)])
        with tenant_scope(acme.tenant.id):
            found = services.content_get(request_id="req_1")
        assert found.prompt == {"messages": [{"role": "user", "content": SECRET}]}
        assert found.outputs == ["hello", "? lone"]
        assert (found.finish_reason, found.is_truncated) == ("stop", True)
        assert found.expires_at - found.stored_at == dt.timedelta(days=30)

    def test_cannot_be_read_from_the_table(self, acme: Party) -> None:
        choose(acme)
        services.contents_keep([words(acme)])
        with tenant_scope(acme.tenant.id):
            row = RequestContent.objects.get()
            key = LogPolicy.objects.get().wrapped_key
        assert SECRET.encode() not in bytes(row.sealed)
        assert sealing.unseal(bytes(row.sealed), bytes(key))["outputs"][0] == "hello"

    def test_of_a_tenant_open_under_its_own_key_only(self, acme: Party, globex: Party) -> None:
        keys = [bytes(choose(party).wrapped_key) for party in (acme, globex)]
        sealed = sealing.seal({"a": 1}, keys[0])
        with pytest.raises(sealing.Unreadable):
            sealing.unseal(sealed, keys[1])
        assert sealing.unseal(sealed, keys[0]) == {"a": 1}

    def test_moved_to_another_row_are_not_shown(self, acme: Party) -> None:
        choose(acme)
        services.contents_keep([words(acme), words(acme, "req_2")])
        with tenant_scope(acme.tenant.id):
            other = RequestContent.objects.get(request_id="req_2")
            RequestContent.objects.filter(request_id="req_1").update(sealed=other.sealed)
            with pytest.raises(NotFound):
                services.content_get(request_id="req_1")

    def test_stay_the_first_that_were_stored(self, acme: Party) -> None:
        choose(acme)
        services.contents_keep([words(acme)])
        services.contents_keep([words(acme, outputs=["other"])])
        with tenant_scope(acme.tenant.id):
            assert services.content_get(request_id="req_1").outputs[0] == "hello"


class TestRetention:
    def age(self, party: Party, request_id: str, days: float) -> None:
        moment = timezone.now() - dt.timedelta(days=days)
        with tenant_scope(party.tenant.id):
            RequestContent.objects.filter(request_id=request_id).update(created_at=moment)

    def forget(self) -> dict[str, int]:
        return retention.requests_forget(now=timezone.now())

    def test_words_go_after_their_days(self, acme: Party) -> None:
        choose(acme, content_days=7)
        with tenant_scope(acme.tenant.id):
            LogPolicy.objects.update(key_made_at=timezone.now() - dt.timedelta(days=100))
        services.contents_keep([words(acme, "old"), words(acme, "new")])
        self.age(acme, "old", 7.1)
        self.age(acme, "new", 6.9)
        with tenant_scope(acme.tenant.id), pytest.raises(NotFound):
            services.content_get(request_id="old")  # also before it is deleted
        assert self.forget()["contents"] == 1
        assert stored(acme) == {"new"}

    def test_words_of_who_keeps_none_any_more_go(self, acme: Party, globex: Party) -> None:
        for party, name in ((acme, "req_1"), (globex, "req_2")):
            choose(party)
            services.contents_keep([words(party, name)])
        choose(acme, "off")
        self.forget()
        assert (stored(acme), stored(globex)) == (set(), {"req_2"})

    def test_the_oldest_go_when_there_are_too_many(
        self, acme: Party, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "PIECE", 2)
        choose(acme)
        with tenant_scope(acme.tenant.id):
            LogPolicy.objects.update(key_made_at=timezone.now() - dt.timedelta(days=100))
        names = [f"req_{number}" for number in range(6)]
        services.contents_keep([words(acme, name) for name in names])
        for age, name in enumerate(reversed(names)):
            self.age(acme, name, age)
        with tenant_scope(acme.tenant.id):
            size = RequestContent.objects.all()[0].num_bytes
        settings.CONTENT_BYTES_PER_TENANT = 3 * size
        self.forget()
        assert stored(acme) == {"req_3", "req_4", "req_5"}

    def test_log_lines_go_after_theirs_and_what_was_billed_stays(
        self, acme: Party, globex: Party, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "PIECE", 2)
        choose(acme, metadata_days=10)
        old = timezone.now().timestamp() - 11 * 86400
        made = [record(acme, f"old_{number}", created_at=old) for number in range(5)]
        made += [record(acme, "new", created_at=timezone.now().timestamp())]
        made += [record(globex, "theirs", created_at=old)]
        usage_settle(made)
        assert self.forget()["requests"] == 5
        with tenant_scope(acme.tenant.id):
            assert [row.request_id for row in InferenceRequest.objects.all()] == ["new"]
            assert UsageRecord.objects.count() == 6
        with tenant_scope(globex.tenant.id):
            assert InferenceRequest.objects.count() == 1

    def test_one_tenant_whose_log_cannot_be_deleted_keeps_no_other_waiting(
        self, acme: Party, globex: Party, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = timezone.now().timestamp() - 100 * 86400
        usage_settle(
            [record(acme, "stays", created_at=old), record(globex, "goes", created_at=old)]
        )
        delete = retention._delete

        def refuse(rows: Any) -> int:
            if current_tenant_id() == acme.tenant.id:
                raise OperationalError("canceling statement due to lock timeout")
            return delete(rows)

        monkeypatch.setattr(retention, "_delete", refuse)
        assert self.forget()["requests"] == 1
        with tenant_scope(acme.tenant.id):
            assert InferenceRequest.objects.count() == 1


class TestApi:
    def listed(self, client: APIClient, **query: str) -> list[str]:
        answer = client.get(REQUESTS, query)
        assert answer.status_code == 200, answer.content
        return [row["id"] for row in answer.json()["data"]]

    def test_a_line_says_all_that_is_known(self, acme: Party) -> None:
        choose(acme)
        services.contents_keep([words(acme)])
        usage_settle(
            [
                record(
                    acme,
                    "req_1",
                    endpoint="/v1/completions",
                    digests=("d1", "d2"),
                    weights=(0.3, 0.7),
                    sampling={"temperature": 0.5, "seed": 7},
                    attempts=2,
                    tier="disk",
                    drafts={"forced": 3, "rejected": 1},
                ),
                record(acme, "req_2", finish_reason="cancelled"),
                record(acme, "req_3", finish_reason="error", error_code="context_length_exceeded"),
            ]
        )
        client = as_key(acme)
        line = client.get(f"{REQUESTS}/req_1").json()
        assert line["endpoint"] == "/v1/completions"
        assert line["digests"] == ["d1", "d2"]
        assert (line["weights"], line["attempts"]) == ([0.3, 0.7], 2)
        assert line["sampling"] == {"temperature": 0.5, "seed": 7}
        assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (
            *(11, 4, 7),
        )
        assert (line["status"], line["has_content"]) == (200, True)
        assert [line[name] for name in ("queue_ms", "load_ms", "first_token_ms", "total_ms")] == [
            *(1.0, 2.0, 3.0, 500.0),
        ]
        rows = client.get(REQUESTS).json()["data"]
        assert [row["tier"] for row in rows] == ["", "", "disk"]
        assert [row["drafts"] for row in rows] == [None, None, {"forced": 3, "rejected": 1}]
        assert [(row["status"], row["has_content"]) for row in rows] == [
            *((400, False), (499, False), (200, True)),
        ]

    def test_filters(self, acme: Party) -> None:
        key = str(uuid.uuid4())
        usage_settle(
            [
                record(acme, "req_1", stream=True, api_key_id=key),
                record(acme, "req_2", model="other", endpoint="/generate"),
                record(
                    acme, "req_3", error_code="internal", finish_reason="error", created_at=1.8e9
                ),
            ]
        )
        client = as_key(acme)
        assert self.listed(client) == ["req_3", "req_2", "req_1"]
        for query, found in [
            ({"stream": "true"}, ["req_1"]),
            ({"api_key_id": key}, ["req_1"]),
            ({"model": "other"}, ["req_2"]),
            ({"endpoint": "/generate"}, ["req_2"]),
            ({"error_code": "internal"}, ["req_3"]),
            ({"finish_reason": "stop", "stream": "false"}, ["req_2"]),
            ({"accepted_after": "2026-01-01T00:00:00Z"}, ["req_3"]),
            ({"accepted_before": "2026-01-01T00:00:00+02:00"}, ["req_2", "req_1"]),
            ({"model": "\0"}, []),
        ]:
            assert self.listed(client, **query) == found, query
        for name in ("stream", "api_key_id", "accepted_after", "adapter_version_id"):
            assert_error(client.get(REQUESTS, {name: "nonsense"}), 400, name)

    def test_pages_meet_no_line_twice(self, acme: Party) -> None:
        usage_settle([record(acme, f"req_{number}") for number in range(7)])
        client, seen, after = as_key(acme), [], None
        while True:
            query = {"limit": "3", **({"after": after} if after else {})}
            answer = client.get(REQUESTS, query).json()
            seen += [row["id"] for row in answer["data"]]
            after = answer["last_id"]
            if not answer["has_more"]:
                break
        assert sorted(seen) == sorted(f"req_{number}" for number in range(7))

    def test_words_are_for_admins_and_can_be_forgotten(self, acme: Party) -> None:
        choose(acme)
        services.contents_keep([words(acme)])
        url = f"{REQUESTS}/req_1/content"
        assert_error(as_key(acme).get(url), 403)  # a key is a developer's
        assert_error(as_user(acme.viewer).get(url), 403)
        owner = as_user(acme.owner)
        found = owner.get(url).json()
        assert found["prompt"]["messages"][0]["content"] == SECRET
        assert owner.delete(url).status_code == 204
        assert_error(owner.get(url), 404)
        with tenant_scope(acme.tenant.id):
            assert AuditEvent.objects.filter(action="request_content.deleted").count() == 1

    def test_the_choice_is_the_owners(self, acme: Party) -> None:
        with tenant_scope(acme.tenant.id):
            admin = tenants.member_add(email="a@acme.example", role=Role.ADMIN).user
        assert as_user(acme.viewer).get(LOG).json() == {
            "object": "request_log",
            "content": "off",
            "content_days": 30,
            "metadata_days": 90,
        }
        assert_error(as_user(admin).put(LOG, {"content": "all"}, format="json"), 403)
        owner = as_user(acme.owner)
        assert owner.put(LOG, {"content": "all", "content_days": 3}, format="json").json() == {
            "object": "request_log",
            "content": "all",
            "content_days": 3,
            "metadata_days": 90,
        }
        assert owner.put(LOG, {"metadata_days": 5}, format="json").json()["content"] == "all"
        assert_error(owner.put(LOG, {"content_days": 0}, format="json"), 400, "content_days")
        assert_error(owner.put(LOG, {"days": 1}, format="json"), 400, "days")

    def test_refusals_are_counted_by_hour_and_reason(self, acme: Party, globex: Party) -> None:
        hour = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
        limited = RefusalKey(acme.tenant.id, hour, "/v1/completions", 429, "rate_limit_exceeded")
        refusals_add({limited: 2, limited._replace(status=404, code="model_not_found"): 1})
        refusals_add({limited: 3, limited._replace(tenant_id=globex.tenant.id): 7})
        found = as_key(acme).get("/api/v1/refusals").json()["data"]
        assert {(row["status"], row["code"], row["requests"]) for row in found} == {
            (429, "rate_limit_exceeded", 5),
            (404, "model_not_found", 1),
        }
        with tenant_scope(globex.tenant.id):
            assert RefusalHour.objects.get().requests == 7


def test_a_tenant_that_is_gone_costs_the_others_no_counts(acme: Party, globex: Party) -> None:
    hour = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    refused = RefusalKey(acme.tenant.id, hour, "/v1/completions", 429, "rate_limit_exceeded")
    gone = refused._replace(tenant_id=globex.tenant.id)
    with tenant_scope(globex.tenant.id):
        globex.tenant.delete()
    refusals_add({gone: 7, refused: 2})
    refusals_add({gone: 1})
    with connection.cursor() as cursor:
        cursor.execute("set constraints all immediate")
    with all_tenants(reason="test"):
        counted = RefusalHour.objects.values_list("tenant_id", "requests")
        assert list(counted) == [(acme.tenant.id, 2)]
