"""Quarantine: adapters that are not served because they ended workers."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections import defaultdict

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.adapters.models import AdapterVersion
from controlplane.errors import Unavailable
from controlplane.operator.pages.rendering import ask, moment, page
from controlplane.queue.dead_letters import quarantine_release, quarantined
from controlplane.queue.models import DeadLetter

#: Number of adapters on a page, and of named versions with the bytes of an adapter.
PAGE_SIZE, _MAX_VERSIONS = 50, 500


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A quarantined adapter: its owners, and the newest request with which it ended workers."""

    digest: str
    since: dt.datetime
    versions: list[AdapterVersion]
    letter: DeadLetter | None


@require_safe
def quarantine(request: HttpRequest) -> HttpResponse:
    """Show the quarantined adapters, the newest first."""
    problem, rows, number = "", [], 1
    try:
        found = sorted(quarantined().items(), key=lambda item: (item[1], item[0]), reverse=True)
        number = max(1, int(request.GET.get("page", "1")[:6]))
    except Unavailable as error:
        found, problem = [], error.message
    except ValueError:
        return redirect("admin:quarantine")
    first = (number - 1) * PAGE_SIZE
    rows = _rows(dict(found[first : first + PAGE_SIZE]))
    return page(
        request,
        "quarantine",
        "Quarantine",
        rows=rows,
        pool=settings.POOL,
        problem=problem,
        newer=number - 1,
        older=number + 1 if len(found) > first + PAGE_SIZE else 0,
    )


@require_http_methods(["GET", "HEAD", "POST"])
def release(request: HttpRequest, digest: str) -> HttpResponse:
    """Ask, then serve an adapter again."""
    back = reverse("admin:quarantine")
    try:
        if request.method == "POST":
            if quarantine_release(digest):
                messages.success(request, f"{digest[:12]} is served again.")
            else:
                messages.info(request, f"{digest[:12]} is no longer quarantined.")
            return redirect(back)
        since = quarantined().get(digest)
    except Unavailable as error:
        messages.error(request, error.message)
        return redirect(back)
    if since is None:
        messages.info(request, f"{digest[:12]} is no longer quarantined.")
        return redirect(back)
    (row,) = _rows({digest: since})
    owners = ", ".join(_name(version) for version in row.versions) or "no known version"
    return ask(
        request,
        title=f"Release {digest[:12]}?",
        warnings=(
            "Requests for it are accepted again at once. If it ends workers again, it is "
            "quarantined again, but until then every tenant of those workers waits.",
        ),
        about=(
            ("Digest", digest),
            ("Adapter", owners),
            ("Quarantined since", moment(since)),
            ("Because of", _why(row.letter)),
        ),
        button="Release it",
        back=back,
    )


def _why(letter: DeadLetter | None) -> str:
    if letter is None:
        return "workers that ended with it; no dead letter names it"
    return f"{letter.request_id}, {letter.reason}, on {letter.worker_id or 'an unknown worker'}"


def _name(version: AdapterVersion) -> str:
    return f"{version.tenant.slug}/{version.adapter.name}@{version.number}"


def _rows(found: dict[str, dt.datetime]) -> list[Row]:
    """Return the adapters with their versions and letters, by one query for each."""
    versions: dict[str, list[AdapterVersion]] = defaultdict(list)
    owner: dict[uuid.UUID, str] = {}
    named = AdapterVersion.objects.filter(digest__in=list(found)).select_related(
        "tenant", "adapter"
    )
    for version in named.order_by("digest", "pk")[:_MAX_VERSIONS]:
        versions[version.digest].append(version)
        owner[version.pk] = version.digest
    letters: dict[str, DeadLetter] = {}
    newest = DeadLetter.objects.filter(adapter_version_id__in=list(owner)).defer("job")
    for letter in newest.order_by("adapter_version_id", "-pk").distinct("adapter_version_id"):
        digest = owner[letter.adapter_version_id]  # type: ignore[index]
        if digest not in letters or letter.pk > letters[digest].pk:
            letters[digest] = letter
    return [
        Row(digest, since, versions[digest], letters.get(digest)) for digest, since in found.items()
    ]
