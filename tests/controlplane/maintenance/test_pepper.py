"""The pepper can be changed without a key, a second factor or stored words being lost."""

from __future__ import annotations

import datetime as dt
import io
import json
from typing import Any

import pytest
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import TOTP
from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane.adapters.models import BaseModel
from controlplane.errors import AuthenticationFailed
from controlplane.evaluations import judge
from controlplane.requestlog import sealing
from controlplane.requestlog.models import LogPolicy
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth, key_services, keys, pepper_change
from controlplane.tenants.auth import Principal
from controlplane.tenants.models import ApiKey, Role
from controlplane.webhooks import signing
from controlplane.webhooks.models import WebhookEndpoint
from tests.controlplane.conftest import Party, as_key, make_operator

NEW = "a new pepper of sixty-four digits"


def status(*options: str) -> dict[str, Any]:
    output = io.StringIO()
    call_command("pepper_status", *options, stdout=output)
    report: dict[str, Any] = json.loads(output.getvalue())
    return report


def change(settings: Any, pepper: str = NEW) -> None:
    settings.ACCEPTED_PEPPERS = [settings.API_KEY_PEPPER]
    settings.API_KEY_PEPPER = pepper
    auth._keys.forget(*auth._keys.keys())


def end(settings: Any) -> None:
    settings.ACCEPTED_PEPPERS = []
    auth._keys.forget(*auth._keys.keys())


def test_a_key_moves_when_it_is_used_and_others_end_with_the_old_pepper(
    settings: Any, acme: Party, globex: Party
) -> None:
    assert status()["api_keys"] == {"current": 2, "accepted": 0, "unknown": 0, "foreign": 0}
    change(settings)
    assert status()["needs_accepted"] == 2
    assert auth.authenticate(acme.header).tenant == acme.tenant
    assert async_to_sync(auth.find_principal)(acme.header).tenant == acme.tenant
    assert status()["api_keys"] == {"current": 1, "accepted": 1, "unknown": 0, "foreign": 0}
    end(settings)
    assert auth.authenticate(acme.header).tenant == acme.tenant
    with pytest.raises(AuthenticationFailed):
        auth.authenticate(globex.header)
    with pytest.raises(CommandError, match="1 values are under a pepper that is not configured"):
        status()


