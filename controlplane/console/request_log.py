"""The data of the request log's pages: a page of requests, one request, and refusals."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Self

from django.db.models import Q, QuerySet, Sum
from django.utils.http import urlencode

from contract.messages.protocol import FinishReason
from controlplane.adapters.models import AdapterVersion
from controlplane.console.charts import (
    BarChart,
    StackedBar,
    bar_chart,
    common_scale,
    span_bar,
)
from controlplane.console.templatetags.console import milliseconds
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import RefusalHour
from controlplane.tenants.models import ApiKey
from controlplane.usage.models import UsageDay

PAGE = 50
#: A request without a first token after this time is slow.
SLOW_MS = 2000.0
STATES = {"all": "All", "failed": "Failed", "slow": "Slow"}
SPANS: dict[str, tuple[str, dt.timedelta | None]] = {
    "all": ("Any time", None),
    "hour": ("1 hour", dt.timedelta(hours=1)),
    "day": ("24 hours", dt.timedelta(days=1)),
    "week": ("7 days", dt.timedelta(days=7)),
}
MAX_MODELS = MAX_MODEL_CHARS = 200
REFUSAL_HOURS = 24

_SLOW = Q(first_token_ms__gte=SLOW_MS) | Q(first_token_ms=None, total_ms__gte=SLOW_MS)
_ENDS: dict[str, str] = {
    FinishReason.STOP: "ok",
    FinishReason.LENGTH: "cut",
    FinishReason.CANCELLED: "cancelled",
}
#: The condition for "failed" of `state_of`, which includes unknown finish reasons.
FAILED = ~Q(finish_reason__in=list(_ENDS)) | ~Q(error_code="")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The filters in the page's address; an invalid value means the default.

    model  a name as in requests, which also finds its versions; empty: all
    """

    model: str
    state: str
    span: str

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Self:
        state, span = query.get("state", ""), query.get("span", "")
        return cls(
            model=query.get("model", "").strip()[:MAX_MODEL_CHARS],
            state=state if state in STATES else "all",
            span=span if span in SPANS else "all",
        )

    def query(self, **others: str) -> str:
        """Return the query string of these filters, with `others` replaced or added."""
        said = dataclasses.asdict(self) | others
        unsaid = {("model", ""), ("state", "all"), ("span", "all")}
        return urlencode([pair for pair in said.items() if pair not in unsaid])

    @property
    def is_everything(self) -> bool:
        return not self.query()

    def rows(self, now: dt.datetime) -> QuerySet[InferenceRequest]:
        """Return the matching requests of the tenant in scope."""
        if "\0" in self.model:
            return InferenceRequest.objects.none()
        rows = InferenceRequest.objects.all()
        if self.model:
            rows = rows.filter(Q(model=self.model) | Q(model__startswith=f"{self.model}@"))
        if self.state == "failed":
            rows = rows.filter(FAILED)
        elif self.state == "slow":
            rows = rows.filter(_SLOW)
        _, length = SPANS[self.span]
        return rows if length is None else rows.filter(accepted_at__gte=now - length)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a request's time; `series` is its colour."""

    name: str
    series: int
    begin_ms: float
    end_ms: float

    @property
    def took_ms(self) -> float:
        return self.end_ms - self.begin_ms


#: Names and colours of the phases, in their order.
PHASES = (("queue", 4), ("load", 2), ("prefill", 1), ("decode", 0))


