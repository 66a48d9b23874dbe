"""Test `thresher bench rollout --shape tail` at tiny sizes: its counts equal those of planning/tail.py, or it stops."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thresher.bench import rollout_tail as module
from thresher.bench.rollout_sides import Written
from thresher.bench.rollout_tail import Played, TailSide, Way, check_counts, fit_seconds, measure_tail
from thresher.bench.settings import ROLLOUT_SHAPES, RolloutSetting, RolloutShape, Sizes, make_rollout_setting
from thresher.cli.main import run

SIZES = Sizes(num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=320)
TINY = RolloutShape(name="tail", sizes=SIZES, questions=2, group=2, question=18, turns=(30,))
FACTORS = (2, 3)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FACTORS", FACTORS), ("STEPS", 4), ("AROUND", 3)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(ROLLOUT_SHAPES, "tail", (TINY,))


@pytest.fixture(scope="module")
def setting() -> RolloutSetting:
    return make_rollout_setting(TINY)


@pytest.mark.parametrize("factor", (1, *FACTORS))
def test_every_rollout_has_the_counts_of_the_plan(setting: RolloutSetting, factor: int) -> None:
    side = TailSide(setting, reuse=False)
    played, counted = side.play(Way(factor)), side.count(factor)
    check_counts(played, counted)
    assert len(played.rollouts) == 10 and np.sum(played.rollouts, axis=0)[2] == sum(side.lengths)
    assert len(set(side.lengths)) > 1 and max(side.lengths) == 30
    assert max(age for ages in played.staleness for age in ages) == factor - 1
    again = sum(one.tokens_again for one in counted)
    assert (sum(played.recomputed) > again > 0) if factor > 1 else (sum(played.recomputed) == again == 0)
    mine = played.middle()
    assert mine.tolist() == np.sum(played.rollouts[3:7], axis=0).tolist() and mine[0] > 0
    stretches = np.sum(played.stretches, axis=0)  # from a rollout's first mark to its last, so all but its first step
    assert 0 < stretches[1] <= sum(one.decode_steps for one in counted)


@pytest.mark.slow
def test_shared_prompts_leave_the_tokens_as_they_are(setting: RolloutSetting) -> None:
    alone, side = TailSide(setting, reuse=False), TailSide(setting)
    for factor in (1, 2):
        of_both = [one.play(Way(factor)) for one in (alone, side)]
        first, second = (sum(one.staleness, Counter()).total() for one in of_both)
        assert first == second == sum(side.lengths)
        assert [one.ids() for one in alone.last] == [one.ids() for one in side.last]


@pytest.mark.parametrize("factor", FACTORS)
def test_a_stale_cache_prefills_nothing_again_and_draws_the_same_by_weights_that_stay(
    setting: RolloutSetting, factor: int
) -> None:
    side = TailSide(setting)
    first, second = ((side.play(Way(factor, stale)), side.last) for stale in (False, True))
    assert sum(first[0].recomputed) > 0 == sum(second[0].recomputed)
    assert second[0].middle()[3] < first[0].middle()[3]
    assert [one.ids() for one in first[1]] == [one.ids() for one in second[1]]
    assert sum(second[0].staleness, Counter()).total() == sum(side.lengths)


@pytest.mark.parametrize("column", [1, 2])
def test_other_counts_stop_the_bench(setting: RolloutSetting, column: int) -> None:
    side = TailSide(setting, reuse=False)
    played = side.play(Way(2))
    played.rollouts[4][column] += 1
    with pytest.raises(RuntimeError, match=r"rollout 4: .*; wrong results are not timed"):
        check_counts(played, side.count(2))
    played.rollouts[4][column] -= 1
    played.staleness[5] = Counter({0: played.staleness[5].total()})
    with pytest.raises(RuntimeError, match=r"rollout 5: .*; wrong results are not timed"):
        check_counts(played, side.count(2))


def test_a_sample_of_another_length_is_refused(setting: RolloutSetting) -> None:
    side = TailSide(setting)
    side.rollout.limits = replace(side.rollout.limits, max_turn_tokens=5)
    with pytest.raises(RuntimeError, match=r"expected a sample of \d+ tokens, got 5"):
        side.play(Way(1))


def test_seconds_are_fitted_to_counts() -> None:
    counts = np.array([(1, 3, 0), (1, 4, 10), (2, 8, 0), (3, 4, 7), (1, 1, 1)], np.float64)
    rows = [np.array([2.0 * a + 0.5 * b + 0.25 * c, a, b, c]) for a, b, c in counts]
    assert fit_seconds(rows).tolist() == pytest.approx([2.0, 0.5, 0.25])


@pytest.mark.slow
def test_a_row_for_each_number_in_flight(setting: RolloutSetting, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the seconds follow from the counts, both ratios equal the predicted one."""
    play, proved = TailSide.play, list[Written]()

    def timed(side: TailSide, way: Way) -> Played:
        played = play(side, way)
        for row in [*played.rollouts, *played.stretches]:
            row[0] = row[1:] @ np.array([2.0, 0.5, 0.25])
        played.cpu_seconds = [float(row[0]) for row in played.rollouts]
        return played

    monkeypatch.setattr(TailSide, "play", timed)
    kept: list[Any] = []
    rows = measure_tail(setting, 2, float("inf"), proved.extend, lambda *rows: kept.extend(rows))
    assert [row["rounds"] for row in kept] == [1] * 4, "rows of the first round"
    assert [(row["in_flight"], row["stale_cache"]) for row in rows] == [(4, False), (6, False), (4, True), (6, True)]
    assert {len(one.positions) for one in proved} <= set(TailSide(setting).lengths)
    for row, factor in zip(rows, FACTORS * 2, strict=True):
        seconds = {name: 2.0 * row[name]["decode_steps"] + 0.5 * row[name]["drawn"] for name in ("whole", "partial")}
        seconds = {name: spent + 0.25 * row[name]["prefilled"] for name, spent in seconds.items()}
        rates = {name: row[name]["drawn"] / spent for name, spent in seconds.items()}
        assert row["rounds"] == 2 and row["step_share"] == pytest.approx(2 / (2 + 0.5 * 4))
        assert row["whole"]["tokens_per_s"]["p50"] == pytest.approx(rates["whole"])
        ratio = rates["partial"] / rates["whole"]
        for found in (row["predicted_ratio"], row["ratio"]["p50"], row["cpu_ratio"]["p50"]):
            assert found == pytest.approx(ratio)
        counted = TailSide(setting).count(factor)[3:7]
        assert row["partial"]["counted_steps"] == sum(one.decode_steps for one in counted)
        assert (row["partial"]["recomputed"] == 0) is row["stale_cache"] and row["whole"]["recomputed"] == 0
        assert row["partial"]["busy"] > row["whole"]["busy"]


def test_the_shape_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "rollout", "--shape", "tail", "--threads", "1", "--budget", "1e-9"]
    assert run([*words, "--plot", str(tmp_path / "rows.png")]) == 2
    assert "tail has no peer; leave it out" in capsys.readouterr().err
    assert run([*words, "--out", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["shape"], row["rounds"], row["threads"]) for row in rows] == [("tail", 1, 1)] * 4
