"""Runs whose trajectories fold and have a trained branch with its own reward: what is trained, stored and shown."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_invariance import needs_invariant_policy
from browser import run_page
from folding_cases import OWN
from train_cases import Make, assert_same_run, sampled, steps_of, train_killed

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.reports.pages import parts_of
from thresher.engine.reports.token_view import policy_counts, write_token_view
from thresher.engine.store.token_stats import TokenStats, read_token_stats
from thresher.engine.training.train import train
from thresher.policy.model import load_policy


@pytest.fixture(scope="module")
def folding(make_recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)

    def make(**changes: dict[str, Any]) -> Recipe:
        system = {"name": str(file), "template": None} | changes.pop("system", {})
        return make_recipe(system=system, **changes)

    return make


@pytest.fixture(scope="module")
def run(folding: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("folded") / "run"
    train(folding(), out)
    return out


def own_tokens(record: dict[str, Any]) -> int:
    return sum(len(segment["ids"]) for segment in record["segments"] if segment["source"] == "policy")


def stats_of(run: Path, step: int) -> tuple[list[dict[str, Any]], list[TokenStats]]:
    records = sampled(run, step)
    stats = read_token_stats(run / "trajectories" / f"step_{step:06d}.safetensors", *policy_counts(records))
    assert stats is not None
    return records, stats


def test_every_sampled_token_of_all_contexts_is_trained_once(run: Path) -> None:
    folds = 0
    for step in steps_of(run):
        records, stats = stats_of(run, step["step"])
        assert step["loss_tokens"] == step["sampled_tokens"] == sum(len(one.values["sampled"]) for one in stats)
        for record, one in zip(records, stats, strict=True):
            folds += [segment["source"] for segment in record["segments"]].count("prompt") - 1
            assert record["trained_branches"] == ["again"] == list(record["branches"])
            assert not len(one.branches)
            # Ids, positions and log-probs match: the update computes the log-probs recorded in sampling.
            assert np.abs(one.values["recomputed"] - one.values["sampled"]).max() < 1e-3
        assert step["logprob_gap_max"] < 1e-3
    assert folds > 10


def test_a_branch_has_the_advantage_of_its_own_reward(run: Path) -> None:
    """It is relative to the group's branches of that name, as for rewards of trajectories; the trunk keeps its own."""
    records, stats = stats_of(run, 1)
    groups: dict[int, list[tuple[dict[str, Any], np.ndarray]]] = {}
    for record, one in zip(records, stats, strict=True):
        own = own_tokens(record)
        np.testing.assert_array_equal(one.values["advantage"][:own], np.float32(record["advantage"]))
        groups.setdefault(record["group"], []).append((record, one.values["advantage"][own:]))
    differing = 0
    for group in groups.values():
        rewards = np.array([record["branch_rewards"]["again"] for record, _ in group])
        expected = (rewards - rewards.mean()) / (max(rewards.std(), 0.1) + 1e-6)
        for (record, found), wanted in zip(group, expected, strict=True):
            assert len(found) and set(found) == {found[0]} and found[0] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            differing += abs(wanted - record["advantage"]) > 0.1
    assert differing > 2


def test_without_a_reward_of_its_own_a_branch_has_the_trajectorys(
    folding: Callable[..., Recipe], tmp_path: Path
) -> None:
    options = {"system": {"options": {"rewarded": False}}, "run": {"steps": 1, "eval_every": None}}
    train(folding(**options), tmp_path / "run")
    records, stats = stats_of(tmp_path / "run", 1)
    assert all(
        "advantage" not in one.values and "branch_rewards" not in record
        for record, one in zip(records, stats, strict=True)
    )
    assert steps_of(tmp_path / "run")[0]["loss_tokens"] == sum(len(one.values["sampled"]) for one in stats)


def test_a_killed_run_goes_on_to_the_same_bits(folding: Callable[..., Recipe], run: Path, tmp_path: Path) -> None:
    train_killed(folding(), tmp_path / "run", 3)
    train(folding(), tmp_path / "run", resume=True)
    assert_same_run(run, tmp_path / "run")


