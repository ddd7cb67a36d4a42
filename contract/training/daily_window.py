"""A window of hours that repeats every day, as a setting writes it. Pure.

A window is written `22:00-06:00 Europe/Berlin`: from the first time of day up to the second, which
may be on the next day, in a zone of the IANA database (UTC without one).
"""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from dataclasses import dataclass

_FORM = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)(?: +(\S{1,64}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """Every day from `start` to `end`, local times; `end` <= `start` is on the next day."""

    start: dt.time
    end: dt.time
    zone: zoneinfo.ZoneInfo

    @classmethod
    def parse(cls, text: str) -> DailyWindow | None:
        """Return the window; None for an empty text: always open. Raises ValueError."""
        if not text.strip():
            return None
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is not a window like 22:00-06:00 Europe/Berlin")
        start = dt.time(int(found[1]), int(found[2]))
        end = dt.time(int(found[3]), int(found[4]))
        if start == end:
            raise ValueError(f"{text!r} begins when it ends; leave it empty to train at any time")
        try:
            return cls(start, end, zoneinfo.ZoneInfo(found[5] or "UTC"))
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"there is no time zone {found[5]!r}") from None

    def is_open(self, at: dt.datetime) -> bool:
        now = at.astimezone(self.zone).time()
        if self.start < self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end

    def opens_at(self, at: dt.datetime) -> dt.datetime:
        """Return when the window is next open, in UTC: `at` itself if it is open."""
        if self.is_open(at):
            return at
        local = at.astimezone(self.zone)
        for days in (0, 1):
            day = local.date() + dt.timedelta(days=days)
            # Through UTC, so that a time which the clock skips becomes one after the gap.
            opening = dt.datetime.combine(day, self.start, self.zone).astimezone(dt.UTC)
            if opening > at:
                return opening
        raise AssertionError("a day has passed without the window's first time")

    def opened_at(self, at: dt.datetime) -> dt.datetime:
        """Return when the window last opened, in UTC: `at` itself if it opens just then."""
        local = at.astimezone(self.zone)
        openings = (
            dt.datetime.combine(local.date() - dt.timedelta(days=days), self.start, self.zone)
            for days in (0, 1, 2)
        )
        return next(
            opening for opening in (o.astimezone(dt.UTC) for o in openings) if opening <= at
        )
