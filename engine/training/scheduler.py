"""The order of runs: which waiting ones begin, and which running ones share a micro-batch.

Tenants take turns by the tokens they were given, as requests do in serving (VTC, arXiv:2401.00588);
within a tenant the run that came first goes first. So a tenant's thousand runs delay another's by
the end of one, and then the two share every micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

#: How often a run may be left out of a micro-batch in which a later one of its tenant's fits.
MAX_SKIPS = 8


@dataclass(slots=True)
class _Tenant:
    """waiting, running: run ids in the order in which they came; `tokens`: what counts as given."""

    waiting: dict[str, None] = field(default_factory=dict)
    running: dict[str, None] = field(default_factory=dict)
    tokens: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running


class Scheduler:
    """Keeps the tenants' turns; knows of a run only its id, its tenant and its next tokens."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._tenant_of: dict[str, str] = {}
        self._skips: dict[str, int] = {}

    def add(self, run_id: str, tenant: str) -> None:
        """Add a run that waits to begin."""
        assert run_id not in self._tenant_of
        if tenant not in self._tenants:
            # Who comes new, or comes back, has not saved up turns.
            given = [other.tokens for other in self._tenants.values()]
            self._tenants[tenant] = _Tenant(tokens=min(given, default=0.0))
        self._tenants[tenant].waiting[run_id] = None
        self._tenant_of[run_id] = tenant

    def next_waiting(self) -> str | None:
        """Return the run that is to begin next: of the tenant with the fewest running ones."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not waiting:
            return None
        tenant = min(waiting, key=lambda tenant: (len(tenant.running), tenant.tokens))
        return next(iter(tenant.waiting))

    def begin(self, run_id: str) -> None:
        """Let a waiting run take part."""
        tenant = self._tenants[self._tenant_of[run_id]]
        del tenant.waiting[run_id]
        tenant.running[run_id] = None

    def remove(self, run_id: str) -> None:
        """Forget a run that has ended."""
        name = self._tenant_of.pop(run_id)
        tenant = self._tenants[name]
        tenant.waiting.pop(run_id, None)
        tenant.running.pop(run_id, None)
        self._skips.pop(run_id, None)
        if tenant.is_idle:
            del self._tenants[name]

    def select(
        self,
        next_tokens: Mapping[str, int],
        budget: int,
        most: int | None = None,
        kinds: Mapping[str, bool] | None = None,
    ) -> list[str]:
        """Return the runs that share the next micro-batch, and count their tokens as given.

        next_tokens  of each running run that has a piece: what it takes, more than `budget` perhaps
        kinds        of each running run; only those of one kind share a micro-batch
        -> at least one, if any has a piece; then as many as fit, `most` at most
        """
        chosen: list[str] = []
        left = budget

        def take(run_id: str) -> bool:
            nonlocal left
            has_room = most is None or len(chosen) < most
            is_alike = kinds is None or not chosen or kinds[run_id] == kinds[chosen[0]]
            if chosen and not (has_room and is_alike and next_tokens[run_id] <= left):
                return False
            chosen.append(run_id)
            left -= next_tokens[run_id]
            self._skips.pop(run_id, None)
            self._tenants[self._tenant_of[run_id]].tokens += next_tokens[run_id]
            return True

        for run_id in self._overdue():
            if run_id in next_tokens:
                take(run_id)
        ready = {
            name: [run_id for run_id in tenant.running if run_id in next_tokens]
            for name, tenant in self._tenants.items()
        }
        queues = {name: run_ids for name, run_ids in ready.items() if run_ids}
        while queues:
            name = min(queues, key=lambda name: self._tenants[name].tokens)
            queue = queues[name]
            while queue:
                run_id = queue.pop(0)
                if run_id not in chosen and take(run_id):
                    break
            if not queue:
                del queues[name]
        self._count_skips(set(chosen), next_tokens)
        return chosen

    def _count_skips(self, chosen: set[str], ready: Collection[str]) -> None:
        """Of the runs that a later one of their tenant's went before."""
        for tenant in self._tenants.values():
            is_overtaken = False
            for run_id in reversed(tenant.running):
                if run_id in chosen:
                    is_overtaken = True
                elif is_overtaken and run_id in ready:
                    self._skips[run_id] = self._skips.get(run_id, 0) + 1

    def _overdue(self) -> list[str]:
        """Those passed over too often, the longest first."""
        overdue = [run_id for run_id, skips in self._skips.items() if skips >= MAX_SKIPS]
        return sorted(overdue, key=lambda run_id: -self._skips[run_id])
