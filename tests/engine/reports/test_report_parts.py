"""What the report is made of: the trajectories it chooses, the parts these are shown in, and the charts."""

import math

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from report_cases import CHARTS, eval_record, step_record, trajectory

from thresher.common.console import visible
from thresher.engine.reports.charts import (
    DPI,
    PALETTE,
    SIZE,
    STYLE,
    Chart,
    Series,
    _draw_axes,
    charts_of,
    smooth,
    smoothing,
)
from thresher.engine.reports.pages import choose, parts_of
from thresher.rewards.transcript import Source

TAGS = ("<think>", "</think>", "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")


@pytest.mark.parametrize(
    ("records", "before", "count", "expected"),
    [
        ([], set(), 3, []),
        ([("a", True, 1), ("b", True, 2), ("c", False, 1)], set(), 3, ["b", "a", "c"]),
        ([("a", True, 1), ("b", True, 1), ("c", True, 1)], {"a"}, 2, ["b", "c"]),  # what was learnt first
        ([("a", True, 1), ("b", True, 1)], {"a", "b"}, 1, ["a"]),
        ([("a", True, 0), ("b", False, 0)], set(), 3, ["b", "a"]),  # fewer than asked for
        ([("a", False, 3), ("a", True, 1), ("a", True, 2)], set(), 3, ["a"]),  # no question twice
        ([("a", True, 2), ("b", True, 1), ("c", False, 1)], set(), 0, []),
    ],
)
def test_choice(records: list[tuple[str, bool, int]], before: set[str], count: int, expected: list[str]) -> None:
    chosen = choose([trajectory(*record) for record in records], before, count)
    assert [record["id"] for record in chosen] == expected


def test_parts_name_the_block_of_every_stretch() -> None:
    segments = [
        {"source": "prompt", "text": "<answer> no </answer>"},
        {"source": "policy", "text": "so <think> a </think><search> q </search>"},
        {"source": "retrieved", "text": "\n\n<information> p </information>\n"},
        {"source": "policy", "text": "<ANSWER> <answer> long"},
        {"source": "somebody", "text": "else"},
    ]
    parts = parts_of(segments, TAGS, 100)
    found = [[[(c.text, c.is_tag, c.span) for c in line] for line in part.lines] for part in parts]
    assert [part.source for part in parts] == [Source.POLICY, Source.RETRIEVED, Source.POLICY]
    think, search = ("<think>", True, "think"), ("<search>", True, "search")
    assert found[0] == [
        [("so ", False, "")],
        [think, (" a ", False, "think"), ("</think>", True, "think")],
        [search, (" q ", False, "search"), ("</search>", True, "search")],
    ]
    assert found[1][0][1] == (" p ", False, "information")
    assert found[2] == [[("<ANSWER> ", False, "")], [("<answer>", True, "answer"), (" long", False, "answer")]]
    (untagged,), *_ = (part.lines for part in parts_of(segments, (), 100))
    assert [chunk.text for chunk in untagged] == [segments[1]["text"]]
    opened = parts_of(segments, TAGS, 10)[0].lines[1]  # cut right after the tag
    assert [chunk.text for chunk in opened] == ["<think>", " … (31 characters more)"]


TEXTS = st.lists(st.sampled_from([*TAGS, "a", "\n", "<", "think>", "\x1b", "\u202e", "é"]), max_size=12).map("".join)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["policy", "retrieved", "feedback"]), TEXTS), max_size=4))
def test_parts_lose_nothing_and_add_nothing(segments: list[tuple[str, str]]) -> None:
    parts = parts_of([{"source": source, "text": text} for source, text in segments], TAGS, 10**6)
    shown = [(part.source, "".join(chunk.text for line in part.lines for chunk in line)) for part in parts]
    expected = [(source, visible(text).strip("\n")) for source, text in segments]
    assert shown == [(source, text) for source, text in expected if text]
    assert all((chunk.text in TAGS) == chunk.is_tag for part in parts for line in part.lines for chunk in line)


def test_visible() -> None:
    assert visible("a\tb\nc é 名") == "a\tb\nc é 名"
    assert visible("\x00\x1b\x7f\x9b\u202e\u2066\ud800") == "␀␛" + r"\u007f\u009b\u202e\u2066\ud800"
    visible("".join(map(chr, range(0x11000)))).encode()  # whatever there is can be written


