"""Compute when a schedule is due: a cron line of five fields in a time zone. Pure.

Slots are computed in local time, as Debian's cron does: a job at a fixed hour runs once on a day
whose clock skips that hour (right after the gap) or repeats it (the first time); a job with a
star for its minute or hour follows elapsed time.
"""

from __future__ import annotations

import datetime as dt
import functools
import zoneinfo

from cronsim import CronSim, CronSimError

NEVER = "it never fires, because its months have no such day: change the day"


def check_timezone(name: str) -> None:
    """Raise ValueError unless it is a zone of the IANA database."""
    if name not in timezones():
        raise ValueError("there is no such time zone; use an IANA name such as Europe/Berlin")


@functools.cache
def timezones() -> frozenset[str]:
    """Return the names that `check_timezone` takes."""
    # Two of the files are no zones: the machine's own, and that it has none.
    return frozenset(zoneinfo.available_timezones() - {"localtime", "Factory"})


def next_slot(cron: str, timezone: str, after: dt.datetime) -> dt.datetime:
    """Return the first slot later than `after`, in UTC.

    Raises ValueError when the cron line or the zone is wrong, or when the line never fires.
    """
    check_timezone(timezone)
    fields = cron.split()
    if len(fields) != 5:  # with six, cronsim reads the first as seconds
        raise ValueError("it must have five fields: minute, hour, day, month, weekday")
    try:
        slots = CronSim(cron, after.astimezone(zoneinfo.ZoneInfo(timezone)))
        for slot in slots:
            moment: dt.datetime = slot.astimezone(dt.UTC)
            # In the repeated hour the first slots found may be those of its first pass.
            if moment > after:
                return moment
    except CronSimError as error:
        if _is_cron([*fields[:3], "*", fields[4]]) and _is_cron([*fields[:2], "*", *fields[3:]]):
            raise ValueError(NEVER) from error  # day and month are valid, but not together
        raise ValueError(f"it is not a cron line: {error}") from error
    raise ValueError(NEVER)


def _is_cron(fields: list[str]) -> bool:
    try:
        CronSim(" ".join(fields), dt.datetime(2000, 1, 1))
    except CronSimError:
        return False
    return True


def slots_until(
    cron: str, timezone: str, first: dt.datetime, until: dt.datetime, *, most: int
) -> list[dt.datetime]:
    """Return the slots from `first` to `until`, the newest `most` of them, oldest first.

    first  is a slot, whatever the line and the time zone's rules say now
    Raises ValueError as `next_slot` does.
    """
    span = dt.timedelta(hours=1)
    while True:
        # Backwards in growing steps: an outage of a year has half a million minutes.
        begin = max(first, until - span)
        slots = [first] if begin == first <= until else []
        slot = next_slot(cron, timezone, begin)
        while slot <= until:
            slots.append(slot)
            slot = next_slot(cron, timezone, slot)
        if begin == first or len(slots) >= most:
            return slots[-most:]
        span *= 8
