"""Draws the Grafana dashboard with what Prometheus answers to its queries, as one page of HTML.

Grafana itself cannot be pulled here. The panels' places, units, stacking and thresholds are the
dashboard's own, so a panel that nobody could read shows.
"""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Prometheus' values of one line: seconds since 1970 and the value.
Points = list[tuple[float, float]]
Lines = list[tuple[str, Points]]

_COLUMN, _ROW = 60, 38  # pixels of Grafana's grid
_COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#70dbed")
_NAMED = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}
_LEFT, _TOP, _LINE = 62, 28, 15
_STYLE = (
    "body{margin:0;background:#111217;font:12px sans-serif;color:#ccccdc}"
    "div{position:absolute;box-sizing:border-box;overflow:hidden}"
    ".panel{background:#181b1f;border:1px solid #25272c}.row{font-weight:bold;padding:12px 4px}"
    "text{fill:#ccccdc;font:11px sans-serif}.dim{fill:#8e8e99}"
)


def line_name(form: str, labels: dict[str, str]) -> str:
    """Return a legend as Grafana writes it: "{{status}}" is the label's value."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), form)


def lines_of(panel: dict[str, Any], query: Callable[[str], list[dict[str, Any]]]) -> Lines:
    """Return a panel's lines that have values.

    query  answers an expression with Prometheus' rows of a range
    """
    lines = [
        (
            line_name(target.get("legendFormat") or "", row["metric"]),
            [(at, float(value)) for at, value in row["values"] if math.isfinite(float(value))],
        )
        for target in panel["targets"]
        for row in query(target["expr"])
    ]
    return [(name, points) for name, points in lines if points]


def draw(
    dashboard: dict[str, Any],
    query: Callable[[str], list[dict[str, Any]]],
    begin: float,
    end: float,
) -> str:
    """Return the page for the time from `begin` to `end`, in seconds since 1970."""
    pieces = []
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        width, height = at["w"] * _COLUMN - 6, at["h"] * _ROW - 6
        place = (
            f"left:{at['x'] * _COLUMN}px;top:{at['y'] * _ROW}px;width:{width}px;height:{height}px"
        )
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            pieces.append(f'<div class="row" style="{place};font-size:13px">{title}</div>')
            continue
        lines = lines_of(panel, query)
        paint = _stat if panel["type"] == "stat" else _graph
        drawn = paint(panel, lines, width, height, begin, end)
        heading = f'<text x="8" y="17" font-weight="bold">{title}</text>'
        svg = f'<svg width="{width}" height="{height}">{heading}{drawn}</svg>'
        pieces.append(f'<div class="panel" style="{place}">{svg}</div>')
    return f"<!doctype html><style>{_STYLE}</style>{''.join(pieces)}"


def screenshot(page: Path, picture: Path, dashboard: dict[str, Any]) -> None:
    """Take a picture of the page, if there is a Chromium."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        return
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    subprocess.run(
        [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--window-size={24 * _COLUMN},{height * _ROW}", f"--screenshot={picture}"),
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def spelled(value: float, unit: str) -> str:
    """Write a value in one of the units that the dashboard has."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s" and abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB"
    after = {"reqps": " req/s", "ops": " ops/s", "s": " s"}.get(unit, "")
    return f"{value:.3g}{after}"


def _unit(panel: dict[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", "none"))


def _stat(
    panel: dict[str, Any], lines: Lines, width: int, height: int, begin: float, end: float
) -> str:
    if not lines:
        return _said("No data", width, height)
    value = lines[0][1][-1][1]
    colour = _NAMED["green"]
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = _NAMED[step["color"]]
    text = html.escape(spelled(value, _unit(panel)))
    style = f"font-size:34px;font-weight:bold;text-anchor:middle;fill:{colour}"
    return f'<text x="{width / 2}" y="{height / 2 + 22}" style="{style}">{text}</text>'


def _said(text: str, width: int, height: int) -> str:
    return f'<text class="dim" x="{width / 2}" y="{height / 2}" text-anchor="middle">{text}</text>'


def _graph(
    panel: dict[str, Any], lines: Lines, width: int, height: int, begin: float, end: float
) -> str:
    if not lines:
        return _said("No data", width, height)
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    is_stacked = custom.get("stacking", {}).get("mode") == "normal"
    shown = _stacked(lines) if is_stacked else lines
    legend, legend_lines = _legend(lines, _unit(panel), width, height)
    bottom = height - 10 - legend_lines * _LINE
    most = max((value for _, points in shown for _, value in points), default=0) * 1.05 or 1.0
    pieces = []
    for part in range(4):
        y = bottom - part / 3 * (bottom - _TOP)
        pieces.append(f'<path d="M{_LEFT} {y:.1f}H{width - 8}" stroke="#25272c"/>')
        label = html.escape(spelled(most * part / 3, _unit(panel)))
        pieces.append(
            f'<text class="dim" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for number, (_, points) in reversed(list(enumerate(shown))):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [
            (
                _LEFT + (at - begin) / (end - begin) * (width - 8 - _LEFT),
                bottom - value / most * (bottom - _TOP),
            )
            for at, value in points
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        opacity = custom.get("fillOpacity", 0) / 100
        area = f"M{places[0][0]:.1f} {bottom}L{path}L{places[-1][0]:.1f} {bottom}Z"
        pieces.append(f'<path d="{area}" fill="{colour}" fill-opacity="{opacity}"/>')
        # A line of one point would not be seen.
        path += f"L{places[-1][0] + 1:.1f} {places[-1][1]:.1f}"
        pieces.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
    return "".join(pieces) + legend


def _stacked(lines: Lines) -> Lines:
    """Add to each line those before it."""
    below: dict[float, float] = {}
    stacked = []
    for name, points in lines:
        for at, value in points:
            below[at] = below.get(at, 0.0) + value
        stacked.append((name, [(at, below[at]) for at, _ in points]))
    return stacked


def _legend(lines: Lines, unit: str, width: int, height: int) -> tuple[str, int]:
    """Return the names with their last values, and the text's number of lines."""
    pieces, x, line = [], 10.0, 0
    for number, (name, points) in enumerate(lines):
        text = f"{name}: {spelled(points[-1][1], unit)}" if name else spelled(points[-1][1], unit)
        needed = 26 + 6.0 * len(text)
        if x > 10 and x + needed > width:
            x, line = 10.0, line + 1
        pieces.append((x, line, _COLOURS[number % len(_COLOURS)], text))
        x += needed
    drawn = ""
    for x, at, colour, text in pieces:
        y = height - 8 - (line - at) * _LINE
        drawn += f'<path d="M{x} {y - 4}h10" stroke="{colour}" stroke-width="3"/>'
        drawn += f'<text x="{x + 14}" y="{y}">{html.escape(text)}</text>'
    return drawn, line + 1
