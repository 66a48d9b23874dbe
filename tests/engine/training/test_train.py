"""The training loop: what a step is made of, and that what is written down is what happened."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stored_cases import stored
from train_cases import (
    DEV,
    GROUPS,
    SAMPLES,
    STEPS,
    metrics,
    sampled,
    single_threaded,
    untimed,
)

from thresher.common import console
from thresher.common.console import Stage
from thresher.common.errors import UserError
from thresher.engine.assemble import load_questions, load_retrieval, load_run_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.decoding.decoder import Decoder
from thresher.engine.evaluation.evaluate import evaluate
from thresher.engine.evaluation.metrics import measured, summary_of
from thresher.engine.reports.token_view import policy_counts
from thresher.engine.store.token_stats import read_token_stats
from thresher.engine.training.train import train
from thresher.engine.training.update import Updater
from thresher.retrieval.questions import Question


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


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
    records = metrics(uninterrupted)
    assert [(record["step"], "eval" in record) for record in records] == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
    ]
    start = load_file(Path(base["model"]["path"]) / "model.safetensors")
    end = load_file(uninterrupted / "checkpoints" / "step_000004" / "model.safetensors")
    assert not torch.equal(start["model.embed_tokens.weight"], end["model.embed_tokens.weight"])


def test_a_line_that_asks_hears_how_far_rollout_and_update_are(
    tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`console.polling` is given what to ask; here it is asked in each forward of the decoder and each micro-batch."""
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
    asking(Updater, "_backward")
    train(make_recipe(run={"steps": 1, "eval_every": None}), tmp_path / "run")
    of_update = [stage for stage in heard if stage is not None and stage.label == "update"]
    of_rollout = [stage for stage in heard if stage is not None and stage.label == "rollout"]
    assert len(heard) == len(of_update) + len(of_rollout)
    assert [(stage.done, stage.total) for stage in of_update] == [(n, len(of_update)) for n in range(len(of_update))]
    assert of_update and GROUPS * SAMPLES in {stage.total for stage in of_rollout}
    assert max(stage.done for stage in of_rollout) > 0 and "searches" in of_rollout[-1].text
    assert asked[0]() is None


def test_the_metrics_of_a_step_are_those_of_its_trajectories(uninterrupted: Path) -> None:
    for record in (record for record in metrics(uninterrupted) if "eval" not in record):
        entries = sampled(uninterrupted, record["step"])
        assert len(entries) == record["questions"] == GROUPS * SAMPLES
        said = [segment for entry in entries for segment in entry["segments"] if segment["source"] == "policy"]
        tokens = sum(len(segment["ids"]) for segment in said)
        assert record["loss_tokens"] == record["sampled_tokens"] == tokens
        assert (record["threads"], record["wait_policy"]) == (1, os.environ.get("OMP_WAIT_POLICY"))
        assert record["response_tokens"] == pytest.approx(tokens / len(entries))
        assert record["reward"] == pytest.approx(sum(entry["reward"] for entry in entries) / len(entries))
        assert record["em"] == pytest.approx(sum(entry["parts"]["em"] for entry in entries) / len(entries))
        searches = sum(len(entry["searches"]) for entry in entries)
        assert record["searches"] == pytest.approx(searches / len(entries))
        assert sum(record["reasons"].values()) == len(entries)
        found = read_token_stats(
            uninterrupted / "trajectories" / f"step_{record['step']:06d}.safetensors", *policy_counts(entries)
        )
        assert found is not None
        values = {
            name: np.concatenate([each.values[name] for each in found]).astype(np.float64) for name in found[0].values
        }
        d = values["recomputed"] - values["reference"]
        assert record["kl_k2"] == pytest.approx((d * d / 2).mean(), rel=1e-4, abs=1e-9)
        assert record["entropy"] == pytest.approx(values["entropy"].mean(), rel=1e-3)
        assert record["clipped"] == values["clipped"].mean()
        gap = abs(values["recomputed"] - values["sampled"])
        assert record["logprob_gap_max"] == pytest.approx(gap.max(), rel=1e-2, abs=1e-8)
        rewards = [{entry["reward"] for entry in entries if entry["group"] == group} for group in range(GROUPS)]
        assert record["zero_advantage_groups"] == sum(len(values) == 1 for values in rewards)
        signals = {entry["group"] for entry in entries if entry["advantage"] != 0}
        assert record["zero_advantage_groups"] == GROUPS - len(signals)
        assert record["lr"] == 1e-3
        assert 0 < record["grad_norm"] < 1e3
    assert any(record.get("zero_advantage_groups", GROUPS) < GROUPS for record in metrics(uninterrupted))