def test_charts_hold_the_numbers_of_the_records() -> None:
    records = [eval_record(0, 0.25), step_record(1), step_record(2, searches=None, em=0.5), eval_record(2, 0.75)]
    charts = {chart.name: chart for chart in charts_of(records, **CHARTS)}
    sampled, held_out = charts["em"].series
    assert sampled.steps.tolist() == [1, 2] and sampled.values.tolist() == [1 / 30, 0.5]
    assert held_out.steps.tolist() == [0, 2] and held_out.values.tolist() == [0.25, 0.75] and held_out.dots
    assert [series.values[0] for series in charts["kl"].series] == [-0.01, 0.02, 0.01]
    assert [series.values[0] for series in charts["kl_largest"].series] == [4.5, 3.0] and charts["kl_largest"].log
    assert [series.values[0] for series in charts["tokens_per_s"].series] == [1000 / 0.4, 3000 / 0.6]
    assert charts["zero_advantage"].series[0].values.tolist() == [0.25, 0.25]
    assert [(s.label, s.values[0]) for s in charts["unanswered"].series] == [
        ("turn limit", 3 / 16),
        ("context full", 1 / 16),
    ]
    assert np.isnan(charts["searches"].series[0].values[1]) and charts["searches"].series[0].values[0] == 1.5
    assert sum(series.values[0] for series in charts["time"].series) == pytest.approx(0.6 + 0.4 + 0.01)
    assert "0.02 × k2" in charts["kl"].caption and charts["grad_norm"].rule == (1.0, "clipped to 1")


def test_charts_without_numbers_are_left_out() -> None:
    assert charts_of([], **CHARTS) == []
    assert charts_of([{"step": 1, "entropy": None}], **CHARTS) == []
    no_reference = [{key: value for key, value in step_record(1).items() if not key.startswith("kl_")}]
    names = [chart.name for chart in charts_of(no_reference, **CHARTS | {"beta": 0.0, "max_grad_norm": math.inf})]
    assert not {"kl", "kl_largest"} & set(names) and "em" in names
    exact = charts_of([step_record(1, logprob_gap=0.0, logprob_gap_max=0.0)], **CHARTS)
    assert "logprob_gap" not in [chart.name for chart in exact]  # 0 has no place on a log axis


def test_smoothing() -> None:
    nan = math.nan
    assert smooth(np.array([0.0, 3.0, 6.0, 3.0]), 3).tolist() == [1.5, 3.0, 4.0, 4.5]
    found = smooth(np.array([nan, nan, nan, 2.0, nan, 4.0]), 3)
    assert np.isnan(found[:2]).all() and found[2:].tolist() == [2.0, 2.0, 3.0, 4.0]
    assert [smoothing(count) for count in (0, 1, 19)] == [1, 1, 1]
    assert all(smoothing(count) % 2 == 1 and 3 <= smoothing(count) <= count / 5 for count in range(20, 2000))


def test_a_reward_of_a_single_part_is_not_drawn_twice() -> None:
    records = [step_record(step, parts={"answer": 0.5}) for step in (1, 2)]
    assert not [chart for chart in charts_of(records, **CHARTS) if chart.name.startswith("parts")]


@pytest.mark.parametrize("log", [False, True])
def test_a_band_is_as_far_below_the_mean_as_above_and_above_0_on_a_log_axis(log: bool) -> None:
    steps, values, spread = np.arange(3.0), np.array([4.0, 4.0, 4.0]), np.array([8.0, 8.0, 8.0])
    series = Series("a", PALETTE[0], steps, values, dots=True, spread=spread)
    axes = Figure().add_subplot()
    _draw_axes(axes, Chart(name="x", title="KL", caption="", series=(series,), log=log))
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert {round(float(height), 6) for height in heights} == {12.0, round(4 / 3, 6) if log else -4.0}


@pytest.mark.parametrize("labels", [["A", "B"], ["+ SEN + EQR"] * 7, ["a name of a run that is as long as a line"] * 3])
def test_a_legend_stays_within_its_picture_and_off_the_title(labels: list[str]) -> None:
    steps = np.arange(3.0)
    series = tuple(Series(label, color, steps, steps) for label, color in zip(labels, PALETTE, strict=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        axes = figure.add_subplot()
        _draw_axes(axes, Chart(name="x", title="Reward", caption="", series=series))
        figure.draw_without_rendering()
        legend = axes.get_legend()
        assert legend is not None
        box, above = legend.get_window_extent(), axes._left_title.get_window_extent()  # type: ignore[attr-defined]
    assert box.x1 <= SIZE[0] * DPI and box.y1 <= above.y0
    assert axes.get_window_extent().width > 0.75 * SIZE[0] * DPI
