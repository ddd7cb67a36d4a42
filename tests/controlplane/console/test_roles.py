"""Every address of the console, as every role: whoever lacks its permission gets 403."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.test import Client
from django.urls import URLPattern, reverse

from controlplane.console.urls import urlpatterns
from controlplane.infra.web import threads
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Role, User
from controlplane.tenants.permissions import Permission
from controlplane.tenants.roles import PERMISSIONS
from controlplane.tenants.services import member_add
from tests.controlplane.conftest import PASSWORD, Party
from tests.controlplane.console.conftest import browser_of

#: Each page's permission; None: a person's own, or for people who are not in yet.
PAGES: dict[str, Permission | None] = {
    "security": None,
    "verify_email": None,
    "switch_tenant": None,
    "invite": None,
    "overview": Permission.READ,
    "adapters": Permission.READ,
    "adapter": Permission.READ,
    "version": Permission.READ,
    "version_status": Permission.READ,
    "aliases": Permission.READ,
    "alias": Permission.READ,
    "alias_now": Permission.READ,
    "diff": Permission.READ,
    "evaluations": Permission.READ,
    "morning": Permission.READ,
    "comparison": Permission.READ,
    "suite": Permission.READ,
    "run_suite": Permission.INFER,
    "cancel_evaluation": Permission.INFER,
    "new_suite": Permission.TRAINING_WRITE,
    "add_case": Permission.TRAINING_WRITE,
    "delete_suite": Permission.TRAINING_WRITE,
    "doctor": Permission.READ,
    "inspect": Permission.ADAPTERS_WRITE,
    "training": Permission.READ,
    "dataset": Permission.READ,
    "run": Permission.READ,
    "run_status": Permission.READ,
    "keys": Permission.READ,
    "members": Permission.READ,
    "accounts": Permission.READ,
    "limits": Permission.READ,
    "limits_now": Permission.READ,
    "settings": Permission.READ,
    "playground": Permission.INFER,
    "playground_run": Permission.INFER,
    "playground_vectors": Permission.INFER,
    "upload": Permission.ADAPTERS_WRITE,
    "import": Permission.ADAPTERS_WRITE,
    "start_upload": Permission.ADAPTERS_WRITE,
    "sign_parts": Permission.ADAPTERS_WRITE,
    "upload_state": Permission.ADAPTERS_WRITE,
    "abort_upload": Permission.ADAPTERS_WRITE,
    "complete_upload": Permission.ADAPTERS_WRITE,
    "promote": Permission.ADAPTERS_WRITE,
    "deprecate": Permission.ADAPTERS_WRITE,
    "undeprecate": Permission.ADAPTERS_WRITE,
    "keep_original": Permission.ADAPTERS_WRITE,
    "allow_copy": Permission.ADAPTERS_WRITE,
    "retire": Permission.ADAPTERS_WRITE,
    "unretire": Permission.ADAPTERS_WRITE,
    "download_version": Permission.ADAPTERS_WRITE,
    "roll_back": Permission.ADAPTERS_WRITE,
    "set_policy": Permission.ADAPTERS_WRITE,
    "delete_version": Permission.ADAPTERS_WRITE,
    "delete_adapter": Permission.ADAPTERS_WRITE,
    "new_alias": Permission.ADAPTERS_WRITE,
    "edit_alias": Permission.ADAPTERS_WRITE,
    "set_alias_share": Permission.ADAPTERS_WRITE,
    "promote_canary": Permission.ADAPTERS_WRITE,
    "remove_canary": Permission.ADAPTERS_WRITE,
    "roll_back_alias": Permission.ADAPTERS_WRITE,
    "set_guard": Permission.ADAPTERS_WRITE,
    "start_ramp": Permission.ADAPTERS_WRITE,
    "move_ramp": Permission.ADAPTERS_WRITE,
    "delete_alias": Permission.ADAPTERS_WRITE,
    "delete_dataset": Permission.TRAINING_WRITE,
    "schedule": Permission.TRAINING_WRITE,
    "delete_schedule": Permission.TRAINING_WRITE,
    "run_schedule": Permission.TRAINING_WRITE,
    "upload_dataset": Permission.TRAINING_WRITE,
    "restore_dataset": Permission.TRAINING_WRITE,
    "pull_dataset": Permission.TRAINING_WRITE,
    "start_run": Permission.TRAINING_WRITE,
    "run_cost": Permission.TRAINING_WRITE,
    "cancel_run": Permission.TRAINING_WRITE,
    "pause_run": Permission.TRAINING_WRITE,
    "resume_run": Permission.TRAINING_WRITE,
    "create_key": Permission.KEYS_MANAGE,
    "edit_key": Permission.KEYS_MANAGE,
    "rotate_key": Permission.KEYS_MANAGE,
    "revoke_key": Permission.KEYS_MANAGE,
    "set_role": Permission.MEMBERS_MANAGE,
    "remove_member": Permission.MEMBERS_MANAGE,
    "create_invite": Permission.MEMBERS_MANAGE,
    "revoke_invite": Permission.MEMBERS_MANAGE,
    "create_account": Permission.MEMBERS_MANAGE,
    "account": Permission.MEMBERS_MANAGE,
    "delete_account": Permission.MEMBERS_MANAGE,
    "set_limit": Permission.LIMITS_MANAGE,
    "remove_limit": Permission.LIMITS_MANAGE,
    "set_budget": Permission.LIMITS_MANAGE,
    "remove_budget": Permission.LIMITS_MANAGE,
    "usage": Permission.USAGE_READ,
    "requests": Permission.REQUESTS_READ,
    "requests_newest": Permission.REQUESTS_READ,
    "request": Permission.REQUESTS_READ,
    "captured": Permission.REQUESTS_READ,
    "dataset_from_captured": Permission.REQUESTS_CONTENT,
    "erase_captured": Permission.REQUESTS_CONTENT,
    "notifications": Permission.READ,
    **dict.fromkeys(
        (
            *("webhooks", "create_webhook", "webhook", "rotate_webhook", "enable_webhook"),
            *("test_webhook", "delete_webhook", "redeliver"),
        ),
        Permission.WEBHOOKS_MANAGE,
    ),
    "set_log_policy": Permission.TENANT_MANAGE,
    "set_capture": Permission.TENANT_MANAGE,
    "audit": Permission.AUDIT_READ,
    "verify_trail": Permission.AUDIT_READ,
}
_OWN = {name for name, permission in PAGES.items() if permission is None}


def address(name: str) -> str:
    """A page's address; what it names does not exist."""
    pattern = next(p for p in urlpatterns if isinstance(p, URLPattern) and p.name == name)
    samples = {"IntConverter": 1, "UUIDConverter": uuid.uuid4(), "StringConverter": "nosuch"}
    converters: dict[str, Any] = pattern.pattern.converters
    values = {field: samples[type(kind).__name__] for field, kind in converters.items()}
    return reverse(f"console:{name}", kwargs=values)


