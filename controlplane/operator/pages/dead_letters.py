"""Dead letters: requests that ended every worker that ran them, to requeue or discard."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.adapters.models import AdapterVersion
from controlplane.errors import Conflict, Unavailable
from controlplane.infra.locks import lock_until_commit
from controlplane.operator.pages.rendering import ask, moment, page
from controlplane.queue.dead_letters import dead_letter_discard, dead_letter_requeue
from controlplane.queue.models import DeadLetter
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenants.models import Tenant, is_slug

PAGE_SIZE = 25


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One letter as the page shows it; never its prompt."""

    letter: DeadLetter
    adapter: str
    attempts: int | None
    outcome: str  # the outcome of the requeued request
    kept_until: dt.datetime | None

    @property
    def can_requeue(self) -> bool:
        # The prompt of a letter that was requeued is dropped, unless that process died just then.
        return self.kept_until is not None


@require_safe
def dead_letters(request: HttpRequest) -> HttpResponse:
    """Show a page of letters, the newest first."""
    slug, before = request.GET.get("tenant", "").strip(), _uuid(request.GET.get("before", ""))
    letters = DeadLetter.objects.select_related("tenant").defer("job").order_by("-pk")
    if slug and not is_slug(slug):
        letters = letters.none()
    elif slug:
        owners = list(Tenant.objects.filter(slug=slug).values_list("pk", flat=True))
        letters = letters.filter(tenant_id__in=owners)
    if request.GET.get("state") == "open":
        letters = letters.filter(requeued_at=None)
    if before is not None:
        letters = letters.filter(pk__lt=before)
    found = list(letters[: PAGE_SIZE + 1])
    query = request.GET.copy()
    query.pop("before", None)
    first = query.urlencode()
    if len(found) > PAGE_SIZE:
        query["before"] = str(found[PAGE_SIZE - 1].pk)
    return page(
        request,
        "dead_letters",
        "Dead letters",
        rows=rows_of(found[:PAGE_SIZE]),
        slug=slug,
        is_open=request.GET.get("state") == "open",
        newest=first if before is not None else None,
        older=query.urlencode() if len(found) > PAGE_SIZE else None,
        days=settings.DEAD_LETTER_DAYS,
    )


def rows_of(letters: Sequence[DeadLetter]) -> list[Row]:
    """Return the letters with data of other tables, by one query for each table."""
    kept = set(
        DeadLetter.objects.filter(
            pk__in=[letter.pk for letter in letters], job__isnull=False
        ).values_list("pk", flat=True)
    )
    names = version_names({one.adapter_version_id for one in letters if one.adapter_version_id})
    ids = [letter.request_id for letter in letters]
    ids += [letter.requeued_as for letter in letters if letter.requeued_as]
    logged: dict[str, InferenceRequest] = {
        row.request_id: row
        for row in InferenceRequest.objects.filter(request_id__in=ids).only(
            "request_id", "attempts", "finish_reason", "error_code"
        )
    }
    return [_row(letter, letter.pk in kept, names, logged) for letter in letters]


def _row(
    letter: DeadLetter,
    is_kept: bool,
    names: dict[uuid.UUID, str],
    logged: dict[str, InferenceRequest],
) -> Row:
    first, again = logged.get(letter.request_id), logged.get(letter.requeued_as)
    outcome = ""
    if letter.requeued_as:
        outcome = (again.error_code or again.finish_reason) if again else "has not ended"
    return Row(
        letter,
        names.get(letter.adapter_version_id, "") if letter.adapter_version_id else "",
        first.attempts if first else None,
        outcome,
        letter.created_at + dt.timedelta(days=settings.DEAD_LETTER_DAYS) if is_kept else None,
    )


def version_names(ids: set[uuid.UUID]) -> dict[uuid.UUID, str]:
    """Return the adapter and number of versions, by id."""
    rows = AdapterVersion.objects.filter(pk__in=ids).select_related("adapter")
    return {row.pk: f"{row.adapter.name}@{row.number}" for row in rows.only("number", "adapter")}


@require_http_methods(["GET", "HEAD", "POST"])
def requeue(request: HttpRequest) -> HttpResponse:
    """Ask, then run the chosen letters' requests again."""
    return _act(
        request,
        _requeue,
        title="Requeue {}?",
        warnings=(
            "Each runs again once, in the batch class and with a new id. Nobody gets its answer, "
            "but its tenant is billed for it; its prompt is dropped from the letter.",
            "A request that ended workers may end them again.",
        ),
        button="Requeue",
    )


@require_http_methods(["GET", "HEAD", "POST"])
def discard(request: HttpRequest) -> HttpResponse:
    """Ask, then delete the chosen letters with their prompts."""
    return _act(
        request,
        _discard,
        title="Discard {}?",
        warnings=(
            "The letter and its prompt are deleted, which cannot be undone. The tenant's audit "
            "trail keeps its request id, model and reason.",
        ),
        button="Discard",
    )


def _act(
    request: HttpRequest,
    act: Callable[[DeadLetter], str],
    *,
    title: str,
    warnings: Sequence[str],
    button: str,
) -> HttpResponse:
    back = reverse("admin:dead_letters")
    sent = request.POST if request.method == "POST" else request.GET
    ids = [found for text in sent.getlist("letter")[:PAGE_SIZE] if (found := _uuid(text))]
    letters = list(DeadLetter.objects.select_related("tenant").filter(pk__in=ids).order_by("-pk"))
    if request.method == "POST":
        results = [act(letter) for letter in letters]
        results += ["A letter was discarded before."] * (len(set(ids)) - len(letters))
        for result in results:
            messages.info(request, result)
        return redirect(back)
    if not letters:
        messages.error(request, "Choose at least one dead letter.")
        return redirect(back)
    noun = "this dead letter" if len(letters) == 1 else f"these {len(letters)} dead letters"
    return ask(
        request,
        title=title.format(noun),
        warnings=warnings,
        about=[
            (one.request_id, f"{one.tenant.slug}, {one.model}, {moment(one.created_at)}")
            for one in letters
        ],
        sent=[("letter", str(letter.pk)) for letter in letters],
        button=button,
        back=back,
    )


def _requeue(letter: DeadLetter) -> str:
    """Requeue a letter unless it was. -> a message for the operator."""
    with transaction.atomic():
        lock_until_commit(f"dead letter {letter.pk}")  # a second click waits, and finds it done
        now = DeadLetter.objects.filter(pk=letter.pk).first()
        if now is None:
            return f"{letter.request_id} was discarded before."
        if now.requeued_at is not None and now.job is None:
            return f"{now.request_id} was requeued before, as {now.requeued_as}."
        try:
            return f"{now.request_id} is requeued as {dead_letter_requeue(now)}."
        except (Conflict, Unavailable) as error:
            return f"{now.request_id} is not requeued. {error.message}"


def _discard(letter: DeadLetter) -> str:
    if dead_letter_discard(letter):
        return f"{letter.request_id} is discarded."
    return f"{letter.request_id} was discarded before."


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def waiting_letters(limit: int) -> int:
    """Return the number of letters that were not requeued, counted up to a limit."""
    rows: Any = DeadLetter.objects.filter(requeued_at=None).order_by("-pk")
    return len(rows.values_list("pk", flat=True)[:limit])
