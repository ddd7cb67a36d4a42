"""The live pool: workers and queues per base model, and the orders to drain and to resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from contract.messages.protocol import Heartbeat
from controlplane.adapters.models import BaseModel, is_serving
from controlplane.errors import NotFound, Unavailable
from controlplane.operator import pool
from controlplane.operator.pages.rendering import ask, page, span
from controlplane.queue.workers import WorkerStatus, workers

#: Number of a worker's resident adapters that are named.
_SHOWN_ADAPTERS = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One worker as the page shows it."""

    beat: Heartbeat
    state: str
    adapters: str
    tokens_per_s: float
    silent: str
    can_drain: bool
    can_resume: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A base model: its workers and its queue."""

    base_model: str
    workers: tuple[Line, ...]
    waiting_requests: int
    waiting_tokens: int

    @property
    def ready(self) -> int:
        return sum(worker.state == "ready" for worker in self.workers)

    @property
    def running(self) -> int:
        return sum(worker.beat.running for worker in self.workers)

    @property
    def slots(self) -> int:
        return sum(worker.beat.max_running for worker in self.workers)

    @property
    def tokens_per_s(self) -> float:
        return sum(worker.tokens_per_s for worker in self.workers)

    @property
    def alive(self) -> int:
        return sum(worker.state != "silent" for worker in self.workers)


def groups() -> list[Group]:
    """Return the pool by base model, including those without a worker. Raises Unavailable."""
    found = sorted(workers(), key=lambda worker: worker.heartbeat.worker_id)
    queues = {queue["base_model"]: queue for queue in pool.queues()}
    names = set(BaseModel.objects.filter(is_serving()).values_list("name", flat=True))
    names |= {worker.heartbeat.base_model for worker in found}
    names |= {name for name, queue in queues.items() if queue["waiting_requests"]}
    return [
        Group(
            base_model=name,
            workers=tuple(_line(one) for one in found if one.heartbeat.base_model == name),
            waiting_requests=queues.get(name, {}).get("waiting_requests", 0),
            waiting_tokens=queues.get(name, {}).get("waiting_tokens", 0),
        )
        for name in sorted(names)
    ]


@require_safe
def live_pool(request: HttpRequest) -> HttpResponse:
    """Show the pool; the part that changes reloads itself."""
    context: dict[str, Any] = {"pool": settings.POOL, "groups": [], "problem": ""}
    context["max_kl"] = settings.PRECISION_MAX_KL
    try:
        context["groups"] = groups()
    except Unavailable as error:
        context["problem"] = error.message
    template = "_workers" if request.headers.get("HX-Request") else "workers"
    return page(request, template, "Live pool", **context)


@require_http_methods(["GET", "HEAD", "POST"])
def drain(request: HttpRequest, worker_id: str) -> HttpResponse:
    """Ask, then tell a worker to drain."""
    back = reverse("admin:workers")
    try:
        if request.method == "POST":
            if pool.worker_drain(worker_id=worker_id):
                messages.success(request, f"{worker_id} was told to drain.")
            else:
                messages.info(request, f"{worker_id} is draining already.")
            return redirect(back)
        worker = pool.worker_get(worker_id=worker_id)
    except (NotFound, Unavailable) as error:
        messages.error(request, error.message)
        return redirect(back)
    beat = worker.heartbeat
    return ask(
        request,
        title=f"Drain {worker_id}?",
        warnings=(
            "It takes no more requests, has up to 30 seconds to finish those that run, and returns "
            "the rest to the front of the queue. Then its process ends.",
            "It serves again when its supervisor restarts it (in Compose at once). As long as "
            "requests run, “Resume” on the pool's page ends the drain.",
        ),
        about=(
            ("Base model", beat.base_model),
            ("State", state(worker)),
            ("Running", f"{beat.running} of {beat.max_running}"),
            ("Other workers of this base model that are ready", str(_others(worker))),
        ),
        button="Drain it",
        back=back,
    )


@require_POST
def resume(request: HttpRequest, worker_id: str) -> HttpResponse:
    """Tell a draining worker to take requests again."""
    try:
        if pool.worker_resume(worker_id=worker_id):
            messages.success(request, f"{worker_id} was told to resume.")
        else:
            messages.info(request, f"{worker_id} is not draining.")
    except (NotFound, Unavailable) as error:
        messages.error(request, error.message)
    return redirect(reverse("admin:workers"))


def _others(worker: WorkerStatus) -> int:
    beat = worker.heartbeat
    return sum(
        one.heartbeat.worker_id != beat.worker_id
        and one.heartbeat.base_model == beat.base_model
        and state(one) == "ready"
        for one in workers()
    )


def state(worker: WorkerStatus) -> str:
    """Return a worker's state in one word."""
    if not worker.is_alive:
        return "silent"
    if worker.heartbeat.draining:
        return "draining"
    return "loading" if worker.heartbeat.loading else "ready"


def _line(worker: WorkerStatus) -> Line:
    beat = worker.heartbeat
    return Line(
        beat=beat,
        state=state(worker),
        adapters=_adapters(beat.resident_digests),
        tokens_per_s=beat.tokens_per_s if worker.is_alive else 0.0,
        silent=span(worker.silent_s),
        can_drain=worker.is_alive and not beat.draining,
        can_resume=worker.is_alive and beat.draining,
    )


def _adapters(digests: Sequence[str]) -> str:
    """Return the number of adapters, and the first digits of some."""
    if not digests:
        return "none"
    shown = ", ".join(digest[:8] for digest in digests[:_SHOWN_ADAPTERS])
    more = ", …" if len(digests) > _SHOWN_ADAPTERS else ""
    return f"{len(digests)}: {shown}{more}"