def answer(browser: Client, name: str) -> int:
    path = address(name)
    status = browser.get(path).status_code
    return browser.post(path).status_code if status == 405 else status


@pytest.fixture
def people(acme: Party) -> dict[Role, User]:
    with tenant_scope(acme.tenant.id):
        return {
            role: member_add(email=f"{role}@acme.example", role=role, password=PASSWORD).user
            for role in Role
        }


def test_every_page_is_listed() -> None:
    assert {p.name for p in urlpatterns if p.name} == set(PAGES)


@pytest.mark.parametrize("role", Role)
def test_pages_obey_the_role(
    role: Role, people: dict[Role, User], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An async view returns its connection, which is the test's own here.
    monkeypatch.setattr(threads, "close_old_connections", lambda: None)
    browser = browser_of(people[role])
    for name, permission in PAGES.items():
        if permission is not None:
            is_refused = answer(browser, name) == 403
            assert is_refused == (permission not in PERMISSIONS[role]), name
    is_refused = browser.post(address("settings"), {"name": "Mine"}).status_code == 403
    assert is_refused == (Permission.TENANT_MANAGE not in PERMISSIONS[role])


@pytest.mark.parametrize("name", sorted(set(PAGES) - _OWN))
def test_nobody_gets_in_without_a_session(name: str, db: None) -> None:
    path = address(name)
    for browse in (Client().get, Client().post):
        got = browse(path)
        assert got.status_code == 405 or got.headers["Location"].startswith("/console/sign-in")