def test_both_secrets_of_a_rotated_key_move(settings: Any, acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        _, new_text = key_services.api_key_rotate(public_id=acme.api_key.public_id)
    change(settings)
    assert status()["needs_accepted"] == 2
    auth.authenticate(acme.header)
    assert status()["needs_accepted"] == 1
    auth.authenticate(f"Bearer {new_text}")
    assert status()["needs_accepted"] == 0
    end(settings)
    auth.authenticate(acme.header)
    auth.authenticate(f"Bearer {new_text}")


def test_a_rotation_under_the_new_pepper_keeps_the_old_secret(settings: Any, acme: Party) -> None:
    change(settings)
    with tenant_scope(acme.tenant.id):
        key_services.api_key_rotate(public_id=acme.api_key.public_id)
    assert status()["api_keys"] == {"current": 1, "accepted": 1, "unknown": 0, "foreign": 0}
    auth.authenticate(acme.header)
    assert status()["api_keys"]["current"] == 2


def test_a_key_of_an_earlier_version_is_unknown_until_it_is_used(
    settings: Any, acme: Party
) -> None:
    with tenant_scope(acme.tenant.id):
        ApiKey.objects.update(pepper_id="")
    assert (status()["needs_accepted"], status()["api_keys"]["unknown"]) == (0, 1)
    change(settings)
    assert status()["needs_accepted"] == 1  # it may be
    auth.authenticate(acme.header)
    assert status()["api_keys"]["current"] == 1


def test_keys_that_have_ended_need_no_pepper(settings: Any, acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id):
        key_services.api_key_revoke(public_id=acme.api_key.public_id)
    with tenant_scope(globex.tenant.id):
        ApiKey.objects.update(expires_at=timezone.now() - dt.timedelta(seconds=1))
    change(settings)
    assert status()["needs_accepted"] == 0


def test_a_key_rotated_at_the_same_moment_keeps_its_new_secret(settings: Any, acme: Party) -> None:
    change(settings)
    parts = keys.parse(acme.key_text)
    assert parts is not None
    with tenant_scope(acme.tenant.id):
        seen = ApiKey.objects.select_related("tenant").get()
        key_services.api_key_rotate(public_id=seen.public_id, grace_s=0)
        after = bytes(ApiKey.objects.get().secret_hmac)
    secret = pepper_change.Secret(is_old=False, is_under_current_pepper=False)
    pepper_change.renew(seen, parts, secret)
    with tenant_scope(acme.tenant.id):
        assert bytes(ApiKey.objects.get().secret_hmac) == after


def test_second_factors_and_stored_words_move_at_once(settings: Any, acme: Party) -> None:
    operator = make_operator()
    with tenant_scope(acme.tenant.id):
        policy = LogPolicy.objects.create(content="all", wrapped_key=sealing.new_key())
        hook = {
            "sealed_secret": signing.seal("whsec_2"),
            "old_sealed_secret": signing.seal("whsec_1"),
        }
        WebhookEndpoint.objects.create(url="https://example.com/", **hook)
        by = Principal(tenant=acme.tenant, role=Role.OWNER, user=acme.owner)
        made = judge.judge_set(
            name="strict", url="https://8.8.8.8/v1", model="m", by=by, api_key="sk-1"
        )
    sealed = sealing.seal({"text": "words"}, bytes(policy.wrapped_key))
    factor = TOTP(Authenticator.objects.get(user=operator))
    secret = factor.instance.data["secret"]
    change(settings)
    before = status()
    assert (before["second_factors"]["accepted"], before["content_keys"]["accepted"]) == (1, 1)
    assert before["webhook_secrets"]["accepted"] == 2 and before["needs_accepted"] >= 4
    after = status("--reencrypt")
    assert after == status("--reencrypt")
    assert (after["second_factors"]["current"], after["content_keys"]["current"]) == (1, 1)
    assert after["webhook_secrets"] == {"current": 2, "accepted": 0, "foreign": 0}
    assert (before["judge_keys"]["accepted"], after["judge_keys"]["current"]) == (1, 1)
    end(settings)
    with tenant_scope(acme.tenant.id):
        made.refresh_from_db()
        assert judge.is_current(bytes(made.sealed))
        (found,) = WebhookEndpoint.objects.values_list("sealed_secret", "old_sealed_secret")
        assert [signing.unseal(bytes(one)) for one in found] == ["whsec_2", "whsec_1"]
        policy = LogPolicy.objects.get()
    assert sealing.unseal(sealed, bytes(policy.wrapped_key)) == {"text": "words"}
    factor = TOTP(Authenticator.objects.get(user=operator))
    assert factor.instance.data["secret"] != secret
    assert not factor.validate_code("000000")  # it reads the secret
    with pytest.raises(CommandError, match="1 values"):  # the key that was not used
        status()


def test_answers_to_idempotent_writes_are_read_under_both(settings: Any, acme: Party) -> None:
    def write() -> Any:
        client = as_key(acme)
        return client.post(
            "/api/v1/adapters",
            {"name": "x", "base_model": "nothing"},
            format="json",
            HTTP_IDEMPOTENCY_KEY="once",
        )

    BaseModel.objects.create(
        name="nothing", revision="0" * 64, config={}, context_length=1, max_rank=8
    )
    first = write()
    assert first.status_code == 201, first.content
    change(settings)
    assert write().content == first.content
    end(settings)
    again = write()
    assert again.status_code == 409
    assert "can no longer be read" in again.json()["error"]["message"]
