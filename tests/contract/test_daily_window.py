"""A daily window: open from its first time up to its second, also past midnight, in its zone."""

from __future__ import annotations

import datetime as dt

import pytest

from contract.training.daily_window import DailyWindow


def at(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


def window(text: str) -> DailyWindow:
    parsed = DailyWindow.parse(text)
    assert parsed is not None
    return parsed


@pytest.mark.parametrize(
    ("text", "moment", "is_open"),
    [
        ("22:00-06:00", "2026-11-23T21:59:59", False),
        ("22:00-06:00", "2026-11-23T22:00:00", True),
        ("22:00-06:00", "2026-11-24T05:59:59", True),
        ("22:00-06:00", "2026-11-24T06:00:00", False),
        ("01:00-05:30", "2026-11-24T00:59:00", False),
        ("01:00-05:30", "2026-11-24T05:29:00", True),
        ("22:00-06:00 Europe/Berlin", "2026-11-23T21:00:00", True),
        ("22:00-06:00 Europe/Berlin", "2026-11-24T05:00:00", False),
        ("22:00-06:00 Europe/Berlin", "2026-07-01T20:00:00", True),  # summer: two hours ahead
    ],
)
def test_open(text: str, moment: str, is_open: bool) -> None:
    assert window(text).is_open(at(moment)) is is_open


@pytest.mark.parametrize(
    ("text", "moment", "opens"),
    [
        ("22:00-06:00", "2026-11-23T12:00:00", "2026-11-23T22:00:00"),
        ("22:00-06:00", "2026-11-23T23:00:00", "2026-11-23T23:00:00"),
        ("01:00-02:00", "2026-11-23T12:00:00", "2026-11-24T01:00:00"),
        ("22:00-06:00 Asia/Tokyo", "2026-11-23T12:00:00", "2026-11-23T13:00:00"),
        # The clock goes from 02:00 to 03:00 that night: 02:30 never is.
        ("02:30-05:00 Europe/Berlin", "2026-03-28T23:30:00", "2026-03-29T01:30:00"),
    ],
)
def test_opens_at(text: str, moment: str, opens: str) -> None:
    assert window(text).opens_at(at(moment)) == at(opens)


def test_it_is_open_when_it_opens_on_every_day_of_a_year() -> None:
    for text in ("22:00-06:00 America/New_York", "02:30-05:00 Europe/Berlin", "00:00-00:01"):
        each, moment = window(text), at("2026-01-01T00:00:00")
        for _ in range(24 * 366):
            opening = each.opens_at(moment)
            assert each.is_open(opening)
            assert dt.timedelta() <= opening - moment <= dt.timedelta(hours=25)
            moment += dt.timedelta(hours=1)


def test_empty_is_no_window() -> None:
    assert DailyWindow.parse(" ") is None


@pytest.mark.parametrize(
    "text", ["always", "22-06", "25:00-06:00", "22:00-22:00", "22:00-06:00 Mars/Base", "1:00-2:00"]
)
def test_what_is_none_says_so(text: str) -> None:
    with pytest.raises(ValueError, match=r"window|begins|zone|hour"):
        DailyWindow.parse(text)


@pytest.mark.parametrize(
    ("text", "moment", "opened"),
    [
        ("22:00-06:00", "2026-11-24T05:00:00", "2026-11-23T22:00:00"),
        ("22:00-06:00", "2026-11-23T22:00:00", "2026-11-23T22:00:00"),
        ("22:00-06:00", "2026-11-24T21:59:00", "2026-11-23T22:00:00"),
        ("22:00-06:00 Europe/Berlin", "2026-11-23T23:30:00", "2026-11-23T21:00:00"),
        ("00:30-06:00 Asia/Tokyo", "2026-11-23T15:20:00", "2026-11-22T15:30:00"),
    ],
)
def test_when_it_opened_last(text: str, moment: str, opened: str) -> None:
    assert window(text).opened_at(at(moment)) == at(opened)