def phases(row: InferenceRequest) -> list[Phase]:
    """Return the phases of a request, without gaps, from its acceptance to its end.

    "load" loads its adapter; "prefill" ends with its first token, or with the request.
    """
    total = row.total_ms
    started = min(row.queue_ms + row.load_ms, total)
    first = total if row.first_token_ms is None else min(max(row.first_token_ms, started), total)
    bounds = itertools.pairwise((0.0, min(row.queue_ms, started), started, first, total))
    return [
        Phase(name=name, series=series, begin_ms=begin, end_ms=end)
        for (name, series), (begin, end) in zip(PHASES, bounds, strict=True)
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the adapters that answered.

    version  None: it was deleted
    weight   in a blend; None for an adapter that answered alone
    """

    digest: str
    version: AdapterVersion | None
    weight: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A request with the objects that its row refers to."""

    row: InferenceRequest
    state: str  # see state_of
    key: ApiKey | None
    #: One for each digest.
    parts: tuple[Part, ...]
    picture: StackedBar
    is_past_scale: bool

    @property
    def versions_named(self) -> str:
        """Return the versions that answered, if the request's `model` does not name them."""
        if not self.row.digests:
            return ""
        versions = [part.version for part in self.parts if part.version is not None]
        names = " + ".join(f"{version.adapter.name}@{version.number}" for version in versions)
        return "" if names == self.row.model else names or "a deleted version"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Some requests, newest first, and the queries of the neighbouring pages."""

    lines: list[Line]
    #: The time of a bar of full width.
    scale_ms: float
    is_first: bool
    newer: str | None
    older: str | None

    @property
    def newest_id(self) -> str:
        return str(self.lines[0].row.pk) if self.lines else ""


def log_page(
    wanted: Wanted,
    *,
    now: dt.datetime,
    before: uuid.UUID | None = None,
    after: uuid.UUID | None = None,
) -> LogPage:
    """Return the page before or after a row, or the newest one.

    Ids are ordered by time (UUID version 7), so rows are in the order of writing, and new rows do
    not move older pages.
    """
    rows = wanted.rows(now)
    is_first, found = False, []
    if after is not None:
        found = list(rows.filter(pk__gt=after).order_by("pk")[: PAGE + 1])[::-1]
    if len(found) > PAGE:
        found, has_older = found[1:], True
    else:  # older rows are wanted, or the newer ones do not fill a page
        is_first = before is None or after is not None
        rows = rows if is_first else rows.filter(pk__lt=before)
        found = list(rows.order_by("-pk")[: PAGE + 1])
        found, has_older = found[:PAGE], len(found) > PAGE
    scale_ms = common_scale([row.total_ms for row in found])
    newer = wanted.query(after=str(found[0].pk)) if found else wanted.query()
    return LogPage(
        lines=_lines(found, scale_ms),
        scale_ms=scale_ms,
        is_first=is_first,
        newer=None if is_first else newer,
        older=wanted.query(before=str(found[-1].pk)) if has_older else None,
    )


def state_of(row: InferenceRequest) -> str:
    """Return ok, cut (it reached a token limit), cancelled or failed."""
    return "failed" if row.error_code else _ENDS.get(row.finish_reason, "failed")


def line_of(row: InferenceRequest) -> Line:
    """Return one request; its bar has the full width."""
    [line] = _lines([row], row.total_ms)
    return line


def _lines(rows: Sequence[InferenceRequest], scale_ms: float) -> list[Line]:
    """Load the objects of all rows in two queries."""
    key_ids = {row.api_key_id for row in rows if row.api_key_id is not None}
    keys: dict[uuid.UUID | None, ApiKey] = {
        key.pk: key for key in ApiKey.objects.filter(pk__in=key_ids)
    }
    digests = {digest for row in rows for digest in row.digests}
    ids = {row.adapter_version_id for row in rows}
    known = list(
        AdapterVersion.objects.filter(Q(pk__in=ids) | Q(digest__in=digests))
        .select_related("adapter")
        .order_by("pk")
    )
    by_id: dict[uuid.UUID | None, AdapterVersion] = {version.pk: version for version in known}
    by_digest = {version.digest: version for version in known}
    lines = []
    for row in rows:
        parts = []
        for at, digest in enumerate(row.digests):
            # An adapter that answered alone is found by id: two versions may have the same digest.
            alone = by_id.get(row.adapter_version_id) if len(row.digests) == 1 else None
            parts.append(
                Part(
                    digest=digest,
                    version=alone or by_digest.get(digest),
                    weight=row.weights[at] if row.weights and row.weights != [1.0] else None,
                )
            )
        lines.append(
            Line(
                row=row,
                state=state_of(row),
                key=keys.get(row.api_key_id),
                parts=tuple(parts),
                picture=_picture(row, scale_ms),
                is_past_scale=row.total_ms > scale_ms,
            )
        )
    return lines


def _picture(row: InferenceRequest, scale_ms: float) -> StackedBar:
    found = phases(row)
    parts = ", ".join(f"{phase.name} {milliseconds(phase.took_ms)}" for phase in found)
    return span_bar(
        [(phase.series, phase.begin_ms, phase.end_ms) for phase in found],
        label=f"{milliseconds(row.total_ms)} in total: {parts}",
        top=scale_ms,
    )


def phase_bars(row: InferenceRequest) -> list[tuple[Phase, StackedBar]]:
    """Return each phase with its bar, on the scale of the whole request."""
    found = phases(row)
    return [
        (
            phase,
            span_bar([(phase.series, phase.begin_ms, phase.end_ms)], label="", top=row.total_ms),
        )
        for phase in found
    ]


def models_used(now: dt.datetime) -> list[str]:
    """Return the models of the last weeks' requests, as choices."""
    names = UsageDay.objects.filter(starts_at__gte=now - dt.timedelta(days=90))
    return list(names.order_by("model").values_list("model", flat=True).distinct()[:MAX_MODELS])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason for refusals at admission in the last day, and when they happened."""

    code: str
    status: int
    requests: int
    chart: BarChart
    #: The chart in words: "3 at 14:00, 5 at 16:00".
    hours: str

    @property
    def status_name(self) -> str:
        """Return the status's name in HTTP, for a refusal without a code."""
        return HTTPStatus(self.status).phrase if self.status in set(HTTPStatus) else "other"


def refusals_of_last_day(now: dt.datetime) -> list[Reason]:
    """Return the reasons, the most frequent first, with charts on one scale."""
    last = now.astimezone(dt.UTC).replace(minute=0, second=0, microsecond=0)
    hours = [last - dt.timedelta(hours=back) for back in range(REFUSAL_HOURS - 1, -1, -1)]
    counts: dict[tuple[int, str], dict[dt.datetime, int]] = {}
    for row in (
        RefusalHour.objects.filter(starts_at__gte=hours[0])
        .values("status", "code", "starts_at")
        .annotate(sum=Sum("requests"))
    ):
        counts.setdefault((row["status"], row["code"]), {})[row["starts_at"]] = row["sum"]
    top = max((num for by_hour in counts.values() for num in by_hour.values()), default=0)
    found = []
    for (status, code), by_hour in counts.items():
        said = {hour: f"{by_hour.get(hour, 0):,} at {hour:%H:%M}" for hour in hours}
        values = [(said[hour], float(by_hour.get(hour, 0))) for hour in hours]
        found.append(
            Reason(
                code=code,
                status=status,
                requests=sum(by_hour.values()),
                chart=bar_chart(values, width=240, height=24, top=float(top)),
                hours=", ".join(said[hour] for hour in hours if hour in by_hour),
            )
        )
    return sorted(found, key=lambda reason: (-reason.requests, reason.code))
