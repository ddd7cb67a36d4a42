"""Put what was counted of a canary beside what was counted of its primary."""

from __future__ import annotations

import dataclasses

from controlplane.aliases import counting
from controlplane.aliases.contents import contents_of
from controlplane.aliases.guards import guard_read
from controlplane.aliases.models import AliasPart, AliasRevision
from controlplane.aliases.verdict import Counts, Guard, problems

Target = AliasPart.Target


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A canary beside its primary."""

    canary: Counts
    primary: Counts
    guard: Guard
    #: The revision of the primary's counts, if the primary got no requests in this one.
    primary_since: int | None = None

    @property
    def problems(self) -> list[str]:
        return problems(self.canary, self.primary, self.guard)


def compare(revision: AliasRevision) -> Comparison:
    """Return what was counted since a revision of both its targets.

    With a canary that answers everybody the primary's counts are those of the revision before, if
    that had the same targets.
    """
    counts, since = counting.counts_of(revision), None
    primary = counts[Target.PRIMARY]
    if revision.canary_percent == 100 and not primary.requests:
        before = _before(revision)
        if before is not None:
            primary, since = counting.counts_of(before)[Target.PRIMARY], before.number
    return Comparison(
        canary=counts[Target.CANARY],
        primary=primary,
        guard=guard_read(revision.guard),
        primary_since=since,
    )


def _before(revision: AliasRevision) -> AliasRevision | None:
    rows = AliasRevision.objects.filter(alias_id=revision.alias_id, number__lt=revision.number)
    before = rows.order_by("-number").first()
    if before is None:
        return None
    old, new = contents_of(before), contents_of(revision)
    return before if (old.primary, old.canary) == (new.primary, new.canary) else None
