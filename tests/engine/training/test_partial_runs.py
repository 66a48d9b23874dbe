"""Runs with rollout.partial: the groups of each step, the weights that drew each token, and exact repetition."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import run_page
from folding_cases import OWN
from partial_cases import GROUPS, PARTIAL, SAMPLES, STEPS, also, turns, versions_of
from train_cases import Killed, Make, assert_same_run, die_after, sampled, steps_of

from thresher.common.errors import UserError
from thresher.common.records import read_records
from thresher.engine.reports.report import write_report
from thresher.engine.reports.token_view import policy_counts, write_token_view
from thresher.engine.rollout.rollout import Group
from thresher.engine.store.token_stats import read_token_stats
from thresher.engine.training.partial import Queue, Taking
from thresher.engine.training.train import train

WHOLE = {**PARTIAL, "rollout": {"questions_per_step": GROUPS, "max_num_seqs": 6}}


@pytest.fixture(scope="module")
def partial_run(make_recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("partial") / "run"
    train(make_recipe(**PARTIAL), out)
    return out


def gaps_of(run: Path, step: int) -> list[np.ndarray]:
    """Return, for each trajectory, the distance between update and recorded log-prob of each sampled token."""
    stats = read_token_stats(run / f"trajectories/step_{step:06d}.safetensors", *policy_counts(sampled(run, step)))
    assert stats is not None
    return [np.abs(one.values["recomputed"] - one.values["sampled"]) for one in stats]


def test_groups_enter_in_the_order_of_their_numbers_and_every_token_tells_its_weights(
    make_recipe: Make, partial_run: Path, tmp_path: Path
) -> None:
    train(make_recipe(**WHOLE), tmp_path / "whole")
    stale = 0
    for step in range(1, STEPS + 1):
        records, whole = sampled(partial_run, step), sampled(tmp_path / "whole", step)
        places = [(number // SAMPLES, number % SAMPLES) for number in range(GROUPS * SAMPLES)]
        assert [(one["group"], one["sample"]) for one in records] == places
        assert [one["id"] for one in records] == [one["id"] for one in whole]
        for record in records:
            for turn in turns(record):
                versions = [version for version, _ in turn["versions"]]
                assert sum(count for _, count in turn["versions"]) == len(turn["ids"])
                assert versions == sorted(set(versions)) and step - 3 <= versions[0] <= versions[-1] <= step - 1
                stale += sum(count for version, count in turn["versions"] if version < step - 1)
    assert stale > 100
    # The first step's groups begin under the first weights, and other groups change no sample.
    first = [(one["segments"], one["advantage"]) for one in sampled(tmp_path / "whole", 1)]
    ours = [(without_versions(one["segments"]), one["advantage"]) for one in sampled(partial_run, 1)]
    assert ours == first


def without_versions(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in segment.items() if key != "versions"} for segment in segments]


def test_what_is_counted(make_recipe: Make, partial_run: Path) -> None:
    busy, split, again = 0, 0, 0
    for record in steps_of(partial_run):
        step = record["step"]
        runs = [run for one in sampled(partial_run, step) for turn in turns(one) for run in turn["versions"]]
        counts = [sum(n for version, n in runs if step - 1 - version == late) for late in range(3)]
        assert record["staleness_tokens"] == counts[: max(late for late in range(3) if counts[late]) + 1]
        assert record["staleness_mean"] == pytest.approx((counts[1] + 2 * counts[2]) / sum(counts))
        assert record["loss_tokens"] == sum(counts)
        assert 0 < record["slots_busy"] <= 1
        again += record["tokens_recomputed"]
        split += any(len(turn["versions"]) > 1 for one in sampled(partial_run, step) for turn in turns(one))
        busy += record["slots_busy"] > 0.8
    assert steps_of(partial_run)[0]["staleness_mean"] == steps_of(partial_run)[0]["tokens_recomputed"] == 0
    assert again > 0 and split and busy


def test_the_update_computes_what_was_recorded_where_the_weights_are_the_same(partial_run: Path) -> None:
    """A token of the newest weights has its own log-prob in the update. A stale one was drawn by other weights, with
    keys and values of others."""
    apart = 0.0
    for step in range(1, STEPS + 1):
        for record, gap in zip(sampled(partial_run, step), gaps_of(partial_run, step), strict=True):
            fresh = [n == step - 1 for turn in turns(record) for n, count in turn["versions"] for _ in range(count)]
            assert gap[np.array(fresh)].max(initial=0.0) < 1e-3
            apart = max(apart, gap[~np.array(fresh)].max(initial=0.0))
        assert steps_of(partial_run)[step - 1]["logprob_gap_max"] < 1e-3
    assert apart > 1e-2


@pytest.mark.slow
def test_the_pages_of_the_run(partial_run: Path, tmp_path: Path) -> None:
    text = write_report(partial_run, tmp_path / "report").read_text()
    assert "6 groups in flight; staleness at most 2" in text and "slots drew a token" in text
    pictures = {path.stem for path in (tmp_path / "report/plots").iterdir()}
    assert {"slots", "staleness", "staleness_tokens", "extra_tokens"} <= pictures
    page = write_token_view(partial_run, str(STEPS), tmp_path / "tokens.html").read_text()
    fresh = run_page(page, "return document.querySelectorAll('.fresh').length")
    assert 0 < fresh <= sum(len(versions) - 1 for versions in versions_of(partial_run, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 3, 5])
def test_a_killed_run_goes_on_to_the_same_bits(
    make_recipe: Make, partial_run: Path, tmp_path: Path, after: int
) -> None:
    with pytest.raises(Killed):
        train(make_recipe(**PARTIAL), tmp_path / "run", watch=die_after(after))
    saved = dict(read_records(tmp_path / f"run/checkpoints/step_{after - 1:06d}/unfinished.jsonl"))
    kept = [record for record in saved.values() if "group" in record]
    assert len(kept) == 4 and any(record["drawn"] for record in kept)
    train(make_recipe(**PARTIAL), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", partial_run)


@pytest.mark.slow
def test_a_run_repeats_with_any_number_of_threads(make_recipe: Make, partial_run: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    train(make_recipe(**also(run={"threads": 2})), tmp_path / "run")
    torch.set_num_threads(before)
    for step in range(1, STEPS + 1):
        assert list(versions_of(tmp_path / "run", step)) == list(versions_of(partial_run, step))


CASES: dict[str, dict[str, Any]] = {
    "trees": {
        "rollout": {"trees": 1, "tree_nodes": 1, "group_size": 3},
        "grpo": {"advantage": "tree", "aggregation": "token"},
    },
    "refilled": {"grpo": {"refill": True, "refill_rounds": 3}, "rollout": {"group_size": 2}},
    "preempted": {"rollout": {"kv_tokens": 512, "kv_block_size": 16}},
    "stale": {"rollout": {"stale_cache": True, "kv_tokens": 8192}, "run": {"save_every": 2, "steps": 6}},
    "recomputed": {"grpo": {"old_logprobs": "recomputed", "tis_level": "token"}},
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_all_of_it_together_survives_a_kill(make_recipe: Make, tmp_path: Path, case: str) -> None:
    recipe = make_recipe(**also(**CASES[case]))
    train(recipe, tmp_path / "whole")
    with pytest.raises(Killed):
        train(recipe, tmp_path / "killed", watch=die_after(3))
    train(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert any(record["staleness_mean"] > 0 for record in steps_of(tmp_path / "whole"))
    if case == "stale":  # tokens are prefilled again only after a checkpoint or an evaluation
        again = [record["tokens_recomputed"] for record in steps_of(tmp_path / "whole")]
        assert again[1] == again[5] == 0 and again[2] > 0 and again[3] > 0
    if case == "preempted":
        assert sum(record["preemptions"] for record in steps_of(tmp_path / "whole")) > 0


@pytest.mark.slow
def test_a_stale_cache_is_used_by_what_began_under_it_alone(make_recipe: Make, tmp_path: Path) -> None:
    train(make_recipe(**also(**CASES["stale"])), tmp_path / "run")
    stale, fresh = [0.0], [0.0]
    for step in (2, 5):  # after neither a checkpoint nor an evaluation; earlier groups continue, others begin
        records = sampled(tmp_path / "run", step)
        for record, gaps in zip(records, gaps_of(tmp_path / "run", step), strict=True):
            versions = [version for turn in turns(record) for version, count in turn["versions"] for _ in range(count)]
            own = gaps[np.array(versions) == step - 1]
            (fresh if versions[0] == step - 1 else stale).append(own.max(initial=0.0))
    assert max(fresh) < 1e-3 < 1e-2 < max(stale)


@pytest.mark.slow
def test_episodes_that_fold_and_branch_survive_a_kill(make_recipe: Make, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    recipe = make_recipe(**also(system={"name": str(tmp_path / "own.py"), "template": None}))
    train(recipe, tmp_path / "whole")
    with pytest.raises(Killed):
        train(recipe, tmp_path / "killed", watch=die_after(2))
    train(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    for step in steps_of(tmp_path / "whole"):
        records = sampled(tmp_path / "whole", step["step"])
        assert all("again" in record["branches"] for record in records)
        assert step["loss_tokens"] == sum(len(turn["ids"]) for record in records for turn in turns(record))


@pytest.mark.slow
def test_a_group_without_a_signal_gives_its_place_to_the_next(make_recipe: Make, tmp_path: Path) -> None:
    train(make_recipe(**also(**CASES["refilled"])), tmp_path / "run")
    ids = []
    for record in steps_of(tmp_path / "run"):
        own = sampled(tmp_path / "run", record["step"])
        ids += [one["id"] for one in own[::2]]
        signals = {one["group"] for one in own if one["advantage"]}
        assert record["zero_advantage_groups"] == GROUPS - len(signals)
        if record["refill_rounds"] < 3:
            assert len(signals) == GROUPS
    steps, last = steps_of(tmp_path / "run"), tmp_path / f"run/checkpoints/step_{STEPS:06d}/unfinished.jsonl"
    assert sum(record["refilled_groups"] for record in steps) > 0
    # Each sampled token is trained on or without a signal, set aside, or still in the queue.
    groups = [record for _, record in read_records(last) if "group" in record]
    kept = [turn for step in steps for one in sampled(tmp_path / "run", step["step"]) for turn in turns(one)]
    kept += [value for group in groups for _, kind, value in group["log"] if kind == "written"]
    kept += [value for group in groups for value in group["drawn"].values()]
    counted = sum(step["sampled_tokens"] - step["tokens_set_aside"] for step in steps)
    assert counted == sum(len(one["ids"]) for one in kept)
    train(make_recipe(**also(rollout={"group_size": 2}, run={"steps": 3 * STEPS})), tmp_path / "plain")
    order = [one["id"] for step in range(1, 3 * STEPS + 1) for one in sampled(tmp_path / "plain", step)[::2]]
    places = iter(order)
    assert all(question in places for question in ids)  # in the queue's order, with gaps


def test_a_refill_begins_no_group_that_would_be_too_old() -> None:
    """However groups end and whichever have a signal, no group is too old and each step is complete. A group enters a
    step at most `late` updates after the one in which it began."""
    draw = random.Random(0)
    for _ in range(300):
        count, late, rounds = draw.randrange(1, 4), draw.randrange(1, 4), draw.randrange(1, 5)
        share, queue, begun = draw.random(), Queue(), dict[int, int]()
        for step in range(12):
            taking = Taking(queue, count, count * (1 + late), count * rounds)
            taking.without_signal = {
                number for number in queue.groups if lacks_signal(number, share) and ended(queue, number)
            }
            while not taking.over():
                for number in taking.due():
                    queue.groups[number], begun[number] = Group([]), step
                number = draw.choice([number for number, group in queue.groups.items() if group.trajectories is None])
                queue.groups[number].trajectories = []
                taking.without_signal |= {number} if lacks_signal(number, share) else set()
                assert len(queue.groups) <= count * max(1 + late, rounds)
            taken, _ = taking.take()
            assert len(taken) == count and all(step - begun[number] <= late for number in taken)


def lacks_signal(number: int, share: float) -> bool:
    """Return whether a group has no signal."""
    return random.Random(number).random() < share


def ended(queue: Queue, number: int) -> bool:
    return queue.groups[number].trajectories is not None


def test_a_checkpoint_without_its_groups_is_refused(make_recipe: Make, tmp_path: Path) -> None:
    recipe = make_recipe(**also(run={"verify": False}))
    with pytest.raises(Killed):
        train(recipe, tmp_path / "run", watch=die_after(2))
    file = tmp_path / "run/checkpoints/step_000001/unfinished.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], '{"rank": 0, "group": 2, "log": [["0", "written", {}]], "drawn": {}}']) + "\n")
    with pytest.raises(UserError, match=r"unfinished.jsonl"):
        train(recipe, tmp_path / "run", resume=True)
    file.unlink()
    with pytest.raises(UserError, match=r"unfinished.jsonl: no such file, but a run with rollout.partial or"):
        train(recipe, tmp_path / "run", resume=True)
