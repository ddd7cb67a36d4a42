"""Slots in local time, over the days on which clocks change. Times are the IANA database's."""

from __future__ import annotations

import datetime as dt
import zoneinfo

import pytest

from controlplane.training.cron import check_timezone, next_slot, slots_until


def utc(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


def slots(cron: str, timezone: str, after: str, count: int) -> list[str]:
    """`count` slots in a row, each computed from the one before as the tick does, in local time."""
    moment, found = utc(after), []
    for _ in range(count):
        moment = next_slot(cron, timezone, moment)
        local = moment.astimezone(zoneinfo.ZoneInfo(timezone))
        found.append(local.strftime("%m-%d %H:%M%z"))
    return found


@pytest.mark.parametrize(
    ("cron", "timezone", "after", "expected"),
    [
        pytest.param(
            *("30 2 * * *", "Europe/Berlin", "2026-03-27T12:00"),
            ["03-28 02:30+0100", "03-29 03:00+0200", "03-30 02:30+0200"],
            id="berlin-skips-0230-and-runs-after-the-gap",
        ),
        pytest.param(
            *("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00"),
            ["10-25 02:30+0200", "10-26 02:30+0100"],
            id="berlin-repeats-0230-and-runs-once",
        ),
        pytest.param(
            *("30 1 * * *", "America/New_York", "2026-10-31T12:00"),
            ["11-01 01:30-0400", "11-02 01:30-0500"],
            id="new-york-repeats-0130-and-runs-once",
        ),
        pytest.param(
            *("15 2 * * SUN", "America/New_York", "2026-03-02T00:00"),
            ["03-08 03:00-0400", "03-15 02:15-0400"],
            id="new-york-skips-0215",
        ),
        pytest.param(
            *("0 2 * * *", "Australia/Lord_Howe", "2026-04-03T00:00"),
            ["04-04 02:00+1100", "04-05 02:00+1030", "04-06 02:00+1030"],
            id="lord-howe-shifts-by-half-an-hour",
        ),
        pytest.param(
            *("15 2 * * *", "Australia/Lord_Howe", "2026-10-02T16:00"),
            ["10-04 02:30+1100", "10-05 02:15+1100"],
            id="lord-howe-skips-half-an-hour",
        ),
        pytest.param(
            *("0 0 * * *", "America/Santiago", "2026-09-04T12:00"),
            ["09-05 00:00-0400", "09-06 01:00-0300", "09-07 00:00-0300"],
            id="santiago-skips-midnight",
        ),
        pytest.param(
            *("0 3 * * *", "Asia/Kolkata", "2026-03-28T21:30"),
            ["03-30 03:00+0530", "03-31 03:00+0530"],
            id="kolkata-never-changes",
        ),
        pytest.param(
            *("*/30 * * * *", "Europe/Berlin", "2026-10-25T00:00"),
            ["10-25 02:30+0200", "10-25 02:00+0100", "10-25 02:30+0100", "10-25 03:00+0100"],
            id="every-half-hour-follows-elapsed-time",
        ),
        pytest.param(
            *("0 2 29 2 *", "UTC", "2026-01-01T00:00"),
            ["02-29 02:00+0000", "02-29 02:00+0000"],
            id="leap-days",
        ),
    ],
)
def test_slots_over_clock_changes(
    cron: str, timezone: str, after: str, expected: list[str]
) -> None:
    assert slots(cron, timezone, after, len(expected)) == expected


@pytest.mark.parametrize("timezone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
@pytest.mark.parametrize("cron", ["30 2 * * *", "45 1,2 * * *", "*/20 * * * *", "10 */2 * * *"])
def test_from_any_minute_of_a_year_the_next_slot_is_later(cron: str, timezone: str) -> None:
    for minutes in range(0, 366 * 24 * 60, 97):
        after = utc("2026-01-01T00:00") + dt.timedelta(minutes=minutes)
        slot = next_slot(cron, timezone, after)
        assert after < slot < after + dt.timedelta(hours=26)
        assert slot.tzinfo is dt.UTC


def test_in_the_second_pass_of_a_repeated_hour_the_first_pass_is_over() -> None:
    # 00:45 UTC is 02:45 the first time, 01:10 UTC is 02:10 the second time.
    after = utc("2026-10-25T01:10")
    assert next_slot("30 2 * * *", "Europe/Berlin", after) == utc("2026-10-26T01:30")


@pytest.mark.parametrize(
    ("cron", "message"),
    [
        ("", "five fields"),
        ("* * * *", "five fields"),
        ("0 * * * * *", "five fields"),
        ("60 * * * *", "Bad minute"),
        ("a b c d e", "Bad minute"),
        ("0 0 32 2 *", "Bad day-of-month"),
        ("0 0 30 13 *", "Bad month"),
        *((line, "it never fires") for line in ("0 0 30 2 *", "5 4 31 2,4 *", "0 0 31 6 */2")),
        ("0 0 29 2 MON#5,TUE#6", "not a cron line"),
        ("0 0 1 1 8", "Bad day-of-week"),
        ("*/0 * * * *", "Bad minute"),
    ],
)
def test_a_wrong_line_is_refused(cron: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next_slot(cron, "UTC", utc("2026-01-01T00:00"))


@pytest.mark.parametrize(
    "name", ["", "Berlin", "Europe", "../etc/passwd", "/etc/localtime", "Europe/Berlin\n", "utc "]
)
def test_a_wrong_time_zone_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="time zone"):
        check_timezone(name)


def test_the_slots_of_an_outage_are_its_newest() -> None:
    first, until = utc("2026-10-24T00:30"), utc("2026-10-27T12:00")
    line = "30 2 * * *", "Europe/Berlin"
    found = slots_until(*line, first, until, most=60)
    assert found == [
        utc(f"2026-10-{day}") for day in ("24T00:30", "25T00:30", "26T01:30", "27T01:30")
    ]
    assert slots_until(*line, first, until, most=2) == found[-2:]
    assert slots_until(*line, until, first, most=2) == []
    # A stored slot is one, also if the zone's rules have changed since.
    odd = utc("2026-10-24T00:10")
    assert slots_until(*line, odd, until, most=60) == [odd, *found]
    minutes = slots_until("* * * * *", "UTC", utc("1996-01-01T00:00"), until, most=60)
    assert (len(minutes), minutes[-1], minutes[0]) == (60, until, utc("2026-10-27T11:01"))


@pytest.mark.parametrize("name", ["localtime", "Factory", "Nowhere/Land"])
def test_what_is_no_zone_is_refused(name: str) -> None:
    """The first two are files beside the zones: what the machine has, and that it has none."""
    with pytest.raises(ValueError, match="no such time zone"):
        check_timezone(name)
