"""The rules of a schedule beside its times: when a slot may run late, seldom or not at all. Pure.

`rules_checked` checks the rules of callers; `plan` decides about the due slots.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.training.daily_window import DailyWindow
from controlplane.errors import InvalidRequest
from controlplane.training.models import Schedule

MIN_GRACE, MAX_GRACE = dt.timedelta(minutes=1), dt.timedelta(days=7)
MAX_RUNS_PER_DAY = 1440
#: The rules' names in requests and their defaults.
DEFAULTS: dict[str, Any] = {
    "skip_unchanged": True,
    "window": "",
    "misfire": Schedule.Misfire.RUN_ONCE.value,
    "grace_s": 3600,
    "max_runs_per_day": None,
}


def rules_of(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule's rules in the form of a request."""
    rules = {name: getattr(schedule, name) for name in DEFAULTS if name != "grace_s"}
    return rules | {"grace_s": round(schedule.grace.total_seconds())}


def settings_changed(known: Schedule | None, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `services.schedule_set` for a change; fields left out stay.

    changed  by its name in the API; a new schedule needs `dataset` and `cron`
    """
    before: dict[str, Any] = {"timezone": "UTC", "hyperparameters": {}, "is_paused": False}
    if known is not None:
        before = {name: getattr(known, name) for name in ("cron", *before)}
        before["dataset"] = known.dataset.name
        before["validation_dataset"] = getattr(known.validation_dataset, "name", None)
    rules = rules_of(known) if known else DEFAULTS
    wanted = {**before, **changed}
    return {
        "dataset_name": wanted["dataset"],
        "cron_line": wanted["cron"],
        "timezone_name": wanted["timezone"],
        "hyperparameters": wanted["hyperparameters"],
        "validation_dataset_name": wanted.get("validation_dataset"),
        "is_paused": wanted["is_paused"],
        "rules": {name: wanted.get(name, rules[name]) for name in rules},
    }


def rules_checked(given: Mapping[str, Any], timezone: str) -> dict[str, Any]:
    """Return the fields of `Schedule` for rules, with defaults for those left out.

    Raises InvalidRequest that names the field.
    """
    rules = {**DEFAULTS, **given}
    for name in rules.keys() - DEFAULTS.keys():
        raise InvalidRequest("There is no such field: remove it.", param=name[:60])
    if type(rules["skip_unchanged"]) is not bool:
        raise InvalidRequest("This must be true or false.", param="skip_unchanged")
    if rules["misfire"] not in Schedule.Misfire.values:
        choices = ", ".join(Schedule.Misfire.values)
        raise InvalidRequest(f"This must be one of {choices}.", param="misfire")
    window_of(str(rules["window"]), timezone)
    fewest, most = (int(bound.total_seconds()) for bound in (MIN_GRACE, MAX_GRACE))
    seconds = rules.pop("grace_s")
    if type(seconds) is not int or not fewest <= seconds <= most:
        raise InvalidRequest(f"It is from {fewest} to {most} seconds.", param="grace_s")
    runs = rules["max_runs_per_day"]
    if runs is not None and (type(runs) is not int or not 1 <= runs <= MAX_RUNS_PER_DAY):
        raise InvalidRequest(f"It is from 1 to {MAX_RUNS_PER_DAY}.", param="max_runs_per_day")
    return {**rules, "grace": dt.timedelta(seconds=seconds)}


def window_of(text: str, timezone: str) -> DailyWindow | None:
    """Return the window; None: it is always open. Raises InvalidRequest."""
    try:
        if len(text) > len("22:00-06:00") or (text and text.count(":") != 2):
            raise ValueError("write it as 22:00-06:00; it is in the schedule's time zone")
        return DailyWindow.parse(f"{text} {timezone}") if text else None
    except ValueError as error:
        raise InvalidRequest(f"{str(error)[:300]}.", param="window") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decision on due slots.

    fire    the slot that runs now; None: none does
    merged  slots on time that this run also covers
    missed  slots that did not run in time
    owed    a missed slot that runs as soon as possible
    waits   slots that may still run on time: they stay due
    """

    fire: dt.datetime | None = None
    merged: Sequence[dt.datetime] = ()
    missed: Sequence[dt.datetime] = ()
    owed: dt.datetime | None = None
    waits: Sequence[dt.datetime] = ()


def plan(
    slots: Sequence[dt.datetime],
    now: dt.datetime,
    *,
    is_free: bool,
    grace: dt.timedelta,
    misfire: str,
    owed: dt.datetime | None,
) -> Plan:
    """Decide about the slots that are due, oldest first.

    is_free  whether a run may be made now
    owed     a slot that was missed earlier, and is to run as soon as it may
    """
    on_time = [slot for slot in slots if now - slot <= grace]
    late = [slot for slot in slots if now - slot > grace]
    makes_up = misfire == Schedule.Misfire.RUN_ONCE
    if not is_free:
        owed = late[-1] if late and makes_up else owed
        return Plan(missed=late, owed=owed, waits=on_time)
    if on_time:
        return Plan(fire=on_time[-1], merged=on_time[:-1], missed=late)
    if late and makes_up:
        return Plan(fire=late[-1], missed=late[:-1])
    return Plan(fire=owed if makes_up else None, missed=late)
