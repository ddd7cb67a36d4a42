"""Make the admit script's arguments from a job, and an error from its refusal."""

from __future__ import annotations

import json
import math
from typing import Any

from django.conf import settings

from contract.messages import protocol
from contract.messages.protocol import ErrorCode, GenerateJob
from contract.queue import fair_queue
from controlplane.errors import ApiError, Conflict, RateLimited, Unavailable
from controlplane.usage.limits.admit import (
    MAX_TENANT_WAITING,
    MAX_WAITING,
    Admitted,
    Limits,
    Rate,
    Refusal,
    admit_args,
)

#: How many tokens an answer without max_tokens counts as, in queue and rates, until it ends.
USUAL_OUTPUT_TOKENS = 512
#: Tokens around a message: its role and the template's marks.
MESSAGE_TOKENS = 8
#: Tokens that a prompt says about tools beside their definitions.
TOOL_TEXT_TOKENS = 1024
MAX_RETRY_AFTER_S = 60.0
#: A batch request may wait this many times as long as an interactive one.
BATCH_PATIENCE = 10


def prompt_estimate(job: GenerateJob) -> int:
    """Return an upper bound of the prompts' tokens: a token of text has one byte at least."""
    if job.messages is None:
        prompts = job.prompts or [job.text if job.token_ids is None else job.token_ids]
        return sum(_raw_estimate(prompt or "") for prompt in prompts)
    texts = [json.dumps(item, ensure_ascii=False) for item in (*job.messages, *job.tools)]
    around_tools = TOOL_TEXT_TOKENS if job.tools else 0
    return sum(len(text.encode()) + MESSAGE_TOKENS for text in texts) + around_tools


def _raw_estimate(prompt: Any) -> int:
    return len(prompt.encode()) + 1 if isinstance(prompt, str) else len(prompt)


def output_estimate(job: GenerateJob) -> int:
    """Return how many tokens the answers count as until they have ended."""
    most = job.sampling.max_tokens
    usual = USUAL_OUTPUT_TOKENS if most is None else min(most, USUAL_OUTPUT_TOKENS * 8)
    return usual * job.num_choices


def output_bound(job: GenerateJob, context_length: int) -> int:
    """Return how many tokens the answers have at most."""
    most = job.sampling.max_tokens
    return (context_length if most is None else min(most, context_length)) * job.num_choices


def admission_args(
    job: GenerateJob, pool: str, limits: Limits, *, tokens_per_s: float, context_length: int
) -> list[Any]:
    """Return the admit script's arguments.

    tokens_per_s  of all workers of the job's base model; 0: not known
    """
    class_ = fair_queue.BATCH if job.is_batch else fair_queue.INTERACTIVE
    deadline = job.deadline or job.created_at + protocol.JOB_TTL_S
    # Longer than the deadline: a request that waited until then is still to be ended and settled.
    ttl_s = protocol.JOB_TTL_S + max(0, int(deadline - job.created_at))
    return [
        *(pool, fair_queue.queue_key(pool, job.base_model), job.request_id),
        *(job.encode(), job.tenant_id, class_, ",".join(ref.digest for ref in job.adapters)),
        *(deadline, ttl_s),
        *(job.gateway_id, prompt_estimate(job), output_estimate(job)),
        *(output_bound(job, context_length), tokens_per_s),
        settings.MAX_WAIT_S * (BATCH_PATIENCE if job.is_batch else 1),
        *(MAX_WAITING, MAX_TENANT_WAITING),
        *admit_args(limits, pool, job.tenant_id),
    ]


def rate_headers(admitted: Admitted) -> dict[str, str]:
    """Return OpenAI's x-ratelimit headers, and one of ours for a soft budget that is passed."""
    headers: dict[str, str] = {}
    for name, rate in (("requests", admitted.requests), ("tokens", admitted.tokens)):
        if rate is not None:
            headers |= _headers_of(name, rate)
    if admitted.soft_budget is not None:
        headers["x-lorikeet-budget"] = f"soft limit of the {admitted.soft_budget.period} passed"
    return headers


def _headers_of(name: str, rate: Rate) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(rate.limit),
        f"x-ratelimit-remaining-{name}": str(rate.remaining),
        f"x-ratelimit-reset-{name}": _duration(rate.reset_s),
    }


def _duration(seconds: float) -> str:
    """Write a duration as OpenAI does: 120ms, 1.5s."""
    return f"{round(seconds * 1000)}ms" if seconds < 1 else f"{seconds:.3g}s"


class TooManyRequests(RateLimited):
    """A rate limit of the tenant is reached; the headers say which, and until when.

    reason  of the refusal; it becomes the error's type, tokens or requests
    """

    def __init__(
        self, message: str, *, reason: str, more_headers: dict[str, str], **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.type = "tokens" if reason == "tokens" else "requests"
        self._more_headers = more_headers

    def headers(self) -> dict[str, str]:
        return {**super().headers(), **self._more_headers}


class BudgetSpent(RateLimited):
    """The tenant's budget of this period is spent: a retry soon cannot succeed."""

    type, code, should_retry = "insufficient_quota", "insufficient_quota", False
    # OpenAI sends none either: a client that obeyed it would sleep until the period ends.
    retry_after_s = None


_WHOSE = {
    "tenant": "your organization",
    "key": "this API key",
    "model": "this model",
    "person": "yours in the playground",
    "playground": "your organization in the playground",
}


def refusal_error(refusal: Refusal, limits: Limits) -> ApiError:
    """Return the error that answers a request which was not accepted."""
    # Rounded up, so that a client that comes back exactly then is let in.
    seconds = float(math.ceil(max(refusal.retry_after_s, 1.0)))
    if refusal.reason == "budget":
        budget = limits.budgets[refusal.index - 1]
        return BudgetSpent(
            f"The token budget of this {budget.period} ({refusal.limit}) does not cover this "
            "request."
        )
    if refusal.reason == "quarantined":
        return Conflict(
            "This adapter is quarantined: requests for it ended the workers that ran them.",
            param="model",
            code=ErrorCode.ADAPTER_QUARANTINED,
        )
    if refusal.reason in ("pool", "pool_wait"):
        return Unavailable(
            "The platform is overloaded: this request would wait too long. Try again later.",
            code="server_is_overloaded",
            retry_after_s=min(seconds, MAX_RETRY_AFTER_S),
        )
    if refusal.reason == "tenant_wait":
        return RateLimited(
            "Your organization has too many requests waiting: this one would wait too long. "
            "Send fewer at a time.",
            code="slow_down",
            retry_after_s=min(seconds, MAX_RETRY_AFTER_S),
        )
    scope = limits.policies[refusal.index - 1].scope if refusal.index else "tenant"
    return TooManyRequests(
        _MESSAGES[refusal.reason].format(whose=_WHOSE[scope], limit=refusal.limit),
        reason=refusal.reason,
        retry_after_s=seconds,
        more_headers=_refusal_headers(refusal, seconds),
    )


_MESSAGES = {
    "requests": "Rate limit reached for {whose}: {limit} requests a minute.",
    "tokens": "Rate limit reached for {whose}: {limit} tokens a minute.",
    "concurrent": "Too many requests of {whose} run at a time: the limit is {limit}.",
    "waiting": "Too many requests of {whose} are waiting: the limit is {limit}.",
}


def _refusal_headers(refusal: Refusal, seconds: float) -> dict[str, str]:
    if refusal.reason not in ("requests", "tokens"):
        return {}
    return _headers_of(refusal.reason, Rate(refusal.limit, 0, seconds))
