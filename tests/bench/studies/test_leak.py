"""Test `thresher study leak`: the soft mask on a toy model, the contexts against the engine's branches, the command."""

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model_cases import make_config, stir
from stored_cases import stored

from thresher.bench.studies.leak import ANSWERS, CONTEXTS, UNFOUND, logprob, summary_of
from thresher.bench.studies.runs import load_task
from thresher.cli import main as cli
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.recipe import Recipe
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.rollout.contexts import branch_seed
from thresher.policy.model import Policy, init_policy

Script = Callable[..., None]
# nats between the log-probs of two forwards in float64, relative to logits of order 1: 2^-53 times some 1,000 sums
ROUNDING = 1e-12
# The spaces and letters beside the tags share tokens with them, or not: both are cut as in a branch.
WRITTEN = "Well. <reason>Carl Dorn or Anna Bell.</reason> so <extract>Anna Bell has mayor Carl Dorn.</extract>"


@torch.no_grad()
def scored(policy: Policy, ids: list[int], count: int, vocab_size: int) -> float:
    """Return the log-prob of the last `count` ids, from all logits of the policy's own causal attention."""
    logits_TV = policy.logits(torch.tensor(ids))[:, :vocab_size].double()
    return float(logits_TV.log_softmax(-1)[range(len(ids) - 1 - count, len(ids) - 1), ids[-count:]].sum())


@pytest.mark.parametrize("layers", [1, 2])
def test_a_soft_mask_leaks_from_the_second_layer_on(layers: int) -> None:
    """In the first layer, keys and values depend on their own token and position alone. Text after the masked span has
    seen it; text before it has not. All logits are of order 1, so a leak is far from rounding."""
    policy = stir(init_policy(make_config(num_hidden_layers=layers), 0)).double()
    draw = Random(layers)
    context, tail = ([draw.randrange(29) for _ in range(count)] for count in (20, 6))
    read = partial(logprob, policy, 29, tail, 4)

    def leak(masked: range) -> float:
        seen = [place for place in range(20) if place not in masked]
        placed = read([context[place] for place in seen], positions=[*seen, *range(20, 26)])
        return read(context, masked) - placed

    assert read(context, ()) == pytest.approx(scored(policy, context + tail, 4, 29), abs=ROUNDING)
    assert abs(read(context, range(4, 12)) - read(context)) > 1e-2  # the mask hides something
    assert abs(leak(range(12, 20))) < ROUNDING  # o_r: nothing that the answer sees comes after e
    assert abs(leak(range(4, 12))) > 1e-3 if layers > 1 else abs(leak(range(4, 12))) < ROUNDING


@pytest.fixture
def recipe_file(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    """Write a recipe of EviOmni, whose passages are searched for."""
    (tmp_path / "template.txt").write_text("{passages} Question: {question} Now:")
    make_recipe(
        system={"name": "eviomni", "template": str(tmp_path / "template.txt")},
        rollout={"max_turn_tokens": 110, "max_policy_tokens": 140, "max_context": 256},
        run={"eval_questions": 2},
    ).write(tmp_path / "recipe.toml")
    return tmp_path / "recipe.toml"


def say(script: Script, first: str, second: str) -> None:
    """Force the first turns of two questions; all answers are the same."""
    said = {0: [first, "<answer>Otto Pike</answer>"], 1: [second, "<answer>Otto Pike</answer>"]}
    said |= {branch_seed(seed, name): ["Otto Pike</answer>"] for seed in (0, 1) for name in ANSWERS}
    script(said)


def test_the_command(recipe_file: Path, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "leak", "--recipe", str(recipe_file), "--out", str(tmp_path / "out")]
    say(script, WRITTEN, "<reason>Nobody.</reason><extract></extract>")
    assert cli.run(words) == 0
    assert "soft - placed is the leak" in capsys.readouterr().out
    rows = stored(tmp_path / "out" / "rows.jsonl")
    say(script, WRITTEN, "<reason>Nobody.</reason><extract></extract>")
    task = load_task(read_run_recipe(recipe_file, []))
    questions = task.rollout.retrieve_and_truncate(task.held_out).questions
    trajectories = task.rollout.run(jobs_of(questions), 0.0)
    tokenizer, policy = task.context.tokenizer, task.context.policy
    assert [(row["id"], row["answer"]) for row in rows] == [(q.id, name) for q in questions for name in ANSWERS]
    for row in rows:
        place = [question.id for question in questions].index(row["id"])
        gold = tokenizer.encode(" " + questions[place].golds[0])
        branch = trajectories[place].branches[row["answer"]].segments[0].ids
        expected = scored(policy, branch + gold, len(gold), tokenizer.vocab_size)
        # float32: logits of order 10 and 30 sums, as in tests/bench/studies/test_mask.py, for each token
        rounding = 1e-5 * len(gold)
        assert row["tokens"] == len(gold) and row["hard"] == pytest.approx(expected, abs=rounding)
        assert (abs(row["soft"] - row["placed"]) < rounding) == (row["answer"] == "rationale")
    assert rows[2]["hard"] != rows[2]["empty"] and rows[3]["hard"] == pytest.approx(rows[3]["empty"], abs=1e-4)
    assert [row["recalled"] for row in rows] == [True, True, False, False]
    figures = json.loads((tmp_path / "out" / "leak.json").read_text())
    assert figures["questions"] == 2 and figures["figures"] == summary_of(rows)


def test_the_summary() -> None:
    """Differences are between neighbouring contexts; per token, each question counts once."""
    values: list[dict[str, Any]] = [
        {"answer": "evidence", "recalled": False, "tokens": 2}
        | dict(zip(CONTEXTS, (-1.0, -2, -4, -8, -16), strict=True)),
        {"answer": "evidence", "recalled": True, "tokens": 1} | dict.fromkeys(CONTEXTS, -3.0),
    ]
    figures = summary_of(values)
    assert list(figures) == [*ANSWERS.values(), UNFOUND] and not figures[ANSWERS["rationale"]]
    found = figures[ANSWERS["evidence"]]
    assert list(found) == [*CONTEXTS, *(f"{one} - {other}" for one, other in pairwise(CONTEXTS))]
    assert found["soft - placed"]["nats"]["mean"] == 1.0 and found["soft - placed"]["per_token"]["mean"] == 0.5
    assert figures[UNFOUND]["hard - empty"]["nats"] == {"mean": 8.0, "low": None, "high": None, "count": 1}


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("--set system.name=arena", "its system is arena, expected eviomni or lear"),
        ("--set model.dtype=bfloat16", "the study itself sets model.dtype"),
        ("", "no trajectory has both a rationale and evidence"),
    ],
)
def test_what_cannot_be_measured(
    recipe_file: Path, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, wrong: str
) -> None:
    say(script, "<reason>a</reason><extract>b<|endoftext|>", "<extract>b</extract>")
    out = ["--out", str(tmp_path / "out")]
    assert cli.run(["study", "leak", "--recipe", str(recipe_file), *words.split(), *out]) == 2
    message = capsys.readouterr().err
    assert wrong in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()