def test_the_first_update_is_on_policy_and_at_its_reference(uninterrupted: Path) -> None:
    first, second = (record for record in metrics(uninterrupted) if "eval" not in record and record["step"] <= 2)
    for record in (first, second):
        assert record["logprob_gap_max"] < 1e-4 and record["logprob_gap"] < 1e-5
        assert record["ratio"] == pytest.approx(1, abs=1e-5) and record["clipped"] == 0 and record["capped"] == 0
    assert first["kl_k1"] == first["kl_k2"] == first["kl_k3"] == 0
    assert second["kl_k2"] > 0 and second["kl_k3"] > 0
    assert first["kl_largest"] == first["kl_coefficient_largest"] == 0
    # k2: d squared, halved, and d, of the same token; no mean is above it.
    assert second["kl_largest"] == pytest.approx(second["kl_coefficient_largest"] ** 2 / 2)
    assert second["kl_largest"] > second["kl_k2"]


@pytest.mark.parametrize("step", [0, 4])
def test_an_evaluation_asks_every_question_once_and_greedily_of_the_weights_of_its_step(
    uninterrupted: Path, make_recipe: Callable[..., Recipe], tiny_questions: list[Question], step: int
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
    assert list(summary) == [
        "em_before",
        "em_after",
        "f1_before",
        "f1_after",
        "questions",
        "seconds",
        "rollout_tokens_per_s",
        "train_tokens_per_s",
        "seed",
        "steps",
        "metrics",
        "digest",
    ]
    evaluations = [record["eval"] for record in metrics(uninterrupted) if "eval" in record]
    steps = [record for record in metrics(uninterrupted) if "eval" not in record]
    assert (summary["em_before"], summary["em_after"]) == (evaluations[0]["em"], evaluations[-1]["em"])
    assert (summary["f1_before"], summary["f1_after"]) == (evaluations[0]["f1"], evaluations[-1]["f1"])
    assert (summary["questions"], summary["seed"], summary["steps"]) == (DEV, 3, STEPS)
    spent = sum(record["rollout_seconds"] for record in steps)
    assert summary["rollout_tokens_per_s"] == pytest.approx(sum(r["sampled_tokens"] for r in steps) / spent)
    spent = sum(record["update_seconds"] for record in steps)
    assert summary["train_tokens_per_s"] == pytest.approx(sum(r["train_tokens"] for r in steps) / spent)
    assert summary["seconds"] > spent


def test_search_r1_trains_in_two_updates_a_batch(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    out = tmp_path / "run"
    recipe = make_recipe(
        system={"name": "search_r1"}, grpo={"updates_per_batch": 2, "entropy_coef": 0.1}, run={"steps": 1}
    )
    train(recipe, out)
    (record,) = (record for record in metrics(out) if "eval" not in record)
    entries = sampled(out, 1)
    assert set(entries[0]["parts"]) == {"answer", "em", "f1", "answered", "searches"}
    said = sum(len(s["ids"]) for entry in entries for s in entry["segments"] if s["source"] == "policy")
    assert record["loss_tokens"] == said  # whole groups, each of them in one of the updates
    optimizer = load_file(out / "checkpoints" / "step_000001" / "optimizer.safetensors")
    assert {float(value) for name, value in optimizer.items() if name.endswith(".step")} == {2.0}
    # Of the first update, which is on policy; the policy of the second is no longer the one that sampled.
    assert 0 < record["logprob_gap"] <= record["logprob_gap_max"] < 1e-4
    # It was at its reference in the first update, and off it in the second.
    assert 0 < record["kl_k3"] < record["kl_largest"] and record["kl_coefficient_largest"] > 0


def test_shuffled_rewards_stay_in_their_group(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    shuffled, plain = tmp_path / "shuffled", tmp_path / "plain"
    one_step = {"run": {"steps": 1}, "rollout": {"group_size": 8}}
    train(make_recipe(grpo={"shuffle_rewards": True}, **one_step), shuffled)
    train(make_recipe(**one_step), plain)
    entries, honest = sampled(shuffled, 1), sampled(plain, 1)
    moved = 0
    for group in range(GROUPS):
        here = [entry for entry in entries if entry["group"] == group]
        there = [entry for entry in honest if entry["group"] == group]
        assert [entry["segments"] for entry in here] == [entry["segments"] for entry in there]
        assert [entry["reward"] for entry in here] == [entry["reward"] for entry in there]  # as they were earned
        given, earned = ([entry["advantage"] for entry in part] for part in (here, there))
        assert sorted(given) == sorted(earned)
        moved += given != earned
    assert moved


def test_without_a_signal_nothing_is_updated_if_so_asked(
    tmp_path: Path, make_recipe: Callable[..., Recipe], base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"id": "1", "question": "What is the spouse of Mia Noor?", "golden_answers": ["no one can say this"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(line) + "\n")
    data = {"train": str(tmp_path / "questions.jsonl"), "dev": str(tmp_path / "questions.jsonl")}
    recipe = make_recipe(data=data, grpo={"drop_zero_advantage": True}, run={"steps": 1})
    summary = train(recipe, tmp_path / "run")
    (record,) = (record for record in metrics(tmp_path / "run") if "eval" not in record)
    assert record["zero_advantage_groups"] == GROUPS  # three times the same question is three groups
    assert (record["train_tokens"], record["loss_tokens"]) == (0, 0) and "loss" not in record
    assert summary["train_tokens_per_s"] is None
    # Sums that only rounding tells apart are one reward.
    rounded = [0.3, 0.1 + 0.2] * (GROUPS * SAMPLES // 2)
    monkeypatch.setattr("thresher.engine.training.step.shuffled_rewards", lambda *_: rounded)
    grpo = {"drop_zero_advantage": True, "shuffle_rewards": True}
    train(make_recipe(data=data, grpo=grpo, run={"steps": 1}), tmp_path / "rounded")
    (record,) = (record for record in metrics(tmp_path / "rounded") if "eval" not in record)
    assert record["zero_advantage_groups"] == GROUPS and record["loss_tokens"] == 0
    start = load_file(Path(base["model"]["path"]) / "model.safetensors")
    end = load_file(tmp_path / "run" / "checkpoints" / "step_000001" / "model.safetensors")
    assert all(torch.equal(start[name], end[name]) for name in start)


# After one step the policy is off its reference by more than 1e-6, which 1e25 times as large and squared is no float32;
# weights of 1e38 make products that are none.
@pytest.mark.parametrize(
    ("change", "what"),
    [({"grpo": {"beta": 1e25}}, "gradient"), ({"optim": {"lr": 1e38, "max_grad_norm": float("inf")}}, "policy")],
)
def test_a_run_that_diverges_ends_in_a_sentence(
    tmp_path: Path, make_recipe: Callable[..., Recipe], change: dict[str, Any], what: str
) -> None:
    with pytest.raises(UserError, match=f"step 2: the {what} is not finite; start again with a lower optim.lr"):
        train(make_recipe(**change), tmp_path / "run")
    assert [record["step"] for record in metrics(tmp_path / "run")] == [0, 1]


def test_a_second_update_that_diverges_ends_in_the_same_sentence(
    tmp_path: Path, make_recipe: Callable[..., Recipe]
) -> None:
    change = {"grpo": {"updates_per_batch": 2}, "optim": {"lr": 1e38, "max_grad_norm": float("inf")}}
    with pytest.raises(UserError, match=r"step 1: the policy is not finite; start again with a lower optim\.lr"):
        train(make_recipe(**change), tmp_path / "run")