def test_shared_beginnings_are_computed_once(run: Path, folding: Callable[..., Recipe], tmp_path: Path) -> None:
    """The contexts of a group begin with the question's prompt; without sharing each is computed completely."""
    needs_invariant_policy(load_policy(folding().model.path))
    train(folding(optim={"share_prefix": False}, run={"steps": 1, "eval_every": None}), tmp_path / "run")
    (whole,), (shared, *_) = steps_of(tmp_path / "run"), steps_of(run)
    assert whole["computed_tokens"] == whole["train_tokens"] == shared["train_tokens"] > shared["computed_tokens"]
    assert whole["loss"] == pytest.approx(shared["loss"], rel=1e-4, abs=1e-6)
    assert whole["grad_norm"] == pytest.approx(shared["grad_norm"], rel=1e-4)


def test_rewards_are_found_again_and_pages_show_the_contexts(
    run: Path, folding: Callable[..., Recipe], tmp_path: Path
) -> None:
    transcripts, system = run / "trajectories" / "step_000001.jsonl", folding().system
    assert system is not None
    command = ["score", "--system", system.name, "--transcripts", str(transcripts), "--out", str(tmp_path / "s.jsonl")]
    assert cli.run([*command, "--tokenizer", folding().model.path]) == 0
    again = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines() if '"reward"' in line]
    assert [one["reward"] for one in again[: len(sampled(run, 1))]] == [one["reward"] for one in sampled(run, 1)]
    page = write_token_view(run, "1", tmp_path / "t.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    samples = [sample for group in json.loads(found[1])["groups"] for sample in group["samples"]]
    assert all([name, trained] == ["again", True] for sample in samples for name, _, trained in sample["branches"])
    assert any("t" in [part[0] for part in sample["segments"][5:]] for sample in samples)
    folded = next(one for one in sampled(run, 1) if [part["source"] for part in one["segments"]].count("prompt") == 3)
    marks = [part for part in parts_of(folded["segments"], (), 10**6) if part.source == "prompt"]
    assert [chunk.text for part in marks for chunk in part.lines[0]] == [
        "folded: context 2 begins here",
        "folded: context 3 begins here",
    ]


PAGE = """
return document.querySelectorAll(".sample").map((sample) => {
  const rows = sample.querySelectorAll("span[data-at]").map((span) => {
    click(span);
    const [names, values] = [texts("#detail dt"), texts("#detail dd")], of = (name) => values[names.indexOf(name)];
    return [of("log-prob when drawn"), of("advantage"), of("log-prob in the update")];
  });
  const marks = sample.querySelectorAll("summary").map((node) => node.textContent);
  return { rows, marks, untrained: sample.querySelectorAll("span[data-b]").length };
});
"""


def test_the_pages_script_shows_all_values_of_all_contexts(run: Path, tmp_path: Path) -> None:
    """Each token's own value, in order: those of the later contexts, and of the branch after them."""
    page = write_token_view(run, "1", tmp_path / "t.html").read_text(encoding="utf-8")
    records, stats = stats_of(run, 1)
    shown = run_page(page, PAGE, address="#g=0&s=0&c=logprob&f=all")
    assert len(shown) == 4

    def number(text: str) -> float:
        return float(text.replace("\u2212", "-"))

    for record, one, sample in zip(records, stats, shown, strict=False):
        assert not sample["untrained"] and "branch again: trained" in sample["marks"]
        contexts = [part["source"] for part in record["segments"]].count("prompt")
        marks = [mark for mark in sample["marks"] if mark.startswith("folded")]
        assert marks == [f"folded: context {n} begins here" for n in range(2, contexts + 1)]
        assert len(sample["rows"]) == len(one.values["sampled"])
        for at, row in enumerate(sample["rows"]):
            for name, text in zip(("sampled", "advantage", "recomputed"), row, strict=True):
                assert number(text) == pytest.approx(float(one.values[name][at]), rel=6e-3, abs=6e-3), (at, name)


def test_a_reward_that_names_no_trained_branch_ends_the_run(folding: Callable[..., Recipe], tmp_path: Path) -> None:
    why = "has a value for the branch 'agian'; expected names of the trajectory's trained branches: again"
    cases = (
        ('{"agian": 1.0}', why),
        ('{name: float("nan") for name in told}', "has nan for the branch again; expected a"),
    )
    for number, (wrong, why) in enumerate(cases):
        file = tmp_path / "wrong.py"
        file.write_text(OWN.replace("told if options.rewarded else None", wrong))
        with pytest.raises(UserError, match=why):
            train(folding(system={"name": str(file)}), tmp_path / f"run{number}")
