"""Have jobs accepted into the fair queue, within their tenants' limits and budgets."""

from __future__ import annotations

from typing import Any

from contract.messages import protocol
from contract.messages.protocol import GenerateJob
from controlplane.infra.web.threads import query_in_thread
from controlplane.queue.admission import admission_args
from controlplane.queue.batch_reply_stream import ADMIT_LINE, BatchReplyStream
from controlplane.queue.known_workers import KnownWorkers
from controlplane.usage.limits.admit import (
    ADMIT,
    SEED,
    Admitted,
    BudgetPeriod,
    Limits,
    Refusal,
    budget_state_key,
    read_verdict,
)
from controlplane.usage.limits.services import tokens_spent

#: How long a budget's state outlives its period, for requests that still run.
BUDGET_TTL_S = 2 * 24 * 3600


class Admitter:
    """Runs the script that admits a job or refuses it.

    client  of redis.asyncio
    """

    def __init__(self, client: Any, pool: str, workers: KnownWorkers) -> None:
        self._pool = pool
        self._workers = workers
        self._admit = client.register_script(ADMIT)
        self._admit_line = client.register_script(ADMIT_LINE)
        self._seed = client.register_script(SEED)

    async def admit(
        self,
        job: GenerateJob,
        limits: Limits,
        context_length: int,
        batch_stream: BatchReplyStream | None,
    ) -> Admitted | Refusal:
        """Return whether the queue has the job now, and how much of its limits is left.

        Raises Unavailable when it must ask the database for a budget, and that does not answer.
        """
        args = admission_args(
            job,
            self._pool,
            limits,
            tokens_per_s=self._workers.tokens_per_s(job.base_model),
            context_length=context_length,
        )
        keys = [protocol.job_key(self._pool, job.request_id)]
        script = self._admit
        if batch_stream is not None:
            more_keys, more_args = batch_stream.admission(job)
            script, keys, args = self._admit_line, keys + more_keys, more_args + args
        while True:
            reply = await script(keys=keys, args=args)
            verdict = read_verdict(reply, limits)
            if not isinstance(verdict, Refusal) or verdict.reason != "unknown":
                return verdict
            await self._seed_budget(job.tenant_id, limits.budgets[verdict.index - 1])

    async def _seed_budget(self, tenant_id: str, budget: BudgetPeriod) -> None:
        """Tell Redis what the database knows of a budget that it does not know."""
        spent = await query_in_thread(lambda: tokens_spent(tenant_id, budget))
        await self._seed(
            keys=[budget_state_key(self._pool, tenant_id, budget)],
            args=[spent, int(budget.ends_at) + BUDGET_TTL_S],
        )
