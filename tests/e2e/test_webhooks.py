"""An adapter that is uploaded is told to a server outside, by the real Celery and its broker."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path

import openai

from demo.seed import manage
from tests.e2e.adapters import lora_tensors, write_adapter
from tests.e2e.system import System, until
from tests.receiver import receiving

_MAKE = """
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.webhooks.services import webhook_create
with tenant_scope(Tenant.objects.get(slug="globex").pk):
    made, secret = webhook_create(url="{url}", event_types=["version.ready", "version.promoted"])
print(made.pk, secret)
"""


def test_an_upload_is_told_within_seconds(system: System, tmp_path: Path) -> None:
    with receiving() as receiver, contextlib.closing(system.management("globex")) as client:
        code = _MAKE.format(url=f"http://127.0.0.1:{receiver.port}/hook?of=globex")
        secret = shlex.split(manage(system.env, "shell", "-c", code))[-1]
        made = write_adapter(tmp_path, lora_tensors(system.base_config, seed=9))
        client.upload_adapter("told", made, base_model=system.base_model)
        until(lambda: len(receiver.received) >= 2, "both events arrive")
        events = {}
        for sent in receiver.received:
            sdk = openai.OpenAI(api_key="x").webhooks
            sdk.verify_signature(sent.body, sent.headers, secret=secret)
            event = json.loads(sent.body)
            events[event["type"]] = event["data"]
    assert events["version.ready"]["adapter"] == "told"
    assert events["version.promoted"]["cause"] == "first"
    assert {sent.path for sent in receiver.received} == {"/hook?of=globex"}
