"""`train --replay`: a run whose tools answered at arbitrary times is repeated to the bit."""

from pathlib import Path
from typing import Any

import pytest
from tool_cases import LOOKING
from train_cases import Killed, Make, die_after, sampled, steps_of, what_happened

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.training.train import train

# The tool's result, and its delay, differ each time.
NUMBER = "number = next(COUNT)\n"
SLOW = LOOKING.replace(NUMBER, NUMBER + "    import random, time\n    time.sleep(random.uniform(0, 0.05))\n")


@pytest.fixture
def slow(make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(SLOW)
    return make_recipe(
        system={"name": "slow.py", "template": None},
        tools={"look": {"function": "slow.py:look", "max_tokens": 20}},
        rollout={"partial": True, "questions_per_step": 2, "max_num_seqs": 6, "max_passage_tokens": 30},
        run={"steps": 4, "save_every": 1, "eval_every": 2},
    )


def of_the_run(folder: str) -> dict[str, Any]:
    """Return all that a run wrote, except its recipe, which names the run that it repeats."""
    found = what_happened(Path(folder))
    return {name: value for name, value in found.items() if name != "recipe" and "unfinished" not in name}


def versions(folder: str) -> list[Any]:
    records = [record for step in range(1, 5) for record in sampled(Path(folder), step)]
    return [[segment["versions"] for segment in one["segments"] if segment["source"] == "policy"] for one in records]


@pytest.mark.slow
def test_a_run_is_repeated_whenever_its_tools_had_answered(slow: Recipe) -> None:
    train(slow, "run")
    train(slow, "again", replay="run")
    with pytest.raises(Killed):
        train(slow, "killed", watch=die_after(3), replay="run")
    train(slow, "killed", resume=True, replay="run")
    counts = {
        "tokens_recomputed",
        "prefilled_tokens",
        "shared_tokens",
        "sampled_tokens",
        "tool_calls",
        "tool_errors",
        "tokens_spent",
    }  # other samples drew, too
    for name in ("again", "killed"):
        assert versions(name) == versions("run")
        first, second = of_the_run("run"), of_the_run(name)
        for one in (first, second):
            one["metrics"] = [{k: v for k, v in record.items() if k not in counts} for record in one["metrics"]]
            one["summary"] = {k: v for k, v in one["summary"].items() if k not in counts}
        assert first.keys() == second.keys()
        assert [key for key in first if first[key] != second[key]] == []
    assert any(record["staleness_mean"] for record in steps_of(Path("run")))


def test_what_cannot_be_repeated_is_refused(slow: Recipe, make_recipe: Make) -> None:
    train(slow, "run")
    with pytest.raises(UserError, match=r"--replay run: expected a run of the same recipe; here run.seed is 4, not 3"):
        train(slow_with(slow, run={"seed": 4}), "other", replay="run")
    with pytest.raises(UserError, match=r"expected grpo.refill = false, because groups set aside are not stored"):
        train(slow_with(slow, grpo={"refill": True}), "other", replay="run")
    with pytest.raises(UserError, match=r"expected no run.token_budget, because what a step prefills depends on when"):
        train(slow_with(slow, run={"token_budget": 9, "steps": 4}), "other", replay="run")
    with pytest.raises(UserError, match=r"none/recipe.toml"):
        train(slow, "other", replay="none")
    Path("run/trajectories/step_000002.jsonl").unlink()
    with pytest.raises(UserError, match="--replay run: it has no trajectories of step 2; name a run of the same"):
        train(slow, "other", replay="run")


def slow_with(recipe: Recipe, **changes: dict[str, Any]) -> Recipe:
    from dataclasses import replace

    return replace(recipe, **{name: replace(getattr(recipe, name), **keys) for name, keys in changes.items()})
