"""The training loop: the contents of a step, and records that agree with what happened."""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stored_cases import stored
from train_cases import DEV, GROUPS, SAMPLES, STEPS, Make, metrics, sampled, steps_of, steps_saved, untimed

from thresher.common import console
from thresher.common.console import Stage
from thresher.common.errors import UserError
from thresher.engine.assemble import load_questions, load_retrieval, load_run_context
from thresher.engine.decoding.decoder import Decoder
from thresher.engine.evaluation.evaluate import evaluate
from thresher.engine.evaluation.metrics import measured, summary_of
from thresher.engine.reports.token_view import policy_counts
from thresher.engine.store.token_stats import read_token_stats
from thresher.engine.training.train import train
from thresher.engine.training.update import Updater
from thresher.retrieval.questions import Question


def test_a_run_learns_something_and_writes_everything_down(uninterrupted: Path, base: dict[str, Any]) -> None:
    names = sorted(str(path.relative_to(uninterrupted)) for path in uninterrupted.rglob("*") if path.is_file())
    model = ("config.json", "generation_config.json", "hashes.json", "model.safetensors")
    files = (*model, "optimizer.safetensors", "state.json")
    assert names == [
        ".lock",
        *(f"checkpoints/step_{step:06d}/{file}" for step in (2, 4) for file in (*files, "tokenizer.json")),
        *(f"evaluations/step_{step:06d}.jsonl" for step in (0, 2, 4)),
        "metrics.jsonl",
        "recipe.toml",
        "starts.jsonl",
        "summary.json",
        *(f"trajectories/step_{step:06d}.{kind}" for step in (1, 2, 3, 4) for kind in ("jsonl", "safetensors")),
    ]
    start = json.loads((uninterrupted / "starts.jsonl").read_text())
    assert start["step"] == 0 and {"at", "commit", "machine", "gpu", "torch"} < start.keys()
    order = [(record["step"], "eval" in record) for record in metrics(uninterrupted)]
    assert order == [(0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    start = load_file(Path(base["model"]["path"]) / "model.safetensors")
    end = load_file(uninterrupted / "checkpoints" / "step_000004" / "model.safetensors")
    assert not torch.equal(start["model.embed_tokens.weight"], end["model.embed_tokens.weight"])


def test_the_progress_of_rollout_and_update_can_be_polled(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`console.polling` gets a function, which is called here in each forward of the decoder and each micro-batch."""
    asked: list[Callable[[], Stage | None]] = []
    heard: list[Stage | None] = []

    def polling(ask: Callable[[], Stage | None]) -> AbstractContextManager[None]:
        asked.append(ask)
        return nullcontext()

    def asking(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def ask_first(*arguments: Any, **options: Any) -> Any:
            heard.append(asked[0]())
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, ask_first)

    monkeypatch.setattr(console, "polling", polling)
    asking(Decoder, "step")
    asking(Updater, "_train_micro_batch")
    train(make_recipe(run={"steps": 1, "eval_every": None}), tmp_path / "run")
    of_update = [stage for stage in heard if stage is not None and stage.label == "update"]
    of_rollout = [stage for stage in heard if stage is not None and stage.label == "rollout"]
    assert len(heard) == len(of_update) + len(of_rollout)
    assert [(stage.done, stage.total) for stage in of_update] == [(n, len(of_update)) for n in range(len(of_update))]
    assert of_update and GROUPS * SAMPLES in {stage.total for stage in of_rollout}
    assert max(stage.done for stage in of_rollout) > 0 and "searches" in of_rollout[-1].text
    assert asked[0]() is None


def test_the_metrics_of_a_step_are_those_of_its_trajectories(uninterrupted: Path) -> None:
    for record in steps_of(uninterrupted):
        entries = sampled(uninterrupted, record["step"])
        assert len(entries) == record["questions"] == GROUPS * SAMPLES
        said = [segment for entry in entries for segment in entry["segments"] if segment["source"] == "policy"]
        tokens = sum(len(segment["ids"]) for segment in said)
        assert record["loss_tokens"] == record["sampled_tokens"] == tokens
        waiting = os.environ.get("OMP_WAIT_POLICY") or os.environ.get("GOMP_SPINCOUNT")
        assert (record["threads"], record["wait_policy"]) == (1, waiting)
        sums = {
            "response_tokens": tokens,
            "reward": sum(entry["reward"] for entry in entries),
            "em": sum(entry["parts"]["em"] for entry in entries),
            "searches": sum(len(entry["searches"]) for entry in entries),
        }
        assert {name: record[name] for name in sums} == pytest.approx({n: x / len(entries) for n, x in sums.items()})
        assert sum(record["reasons"].values()) == len(entries)
        path = uninterrupted / "trajectories" / f"step_{record['step']:06d}.safetensors"
        found = read_token_stats(path, *policy_counts(entries))
        assert found is not None
        values = {name: np.concatenate([each.values[name] for each in found]).astype(float) for name in found[0].values}
        d = values["recomputed"] - values["reference"]
        assert record["kl_k2"] == pytest.approx((d * d / 2).mean(), rel=1e-4, abs=1e-9)
        assert record["entropy"] == pytest.approx(values["entropy"].mean(), rel=1e-3)
        assert record["clipped"] == values["clipped"].mean()
        assert np.isfinite(values["gradient"]).all() and values["gradient"].any()
        gap = abs(values["recomputed"] - values["sampled"])
        assert record["logprob_gap_max"] == pytest.approx(gap.max(), rel=1e-2, abs=1e-8)
        rewards = [{entry["reward"] for entry in entries if entry["group"] == group} for group in range(GROUPS)]
        signals = {entry["group"] for entry in entries if entry["advantage"] != 0}
        assert record["zero_advantage_groups"] == sum(len(one) == 1 for one in rewards) == GROUPS - len(signals)
        assert record["lr"] == 1e-3 and 0 < record["grad_norm"] < 1e3
    assert any(record["zero_advantage_groups"] < GROUPS for record in steps_of(uninterrupted))


def test_the_first_update_is_on_policy_and_at_its_reference(uninterrupted: Path) -> None:
    first, second = steps_of(uninterrupted)[:2]
    for record in (first, second):
        assert record["logprob_gap_max"] < 1e-4 and record["logprob_gap"] < 1e-5
        assert record["ratio"] == pytest.approx(1, abs=1e-5) and record["clipped"] == 0 and record["capped"] == 0
    assert first["kl_k1"] == first["kl_k2"] == first["kl_k3"] == 0
    assert second["kl_k2"] > 0 and second["kl_k3"] > 0
    assert first["kl_largest"] == first["kl_coefficient_largest"] == 0
    # k2 is d squared, halved, and the coefficient is d, of the same token; no mean exceeds it.
    assert second["kl_largest"] == pytest.approx(second["kl_coefficient_largest"] ** 2 / 2)
    assert second["kl_largest"] > second["kl_k2"]


@pytest.mark.parametrize("step", [0, 4])
def test_an_evaluation_asks_every_question_once_and_greedily_of_the_weights_of_its_step(
    uninterrupted: Path, make_recipe: Make, tiny_questions: list[Question], step: int
) -> None:
    written = stored(uninterrupted / f"evaluations/step_{step:06d}.jsonl")
    assert [entry["id"] for entry in written] == [question.id for question in tiny_questions[:DEV]]
    recipe = make_recipe()
    parts = load_run_context(recipe, uninterrupted / f"checkpoints/step_{step:06d}" if step else None)
    judged = evaluate(parts.rollout(load_retrieval(recipe, parts.system)), load_questions(recipe, parts.system)[1])
    assert [entry.to_dict(parts.tokenizer) for entry in judged] == written
    (record,) = (record["eval"] for record in metrics(uninterrupted) if record["step"] == step and "eval" in record)
    assert untimed(record) == untimed(summary_of(measured(judged, parts.system.tags))) | {"cut_passages": 0}


def test_the_summary_has_these_keys(uninterrupted: Path) -> None:
    summary = json.loads((uninterrupted / "summary.json").read_text())
    rates = {"rollout_tokens_per_s": ("sampled", "rollout"), "train_tokens_per_s": ("train", "update")}
    measures = ["em_before", "em_after", "f1_before", "f1_after"]
    others = ["seed", "steps", "tokens_spent", "metrics", "digest"]
    assert list(summary) == [*measures, "questions", "seconds", *rates, *others]
    evaluations = [record["eval"] for record in metrics(uninterrupted) if "eval" in record]
    assert [summary[name] for name in measures] == [evaluations[at][name] for name in ("em", "f1") for at in (0, -1)]
    assert (summary["questions"], summary["seed"], summary["steps"]) == (DEV, 3, STEPS)
    for rate, (tokens, spent) in rates.items():
        total, seconds = (
            sum(r[key] for r in steps_of(uninterrupted)) for key in (f"{tokens}_tokens", f"{spent}_seconds")
        )
        assert summary[rate] == pytest.approx(total / seconds) and summary["seconds"] > seconds


def test_search_r1_trains_in_two_updates_a_batch(tmp_path: Path, make_recipe: Make) -> None:
    grpo = {"updates_per_batch": 2, "entropy_coef": 0.1}
    out = tmp_path / "run"
    train(make_recipe(system={"name": "search_r1"}, grpo=grpo, run={"steps": 1}), out)
    (record,) = steps_of(out)
    entries = sampled(out, 1)
    assert set(entries[0]["parts"]) == {"answer", "em", "f1", "answered", "searches"}
    said = sum(len(s["ids"]) for entry in entries for s in entry["segments"] if s["source"] == "policy")
    assert record["loss_tokens"] == said  # whole groups, each in one of the updates
    optimizer = load_file(out / "checkpoints" / "step_000001" / "optimizer.safetensors")
    assert {float(value) for name, value in optimizer.items() if name.endswith(".step")} == {2.0}
    # The gap is that of the first update, which is on policy; in the second the policy differs from the sampling one.
    assert 0 < record["logprob_gap"] <= record["logprob_gap_max"] < 1e-4
    # The policy equals its reference in the first update, but not in the second.
    assert 0 < record["kl_k3"] < record["kl_largest"] and record["kl_coefficient_largest"] > 0


@pytest.mark.slow
def test_a_best_metric_that_nothing_measures_is_refused_at_the_first_evaluation(
    tmp_path: Path, make_recipe: Make
) -> None:
    with pytest.raises(UserError, match=r"run\.best_metric is 'exact', which no evaluation measures; .* reward, em,"):
        train(make_recipe(run={"best_metric": "exact"}), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_shuffled_rewards_stay_in_their_group(tmp_path: Path, make_recipe: Make) -> None:
    shuffled, plain = tmp_path / "shuffled", tmp_path / "plain"
    one_step = {"run": {"steps": 1}, "rollout": {"group_size": 8}}
    train(make_recipe(grpo={"shuffle_rewards": True}, **one_step), shuffled)
    train(make_recipe(**one_step), plain)
    moved = 0
    for group in range(GROUPS):
        here, there = ([e for e in sampled(run, 1) if e["group"] == group] for run in (shuffled, plain))
        for key in ("segments", "reward"):  # rewards are stored as they were earned
            assert [entry[key] for entry in here] == [entry[key] for entry in there]
        given, earned = ([entry["advantage"] for entry in part] for part in (here, there))
        assert sorted(given) == sorted(earned)
        moved += given != earned
    assert moved


def test_without_a_signal_nothing_is_updated_if_so_asked(
    tmp_path: Path, make_recipe: Make, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"id": "1", "question": "What is the spouse of Mia Noor?", "golden_answers": ["no one can say this"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(line) + "\n")
    data = {"train": str(tmp_path / "questions.jsonl"), "dev": str(tmp_path / "questions.jsonl")}
    # Sums that differ only by rounding are one reward.
    rounded = [0.3, 0.1 + 0.2] * (GROUPS * SAMPLES // 2)
    monkeypatch.setattr("thresher.engine.training.step.shuffled_rewards", lambda *_: rounded)
    start = load_file(Path(base["model"]["path"]) / "model.safetensors")
    for shuffle in (False, True):
        out = tmp_path / str(shuffle)
        grpo = {"drop_zero_advantage": True, "shuffle_rewards": shuffle}
        summary = train(make_recipe(data=data, grpo=grpo, run={"steps": 1}), out)
        (record,) = steps_of(out)
        assert record["zero_advantage_groups"] == GROUPS  # three times the same question is three groups
        assert (record["train_tokens"], record["loss_tokens"]) == (0, 0) and "loss" not in record
        assert summary["train_tokens_per_s"] is None
        end = load_file(out / "checkpoints" / "step_000001" / "model.safetensors")
        assert all(torch.equal(start[name], end[name]) for name in start)


# After one step the policy is off its reference by more than 1e-6; 1e25 times that, squared, exceeds float32. Weights
# of 1e38 make products that exceed it too, in the next step or in the second update of this one.
WILD = {"lr": 1e38, "max_grad_norm": float("inf")}


@pytest.mark.parametrize(
    ("change", "step", "what"),
    [
        ({"grpo": {"beta": 1e25}}, 2, "gradient"),
        ({"optim": WILD}, 2, "policy"),
        ({"optim": WILD, "grpo": {"updates_per_batch": 2}}, 1, "policy"),
    ],
    ids=["gradient", "policy", "second update"],
)
def test_a_run_that_diverges_ends_in_a_sentence(
    tmp_path: Path, make_recipe: Make, change: dict[str, Any], step: int, what: str
) -> None:
    with pytest.raises(UserError, match=rf"step {step}: the {what} is not finite; start again with a lower optim\.lr"):
        train(make_recipe(**change), tmp_path / "run")
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(step))
    assert steps_saved(tmp_path / "run") == []
