"""Requests to the running platform: the showcase, and the measurement of acme's adapter."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

import openai

from demo.data import score
from demo.screen import Report
from demo.state import DemoState, TenantState

MAX_TOKENS = 120
#: Enough for a held-out answer; the base model would write more.
HELD_OUT_MAX_TOKENS = 72
#: The base model is asked fewer: it writes to the limit, and gets nearly nothing right.
NUM_BASE_PROMPTS = 8

INVOICE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "vendor": {"type": "string", "maxLength": 60},
        "invoice_number": {"type": "string", "maxLength": 20},
        "date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "total": {"type": "number"},
        "items": {"type": "integer"},
    },
    "required": ["vendor", "invoice_number", "date", "currency", "total", "items"],
    "additionalProperties": False,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed answer."""

    tenant: str
    model: str
    prompt: str
    text: str
    first_token_s: float
    total_s: float


def client_of(state: DemoState, tenant: TenantState) -> openai.AsyncOpenAI:
    """Return the official client with a tenant's key."""
    return openai.AsyncOpenAI(
        base_url=f"{state.base_url}/v1", api_key=tenant.api_key, max_retries=1, timeout=300
    )


async def ask_everybody(state: DemoState) -> list[Answer]:
    """Send one streamed request to each tenant's adapter, all at the same time."""
    return await asyncio.gather(*(ask_streamed(state, tenant) for tenant in state.tenants))


async def ask_streamed(state: DemoState, tenant: TenantState) -> Answer:
    """Send one streamed request to a tenant's adapter."""
    messages = score.heldout(tenant.slug)[0]["messages"]
    async with client_of(state, tenant) as client:
        started = time.monotonic()
        first: float | None = None
        pieces: list[str] = []
        stream = await client.chat.completions.create(
            model=tenant.adapter,
            messages=messages,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
        )
        async for chunk in stream:
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first = first if first is not None else time.monotonic() - started
                pieces.append(text)
    total = time.monotonic() - started
    return Answer(
        tenant=tenant.slug,
        model=tenant.adapter,
        prompt=messages[-1]["content"],
        text="".join(pieces),
        first_token_s=first if first is not None else total,
        total_s=total,
    )


async def ask_with_schema(state: DemoState, tenant: TenantState) -> dict[str, Any]:
    """Ask the tenant's adapter with `INVOICE_SCHEMA`. -> the parsed answer."""
    messages = score.heldout(tenant.slug)[1]["messages"]
    async with client_of(state, tenant) as client:
        response = await client.chat.completions.create(
            model=tenant.adapter,
            messages=messages,
            max_tokens=200,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "invoice", "schema": INVOICE_SCHEMA, "strict": True},
            },
        )
    answer: dict[str, Any] = json.loads(response.choices[0].message.content or "")
    return answer


async def measure(
    state: DemoState, tenant: TenantState, *, base_model: str, report: Report
) -> dict[str, Any]:
    """Measure the share of right invoice fields: the adapter's on all held-out prompts, the base
    model's on the first `NUM_BASE_PROMPTS`.

    All are asked at once: a CPU reads the weights once for one request or for a batch.
    """
    rows = score.heldout(tenant.slug)
    asked = [(tenant.adapter, row) for row in rows]
    asked += [(base_model, row) for row in rows[:NUM_BASE_PROMPTS]]
    done = 0

    async def fields(
        client: openai.AsyncOpenAI, model: str, row: dict[str, Any]
    ) -> dict[str, bool]:
        nonlocal done
        response = await client.chat.completions.create(
            model=model,
            messages=row["messages"],
            max_tokens=HELD_OUT_MAX_TOKENS,
            temperature=0,
        )
        done += 1
        report(done / len(asked), f"{done}/{len(asked)} prompts")
        return score.invoice_fields(response.choices[0].message.content or "", row["expected"])

    async with client_of(state, tenant) as client:
        results = await asyncio.gather(*(fields(client, model, row) for model, row in asked))
    return {
        "prompts": len(rows),
        "adapter": round(score.share(results[: len(rows)]), 3),
        "base_prompts": NUM_BASE_PROMPTS,
        "base": round(score.share(results[len(rows) :]), 3),
    }
