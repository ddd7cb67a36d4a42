"""Pages of aliases: their targets, the canary beside the primary, and earlier revisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.aliases import ramps, services
from controlplane.aliases.comparison import compare
from controlplane.aliases.contents import Contents, contents_of
from controlplane.aliases.guards import guard_parse, guard_read
from controlplane.aliases.models import Alias, AliasRevision, Ramp, is_current
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.alias_forms import AliasForm, GuardForm, RampForm, ShareForm
from controlplane.console.canary_rows import measure_rows, split_bar
from controlplane.console.forms import ErrorsShown
from controlplane.console.residency import prefetched_text
from controlplane.errors import ApiError
from controlplane.queue.placement.residency import (
    Prefetched,
    before_alias_rollback,
    before_alias_switch,
    before_canary,
)
from controlplane.tenants.auth import Permission

NUM_REVISIONS = 20


@require_safe
@member_page
def aliases(request: ConsoleRequest) -> HttpResponse:
    rows = AliasRevision.objects.filter(is_current()).select_related("alias", "base_model")
    ramps_now = {ramp.alias_id: ramp for ramp in Ramp.objects.filter(state__in=Ramp.ACTIVE)}
    found = [
        {
            "alias": row.alias,
            "contents": contents_of(row),
            "bar": split_bar(row.canary_percent),
            "ramp": ramps_now.get(row.alias_id),
        }
        for row in rows.prefetch_related("parts").order_by("alias__name")
    ]
    return render(request, "console/aliases.html", {"aliases": found})


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.ADAPTERS_WRITE)
def new_alias(request: ConsoleRequest) -> HttpResponse:
    form = AliasForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        name = form.cleaned_data["name"]
        with ErrorsShown(form):
            _create(name, form)
            messages.success(request, f"The alias {name} answers within a second.")
            return redirect("console:alias", name)
    context = {"form": form}
    return render(request, "console/edit_alias.html", context, status=422 if form.errors else 200)


@require_safe
@member_page
def alias(request: ConsoleRequest, name: str) -> HttpResponse:
    return render(request, "console/alias.html", _context(services.alias_get(name=name)))


@require_safe
@member_page
def alias_now(request: ConsoleRequest, name: str) -> HttpResponse:
    """Render the part of the page that changes with requests."""
    return render(request, "console/_alias.html", _context(services.alias_get(name=name)))


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.ADAPTERS_WRITE)
def edit_alias(request: ConsoleRequest, name: str) -> HttpResponse:
    found = services.alias_get(name=name)
    form = AliasForm.of(_contents_now(found), found.revision_number)
    if request.method == "POST":
        form = AliasForm(request.POST)
        del form.fields["name"]
        if form.is_valid():
            with ErrorsShown(form):
                _change(found, form)
                messages.success(request, "The alias is changed.")
                return redirect("console:alias", name)
    context = {"form": form, "alias": found}
    return render(request, "console/edit_alias.html", context, status=422 if form.errors else 200)


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def set_alias_share(request: ConsoleRequest, name: str) -> HttpResponse:
    """Give the canary another share of the callers."""
    form = ShareForm(request.POST)
    if not form.is_valid():
        return _refused(request, name, form)
    data = form.cleaned_data

    def ramp(found: Alias) -> Prefetched | None:
        loaded = before_canary(found) if data["percent"] else None
        services.alias_ramp(alias=found, percent=data["percent"], reason=data["reason"])
        return loaded

    return _act(
        request,
        name,
        ramp,
        f"The canary answers {data['percent']} % of the callers.",
    )


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def promote_canary(request: ConsoleRequest, name: str) -> HttpResponse:
    """Make the canary the primary."""

    def promote(found: Alias) -> Prefetched | None:
        loaded = before_canary(found)
        services.canary_promote(alias=found, reason=_reason(request))
        return loaded

    return _act(request, name, promote, "The canary is the primary now.")


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def remove_canary(request: ConsoleRequest, name: str) -> HttpResponse:
    """Take the canary away."""
    return _act(
        request,
        name,
        lambda found: services.canary_remove(alias=found, reason=_reason(request)),
        "The primary answers everybody.",
    )


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def roll_back_alias(request: ConsoleRequest, name: str) -> HttpResponse:
    """Go back to an earlier revision: the one before, or the one with this number."""
    number = request.POST.get("number", "")
    if number and not (number.isascii() and number.isdigit() and len(number) < 10):
        raise Http404
    wanted = int(number) if number else None

    def roll_back(found: Alias) -> Prefetched | None:
        loaded = before_alias_rollback(found, wanted)
        services.alias_roll_back(alias=found, number=wanted, reason=_reason(request))
        return loaded

    return _act(request, name, roll_back, "The earlier revision is current again.")


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def start_ramp(request: ConsoleRequest, name: str) -> HttpResponse:
    """Begin a ramp."""
    form = RampForm(request.POST)
    if not form.is_valid():
        return _refused(request, name, form)
    at_end = form.cleaned_data["at_end"]

    def start(found: Alias) -> Prefetched | None:
        loaded = before_canary(found)
        ramps.ramp_start(alias=found, steps=form.steps(), at_end=at_end)
        return loaded

    return _act(request, name, start, "The ramp has begun.")


_RAMP_MOVES: dict[str, tuple[Callable[..., Ramp], str]] = {
    "pause": (ramps.ramp_pause, "The ramp is paused."),
    "resume": (ramps.ramp_resume, "The ramp runs again."),
    "stop": (ramps.ramp_cancel, "The ramp is stopped; the canary keeps its share."),
}


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def move_ramp(request: ConsoleRequest, name: str, move: str) -> HttpResponse:
    """Pause, resume or stop a ramp."""
    if move not in _RAMP_MOVES:
        raise Http404
    act, said = _RAMP_MOVES[move]
    return _act(request, name, lambda found: act(alias=found), said)


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def set_guard(request: ConsoleRequest, name: str) -> HttpResponse:
    """Set the limits at which the canary is rolled back by itself."""
    form = GuardForm(request.POST)
    if not form.is_valid():
        return _refused(request, name, form)

    def change(found: Alias) -> Alias:
        guard = dict(_contents_now(found).guard) | form.cleaned_data
        return services.alias_change(alias=found, changes={"guard": guard_parse(guard)})

    return _act(request, name, change, "The guard is set; the canary’s counts begin again.")


@require_http_methods(["GET", "HEAD", "POST"])
@member_page(permission=Permission.ADAPTERS_WRITE)
def delete_alias(request: ConsoleRequest, name: str) -> HttpResponse:
    found = services.alias_get(name=name)
    if request.method == "POST":
        services.alias_delete(alias=found)
        messages.success(request, f"The alias {name} is deleted.")
        return redirect("console:aliases")
    context = {
        "what": f"the alias {name}",
        "effect": "Requests for it are answered with 404 within a second, unless an adapter has "
        "its name. Its revisions and counts go with it; its adapters stay.",
        "back": request.path.removesuffix("/delete"),
    }
    return render(request, "console/delete.html", context)


def _context(found: Alias) -> dict[str, Any]:
    revision = services.revision_get(alias=found)
    comparison = compare(revision) if revision.canary_percent else None
    ramp = Ramp.objects.filter(alias=found).first()
    rows = AliasRevision.objects.filter(alias=found).prefetch_related("parts").order_by("-number")
    revisions = [{"row": row, "contents": contents_of(row)} for row in rows[:NUM_REVISIONS]]
    guard = guard_read(revision.guard)
    return {
        "alias": found,
        "revision": revision,
        "contents": contents_of(revision),
        "bar": split_bar(revision.canary_percent),
        "primary_percent": 100 - revision.canary_percent,
        "comparison": comparison,
        "measures": measure_rows(comparison) if comparison else [],
        "guard": guard,
        "ramp": ramp,
        "ramp_steps": _ramp_steps(ramp) if ramp else [],
        "progress": ramps.progress(ramp) if ramp else None,
        "revisions": revisions,
        "share_form": ShareForm(initial={"percent": revision.canary_percent or 10}),
        "ramp_form": RampForm(),
        "guard_form": GuardForm.of(guard),
        "base_url": settings.BASE_URL,
    }


def _ramp_steps(ramp: Ramp) -> list[dict[str, Any]]:
    """Return the steps with their state: "done", "now", "failed" or "" (to come)."""
    states = {Ramp.State.DONE: "done", Ramp.State.STOPPED: "failed"}
    now = states.get(Ramp.State(ramp.state), "now")
    return [
        {
            "percent": step["percent"],
            "state": "done" if at < ramp.step else now if at == ramp.step else "",
        }
        for at, step in enumerate(ramp.steps)
    ]


def _contents_now(found: Alias) -> Contents:
    return contents_of(services.revision_get(alias=found))


def _create(name: str, form: AliasForm) -> None:
    contents = Contents(**form.contents()).checked()
    before_alias_switch(contents.parts)
    services.alias_create(name=name, contents=contents)


def _change(found: Alias, form: AliasForm) -> None:
    data, changes = form.cleaned_data, form.contents()
    contents = dataclasses.replace(_contents_now(found), **changes).checked()
    before_alias_switch(contents.parts)
    services.alias_change(
        alias=found,
        changes=changes,
        reason=data["reason"],
        if_revision=data["if_revision"],
        is_forced=data["is_forced"],
    )


def _reason(request: ConsoleRequest) -> str:
    return request.POST.get("reason", "").strip()


def _act(
    request: ConsoleRequest, name: str, act: Callable[[Alias], object], said: str
) -> HttpResponse:
    """Run a change from a button of the page, and show its result on the page.

    act  may return what was loaded before, which is shown, too
    """
    found = services.alias_get(name=name)
    try:
        done = act(found)
    except ApiError as error:
        messages.error(request, error.message)
    else:
        loaded = done if isinstance(done, Prefetched) else None
        messages.success(request, f"{said} {prefetched_text(loaded)}".strip())
    return redirect("console:alias", name)


def _refused(request: ConsoleRequest, name: str, form: forms.Form) -> HttpResponse:
    services.alias_get(name=name)
    for field, errors in form.errors.items():
        label = form.fields[field].label if field in form.fields else ""
        messages.error(request, f"{label}: {' '.join(map(str, errors))}".lstrip(": "))
    return redirect("console:alias", name)
