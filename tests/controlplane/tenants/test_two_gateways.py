"""A key's changes at one gateway, as another one obeys them: two web servers, one database."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.live import ROOT, LiveStack, wait_for

DOCKERFILE = ROOT / "Dockerfile"
#: What docs/security.md promises for revocations and other changes of a key.
PROMISED_S = 1.0

_MANAGER = """
import json, sys, django
django.setup()
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import key_services
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import Role, ServiceAccount, Tenant
with tenant_scope(Tenant.objects.get(slug="acme").id):
    account, _ = ServiceAccount.objects.get_or_create(name="manager", defaults={"role": Role.OWNER})
    rules = KeyRules(scopes=("infer", "keys:manage", "read"))
    _, text = key_services.api_key_create(name="manager", owner=account, rules=rules)
print(text)
"""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Gateways:
    def __init__(self, urls: tuple[str, str], manager: str) -> None:
        self.here, self.there = urls
        self._manager = manager

    def manage(self, path: str, body: Any) -> Any:
        answer = httpx.post(
            f"{self.here}/api/v1/keys{path}", json=body, headers=bearer(self._manager)
        )
        assert answer.status_code < 300, answer.text
        return answer.json()

    def change(self, public_id: str, body: Any) -> None:
        url = f"{self.here}/api/v1/keys/{public_id}"
        assert httpx.patch(url, json=body, headers=bearer(self._manager)).status_code == 200

    def models(self, key: str, at: str) -> httpx.Response:
        return httpx.get(f"{at}/v1/models", headers=bearer(key))

    def statuses(self, key: str) -> tuple[int, int]:
        here, there = (self.models(key, at).status_code for at in (self.here, self.there))
        return here, there


@pytest.fixture(scope="module")
def gateways(live: LiveStack) -> Iterator[Gateways]:
    pool = live.with_pool("two-gateways")
    env = {"DATABASE_POOL_SIZE": "2", "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    # The first as the image has it, the second as if these tests were its proxy.
    (image,) = re.findall(r'^ENV FORWARDED_ALLOW_IPS="(.*)"$', DOCKERFILE.read_text(), re.M)
    first = pool.start_web("first", **env, FORWARDED_ALLOW_IPS=image)
    second = pool.start_web("second", **env, FORWARDED_ALLOW_IPS="127.0.0.1")
    pool.env["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    yield Gateways((first[1], second[1]), pool.run("-c", _MANAGER).strip())
    for process, _ in (first, second):
        process.stop()


def test_rotation_stops_nobody(gateways: Gateways) -> None:
    made = gateways.manage("", {"name": "rotated"})
    assert gateways.statuses(made["key"]) == (200, 200)
    rotated = gateways.manage(f"/{made['public_id']}/rotate", {"grace_seconds": 2})
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert gateways.statuses(made["key"]) == (200, 200)
        assert gateways.statuses(rotated["key"]) == (200, 200)
    wait_for(lambda: gateways.statuses(made["key"]) == (401, 401), timeout_s=3)
    assert gateways.statuses(rotated["key"]) == (200, 200)


@pytest.mark.alone
def test_key_is_held_to_its_models_and_addresses(gateways: Gateways) -> None:
    made = gateways.manage("", {"name": "narrow", "allowed_models": ["acme-adapter"]})
    listed = gateways.models(made["key"], gateways.there).json()["data"]
    assert [model["id"] for model in listed] == ["acme-adapter"]
    for model in ("acme-misfit", "globex-adapter", "nothing"):
        body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        answer = httpx.post(
            f"{gateways.there}/v1/chat/completions", json=body, headers=bearer(made["key"])
        )
        error = json.loads(answer.text)["error"]
        assert (answer.status_code, error["code"]) == (403, "model_not_allowed")
    gateways.change(made["public_id"], {"allowed_ips": ["192.0.2.1"]})
    wait_for(lambda: gateways.statuses(made["key"]) == (403, 403), timeout_s=PROMISED_S)


def test_who_is_no_proxy_cannot_say_where_it_comes_from(gateways: Gateways) -> None:
    rules = {"name": "fenced", "scopes": ["infer"], "allowed_ips": ["203.0.113.7"]}
    headers = {
        **bearer(gateways.manage("", rules)["key"]),
        "X-Forwarded-For": "203.0.113.7",
    }
    here, there = (
        httpx.get(f"{url}/v1/models", headers=headers) for url in (gateways.here, gateways.there)
    )
    assert here.json()["error"]["code"] == "address_not_allowed"
    assert there.status_code == 200, there.text


def test_a_stolen_key_with_bounds_gets_no_further(gateways: Gateways) -> None:
    """As whoever found it would try: through both gateways, while its owner revokes it."""
    bounds = {"scopes": ["keys:manage", "infer", "read"], "allowed_models": ["invoices"]}
    stolen = gateways.manage("", {"name": "stolen", **bounds})
    headers = bearer(stolen["key"])
    with httpx.Client(base_url=f"{gateways.there}/api/v1", headers=headers) as thief:
        for more in ({"allowed_models": []}, {"scopes": ["audit:read"]}):
            assert thief.patch(f"/keys/{stolen['public_id']}", json=more).status_code == 403
            assert thief.post("/keys", json={"name": "mine", **more}).status_code == 403
        other = gateways.manage("", {"name": "free", "scopes": ["infer"]})
        assert thief.post(f"/keys/{other['public_id']}/rotate", json={}).status_code == 403
        child = thief.post("/keys", json={"name": "mine"}).json()
        assert (child["allowed_models"], child["parent"]) == (["invoices"], stolen["public_id"])
        made = [child["key"]]

        def bear() -> None:
            while (answer := thief.post("/keys", json={"name": "hidden"})).status_code == 201:
                made.append(answer.json()["key"])

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(bear) for _ in range(4)]
            wait_for(lambda: len(made) > 4, what="the thief's keys")
            gateways.manage(f"/{stolen['public_id']}/revoke", {})
            for one in running:
                one.result()
    time.sleep(PROMISED_S)
    assert {gateways.statuses(key) for key in made} == {(401, 401)}


def test_guesses_from_everywhere_do_not_lock_a_person_out(
    gateways: Gateways, live: LiveStack
) -> None:
    """The second gateway believes this test's `X-Forwarded-For`, so strangers come from afar."""
    email, password = "guessed@acme.example", "a long enough passphrase"
    pool = live.with_pool("two-gateways")
    code = (
        "import django; django.setup()\n"
        "from controlplane.tenants.services import user_create\n"
        f"user_create(email={email!r}, password={password!r}, is_proven=True)"
    )
    pool.env["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    pool.run("-c", code)

    def attempt(words: str, address: str, client: httpx.Client | None = None) -> str:
        with contextlib.ExitStack() as opened:
            client = client or opened.enter_context(httpx.Client(base_url=gateways.there))
            origin = {"X-Forwarded-For": address}
            page = client.get("/console/sign-in", headers=origin).text
            token = re.findall(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)[0]
            form = {"login": email, "password": words, "csrfmiddlewaretoken": token}
            answer = client.post("/console/sign-in", data=form, headers=origin)
            if answer.status_code == 302:
                return "in"
            return "stopped" if "Too many attempts" in answer.text else "wrong"

    with httpx.Client(base_url=gateways.there) as theirs:
        assert attempt(password, "192.0.2.1", theirs) == "in"
        theirs.cookies.delete("sessionid")
        for address in range(1, 4):
            seen = [attempt("guess", f"203.0.113.{address}") for _ in range(6)]
            assert seen == ["wrong"] * 5 + ["stopped"]
            assert attempt(password, f"203.0.113.{address}") == "stopped"
        assert attempt(password, "198.51.100.9") == "in"
        assert attempt(password, "203.0.113.1", theirs) == "in"


@pytest.mark.alone
def test_revoked_key_is_refused_everywhere_within_a_second(gateways: Gateways) -> None:
    made = gateways.manage("", {"name": "short-lived"})
    assert gateways.statuses(made["key"]) == (200, 200)
    gateways.manage(f"/{made['public_id']}/revoke", {})
    revoked_at = time.monotonic()
    while gateways.statuses(made["key"]) != (401, 401):
        # Asking all the time must not keep a cached key alive.
        assert time.monotonic() - revoked_at < PROMISED_S
