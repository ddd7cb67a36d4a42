"""Template tags that format states, digests and times."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from django import template
from django.utils.html import format_html_join
from django.utils.safestring import SafeString, mark_safe

from controlplane.usage.limits.models import Budget

register = template.Library()

_PART = re.compile(r"[^_.]*[_.]|[^_.]+")

#: The colour of a state's badge.
_TONES = {
    "uploading": "busy",
    "uploaded": "busy",
    "validating": "busy",
    "ready": "good",
    "rejected": "bad",
    "retired": "warn",
    "queued": "busy",
    "running": "busy",
    "publishing": "busy",
    "succeeded": "good",
    "failed": "bad",
    "cancelled": "warn",
    "judging": "busy",
    "promote": "good",
    "hold": "warn",
    "missed": "bad",
    "skipped": "warn",
    "reject": "bad",
    "active": "good",
    "verified": "good",
    "linked": "good",
    "this one": "good",
    "pending": "busy",
    "accepted": "good",
    "revoked": "bad",
    "expired": "warn",
    "live": "good",
    "paused": "warn",
    "done": "good",
    "stopped": "warn",
    "disabled": "warn",
    "failing": "bad",
    "ok": "good",
    "cut": "warn",
    "waiting": "busy",
    "agreed": "good",
    "mismatch": "bad",
    "warning": "warn",
}


@register.inclusion_tag("console/_badge.html")
def badge(state: str) -> dict[str, str]:
    """Show a state as a coloured badge."""
    return {"state": state, "tone": _TONES.get(state, "")}


@register.filter
def signed(number: float) -> str:
    """Write a number with its sign and four digits after the point."""
    return f"{number:+.4f}"


@register.filter
def asked(case: Any) -> str:
    """Return the last message of an evaluation's case as text."""
    content = case.messages[-1].get("content") if case.messages else ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


@register.filter
def percent(share: float) -> str:
    """Write a share with three digits: 0.0123 as 1.23%."""
    return f"{100 * share:.3g}%"


@register.filter
def short_digest(digest: str) -> str:
    """Return the first 12 characters, which distinguish a tenant's digests."""
    return digest[:12]


@register.filter
def milliseconds(value: float | None) -> str:
    """Format a duration: "87 ms", "1.4 s", "3 min"."""
    if value is None:
        return "–"
    if value < 1000:
        return f"{value:.0f} ms"
    if value < 60_000:
        return f"{value / 1000:.1f} s"
    return f"{value / 60_000:.0f} min"


@register.filter
def exact_milliseconds(value: float) -> str:
    """Format a duration in milliseconds: "1,437 ms", with tenths if it is short."""
    return f"{value:,.1f} ms" if 0 < value < 100 else f"{value:,.0f} ms"


@register.filter
def breakable(code: str) -> SafeString:
    """Allow line breaks after the underscores and dots of a code or a dotted name."""
    return format_html_join(mark_safe("<wbr>"), "{}", ((part,) for part in _PART.findall(code)))


@register.filter
def who(row: Any) -> str:
    """Return who caused a row; a task or a command, whose names are internal, is the platform."""
    if row.actor_type == "system":
        return "the platform"
    return row.actor_name or getattr(row, "actor_id", "") or "somebody who was not signed in"


@register.filter
def get(mapping: dict[Any, Any], key: Any) -> Any:
    """Return mapping[key], or None."""
    return mapping.get(key)


@register.filter
def json_text(value: Any) -> str:
    """Format a JSON value over several lines."""
    return json.dumps(value, indent=2, ensure_ascii=False)


@register.filter
def unlocalized(value: float) -> str:
    """Format a number for an HTML attribute."""
    return f"{value:.4f}"


@dataclasses.dataclass(frozen=True, slots=True)
class Ceiling:
    """One of a budget's limits, and the spent tokens.

    tone  the meter's colour: good; warn near the hard limit or above the soft one; bad above the
          hard one
    """

    limit: int
    spent: int
    label: str
    tone: str

    @property
    def share(self) -> float:
        """Return the spent share, from 0 to 1; a limit of 0 counts as spent."""
        return min(1.0, self.spent / self.limit) if self.limit else 1.0

    @property
    def over(self) -> int:
        return max(0, self.spent - self.limit)


#: The share of a hard limit from which its meter warns.
_NEAR = 0.9


@register.filter
def ceilings(budget: Budget, spent: int) -> list[Ceiling]:
    """Return a budget's limits, each with its effect."""
    found = []
    if (soft := budget.soft_limit) is not None:
        tone = "warn" if spent >= soft else "good"
        found.append(Ceiling(soft, spent, "then answers say so", tone))
    if (hard := budget.hard_limit) is not None:
        tone = "bad" if spent >= hard else "warn" if spent >= _NEAR * hard else "good"
        found.append(Ceiling(hard, spent, "then it refuses", tone))
    return found


@register.simple_tag(takes_context=True)
def current(context: template.Context, prefix: str) -> str:
    """Return "page", for aria-current, if the address is under `prefix`, or is `/console/`."""
    path = context["request"].path
    is_inside = path == prefix if prefix.endswith("console/") else path.startswith(prefix)
    return "page" if is_inside else "false"
