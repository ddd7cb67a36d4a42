"""The shapes of charts."""

from __future__ import annotations

from controlplane.console.charts import (
    bar_chart,
    common_scale,
    interval_chart,
    line_chart,
    span_bar,
)


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


def test_charts_on_one_scale() -> None:
    chart = bar_chart([("a", 5)], height=100, top=50.0)
    assert (chart.bars[0].height, chart.top) == (10.0, 50.0)


def test_spans_lie_behind_each_other_and_are_cut_at_the_top() -> None:
    spans = [(4, 0.0, 10.0), (2, 10.0, 10.0), (1, 10.0, 60.0), (0, 60.0, 900.0)]
    bar = span_bar(spans, label="l", top=100.0, width=200)
    assert [(series, part.x, part.x + part.width) for series, part in bar.parts] == [
        *((4, 0.0, 20.0), (1, 20.0, 120.0), (0, 120.0, 200.0)),
    ]
    assert span_bar([(0, 100.0, 200.0)], label="", top=100.0).parts == ()


def test_the_shortest_span_stays_visible_and_none_needs_a_scale() -> None:
    [(_, part)] = span_bar([(0, 0.0, 0.001)], label="", top=60_000.0).parts
    assert part.width == 2.0
    assert span_bar([(0, 0.0, 0.0)], label="", top=0.0).parts == ()


def test_one_that_took_very_long_does_not_flatten_the_others() -> None:
    assert common_scale([]) == 0
    assert common_scale([0.0, 0.0]) == 0
    assert common_scale([1.0, 3.0, 2.0]) == 3.0
    assert common_scale([100.0] * 49 + [60_000.0]) == 150.0
    assert common_scale([0.0] * 49 + [60_000.0]) == 60_000.0


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


def test_intervals_lie_on_one_scale_from_zero() -> None:
    chart = interval_chart([("a", 0.0, 0.1, 0.5), ("b", 0.5, None, 1.0)], width=110)
    first, second = chart.intervals
    assert (first.left, first.dot, first.right) == (0.0, 10.0, 50.0)
    assert (second.left, second.dot, second.right) == (50.0, None, 100.0)
    assert first.y < second.y < chart.height


def test_an_interval_without_an_upper_bound_goes_to_the_edge() -> None:
    chart = interval_chart([("a", 2.0, None, None)], width=100)
    assert chart.intervals[0].right == 100.0
    assert interval_chart([("a", 0.0, None, 0.0)]).intervals[0].right == 0.0
