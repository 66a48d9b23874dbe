"""Runs with rollout.partial whose episodes wait for others at the end of a step, call, score, fold and branch; models
with adapters or states; several updates per step. Each resumes after a kill with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import train_cases
from folding_cases import OWN
from partial_cases import STEPS, also, versions_of
from train_cases import Make, assert_same_run, sampled, steps_of, train_killed, write_inputs

from thresher.engine.config.recipe import Recipe
from thresher.engine.training.train import train
from thresher.policy.config import DeltaShape
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question

CALLING = """
from dataclasses import dataclass

from thresher.engine.episode import (
    BranchPrompt, Generate, KeptSpan, Prompt, Retrieved, Score, SubCall, System, pair_tags
)
from thresher.rewards.papers.search import search_r1_reward


@dataclass(frozen=True, kw_only=True)
class Options:
    trained: bool = True


def system(options):
    def episode(question, config):
        prompt = Prompt(config.template, question.question)
        yield prompt
        for _ in range(config.max_turns - 1):
            turn = yield Generate(("</search>", "</answer>"), 20)
            if turn.stopped_at("</answer>"):
                break
            (first, *_) = yield Score("<answer>", question.golds[0])
            kept = (KeptSpan(0, 9),) if first < -1 else ()
            read = yield SubCall(BranchPrompt(prompt, kept, ("</answer>",), 24), options.trained)
            yield Retrieved(read.text.decode("utf-8", "replace"), "<information>", "</information>")
        yield Score(BranchPrompt(prompt, (), ("</answer>",)), question.golds[-1])
        return "answered"

    def reward(attempt):
        return search_r1_reward(attempt.pieces, attempt.golds)

    return System("calling", pair_tags("search", "information", "answer"), episode, reward, "{question}")
"""


def assert_goes_on(recipe: Recipe, folder: Path, after: int = 2) -> Path:
    """Check that a run killed after a step resumes to the bits of an uninterrupted one; return the latter."""
    train(recipe, folder / "whole")
    train_killed(recipe, folder / "killed", after)
    train(recipe, folder / "killed", resume=True)
    assert_same_run(folder / "killed", folder / "whole")
    return folder / "whole"


def changed_within_a_turn(run: Path) -> int:
    """Return the number of turns that several versions drew."""
    return sum(len(versions) > 1 for step in steps_of(run) for versions in versions_of(run, step["step"]))


CASES: dict[str, dict[str, Any]] = {
    "adapters": {"lora": {"rank": 4}},
    "updates, evaluations, drafts": {
        "grpo": {"updates_per_batch": 2, "epochs_per_batch": 2},
        "run": {"eval_every": 1},
        "rollout": {"num_draft_tokens": 3},
    },
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_it_goes_on(make_recipe: Make, tmp_path: Path, case: str) -> None:
    run = assert_goes_on(make_recipe(**also(**CASES[case])), tmp_path)
    assert changed_within_a_turn(run)


@pytest.mark.slow
def test_calls_and_scores(make_recipe: Make, tmp_path: Path) -> None:
    (tmp_path / "calling.py").write_text(CALLING)
    changes = also(system={"name": str(tmp_path / "calling.py"), "template": None}, rollout={"max_passage_tokens": 60})
    run = assert_goes_on(make_recipe(**changes), tmp_path)
    records = [record for step in range(1, STEPS + 1) for record in sampled(run, step)]
    assert sum("call 1" in record.get("branches", {}) for record in records) > 5 and changed_within_a_turn(run)
    assert all(record["scores"] for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["folding", "calling"])
def test_trees(make_recipe: Make, tmp_path: Path, file: str) -> None:
    (tmp_path / "own.py").write_text(OWN if file == "folding" else CALLING)
    trees = {"trees": 2, "tree_nodes": 1, "group_size": 6, "max_passage_tokens": 60}
    grpo = {"advantage": "tree", "aggregation": "token"}
    changes = also(rollout=trees, grpo=grpo, system={"name": str(tmp_path / "own.py"), "template": None})
    run = assert_goes_on(make_recipe(**changes), tmp_path)
    steps = steps_of(run)
    assert any(step["forks"] for step in steps) and sum(step["staleness_mean"] for step in steps) > 0


@pytest.mark.slow
def test_layers_with_states(
    make_recipe: Make,
    tiny_tokenizer: Tokenizer,
    tiny_questions: list[Question],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    types = {"layer_types": ("linear_attention", "full_attention"), "delta": DeltaShape(2, 4, 8, 16, 4)}
    shape = {"model_type": "qwen3_5_text", "head_dim": 16, "partial_rotary_factor": 0.5, **types}
    narrow = train_cases.make_config
    monkeypatch.setattr(train_cases, "make_config", lambda **changes: narrow(**shape, **changes))
    write_inputs(tmp_path, tiny_tokenizer, tiny_questions)
    run = assert_goes_on(make_recipe(**also(model={"path": str(tmp_path / "model")})), tmp_path)
    assert changed_within_a_turn(run)
