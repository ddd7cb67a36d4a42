"""A second version of an adapter that is held back, its report, and a canary for some callers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import time
from pathlib import Path

from safetensors.numpy import load_file, save_file

from demo.ask import client_of
from demo.client import FILES, ManagementClient
from demo.data import score
from demo.errors import StepFailed
from demo.state import DemoState, TenantState

ALIAS = "invoices-prod"
CANARY_PERCENT = 10
#: Number of callers that ask first: about a tenth get the canary. If none does, others ask, too.
NUM_CALLERS = 40
MAX_CALLERS = 240
MAX_TOKENS = 4
#: An inspection reads the base model and computes on the processor.
REPORT_TIMEOUT_S = 120.0
#: How strong the second version is beside the first: almost the same answers, other bytes.
STRENGTH = 0.97


def second_version(folder: Path, output: Path) -> Path:
    """Write the PEFT adapter in `folder` again, a little weaker, without training. -> `output`."""
    output.mkdir(parents=True, exist_ok=True)
    config, tensors = FILES
    (output / config).write_bytes((folder / config).read_bytes())
    weights = load_file(folder / tensors)
    scaled = {
        name: weight * weight.dtype.type(STRENGTH) if ".lora_B." in name else weight
        for name, weight in weights.items()
    }
    save_file(scaled, output / tensors)
    return output


def wait_for_report(
    client: ManagementClient, adapter: str, number: int, *, timeout_s: float = REPORT_TIMEOUT_S
) -> bool:
    """Wait until the doctor's report of a version is finished. -> False after `timeout_s`.

    One that was not inspected when it became ready is inspected now.
    """
    path = f"adapters/{adapter}/versions/{number}"
    give_up_at = time.monotonic() + timeout_s
    while True:
        probe = client.call("GET", path)["probe"]
        status = probe["status"] if probe else "not_run"
        if status in ("agreed", "mismatch"):
            return True
        if time.monotonic() >= give_up_at:
            return False
        if status == "not_run":
            with contextlib.suppress(StepFailed):  # no inspector has shown itself yet
                client.call("POST", f"{path}/doctor")
        time.sleep(0.5)


def make_canary(client: ManagementClient, tenant: TenantState, number: int) -> None:
    """Make the alias: the live version for most callers, version `number` for a tenth.

    An alias of an earlier run stays as it is.
    """
    if any(alias["name"] == ALIAS for alias in client.call("GET", "aliases")["data"]):
        return
    body = {
        "name": ALIAS,
        "primary": {"adapter": tenant.adapter},
        "canary": {"adapter": tenant.adapter, "version": number},
        "canary_percent": CANARY_PERCENT,
        "reason": "try the second version on a tenth of the callers",
    }
    client.call("POST", "aliases", body)


async def ask_as_callers(state: DemoState, tenant: TenantState) -> dict[str, int]:
    """Ask the alias for many callers. -> how many each target answered."""
    messages = score.heldout(tenant.slug)[0]["messages"]
    async with client_of(state, tenant) as client:

        async def ask(number: int) -> str:
            answer = await client.chat.completions.with_raw_response.create(
                model=ALIAS, messages=messages, max_tokens=MAX_TOKENS, user=f"caller {number}"
            )
            return answer.headers["x-lorikeet-alias-target"]

        told: collections.Counter[str] = collections.Counter()
        for first in range(0, MAX_CALLERS, NUM_CALLERS):
            callers = range(first, first + NUM_CALLERS)
            told.update(await asyncio.gather(*map(ask, callers)))
            if "canary" in told:
                break
    return dict(told)


def summary(told: dict[str, int], number: int) -> str:
    """Return what the callers got, in a line."""
    primary, canary = told.get("primary", 0), told.get("canary", 0)
    return (
        f"  alias {json.dumps(ALIAS)}: {primary} of {sum(told.values())} callers got the live "
        f"version, {canary} the canary, version {number}"
    )
