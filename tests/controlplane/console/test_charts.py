"""Numbers to shapes."""

from __future__ import annotations

from controlplane.console.charts import bar_chart, line_chart


def test_largest_bar_fills_the_height_and_the_smallest_stays_visible() -> None:
    chart = bar_chart([("a", 0), ("b", 1), ("c", 10_000)], width=300, height=100)
    assert [bar.height for bar in chart.bars] == [0.0, 2.0, 100.0]
    assert [bar.y for bar in chart.bars] == [100.0, 98.0, 0.0]


def test_bars_lie_side_by_side() -> None:
    chart = bar_chart([("", 1)] * 24, width=600)
    ends = [bar.x + bar.width for bar in chart.bars]
    assert all(end <= bar.x for end, bar in zip(ends, chart.bars[1:], strict=False))
    assert ends[-1] <= 600


def test_no_values_make_no_bars() -> None:
    assert bar_chart([]).bars == ()


def test_line_spans_the_box_with_the_highest_on_top() -> None:
    chart = line_chart([(1, 4.0), (2, 3.0), (5, 2.0)], width=100, height=50)
    assert chart is not None
    assert chart.points == "0.0,0.0 25.0,25.0 100.0,50.0"


def test_flat_line_is_drawn() -> None:
    chart = line_chart([(1, 2.0), (2, 2.0)])
    assert chart is not None
    assert "nan" not in chart.points


def test_one_point_is_no_line() -> None:
    assert line_chart([(1, 2.0)]) is None
