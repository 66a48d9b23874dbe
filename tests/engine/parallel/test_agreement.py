"""Test that ranks with different work, or with work that cannot be divided, are refused, all with the same message."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.parallel.sync import check_config_sync, judges_of
from thresher.engine.scoring.score import Judges
from thresher.engine.training.train import train

Facts = dict[str, Any]
OWN_SYSTEM = "from thresher.engine.systems.eval_rar import Options, system\n"  # also the content of all other files


@dataclass(frozen=True, slots=True)
class First(Ranks):
    """Rank 0, which has the facts of the other ranks."""

    others: tuple[Facts, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        return decide()


@dataclass(frozen=True, slots=True)
class Second(Ranks):
    """A rank of two. told: the facts that it sent to rank 0; decided: rank 0's result."""

    rank: int = 1
    count: int = 2
    told: Facts = field(default_factory=dict)
    decided: str | None = None

    def gather(self, value: Any) -> None:
        self.told.update(value)

    def broadcast(self, decide: Callable[[], Any]) -> Any:
        return self.decided


def told(recipe: Recipe, out: Path, checkpoint: Path | None = None) -> Facts:
    second = Second()
    check_config_sync(recipe, second, out, checkpoint)
    return second.told


def first(*others: Facts) -> First:
    return First(0, len(others) + 1, others=others)


def difference(theirs: Facts, recipe: Recipe, out: Path, checkpoint: Path | None = None) -> str:
    """Return the difference between rank 1, with these facts, and rank 0, as rank 0 reports it."""
    with pytest.raises(UserError) as refused:
        check_config_sync(recipe, first(theirs), out, checkpoint)
    begin, end = "rank 1 has another run than rank 0: ", "; give every rank the same recipe, files and folders"
    message = str(refused.value)
    assert message.startswith(begin) and message.endswith(end)
    return message.removeprefix(begin).removesuffix(end)


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Recipe:
    """Return a recipe whose files a test may change."""
    files = {name: str(tmp_path / name) for name in ("train.jsonl", "dev.jsonl", "prompt.txt", "mine.py")}
    (tmp_path / "model").mkdir()
    for path in (*files.values(), tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"):
        Path(path).write_text(OWN_SYSTEM)
    return make_recipe(
        model={"path": str(tmp_path / "model")},
        data={"train": files["train.jsonl"], "dev": files["dev.jsonl"]},
        system={"name": files["mine.py"], "template": files["prompt.txt"]},
        rollout={"questions_per_step": 4},
    )


def test_whatever_differs_is_named_with_both_values(recipe: Recipe, tmp_path: Path) -> None:
    out, model = tmp_path / "run", tmp_path / "model"
    same = told(recipe, out, model)
    check_config_sync(recipe, first(same, same, same), out, model)
    beta = replace(recipe, grpo=replace(recipe.grpo, beta=0.5))
    assert difference(told(beta, out), recipe, out) == "the recipe's grpo.beta is 0.5 there, 0.02 on rank 0"
    elsewhere = told(recipe, tmp_path / "other")
    assert difference(elsewhere, recipe, out) == f"--out is {tmp_path}/other there, {out} on rank 0"
    assert difference(same, recipe, out) == "the checkpoint to resume from is model there, absent on rank 0"
    # Files with the same names on another machine.
    for file, name in (
        *((name, f"the content of {tmp_path / name} is ") for name in ("train.jsonl", "dev.jsonl")),
        *((name, f"the content of {tmp_path / name} is ") for name in ("mine.py", "prompt.txt")),
        ("model/config.json", "config.json of model.path is "),
        ("model/model.safetensors", f"the files of model.path is [('model.safetensors', {len(OWN_SYSTEM)})] there, "),
    ):
        before, path = told(recipe, out), tmp_path / file
        path.write_bytes(path.read_bytes() + b" ")
        assert difference(before, recipe, out).startswith(name)
    with pytest.raises(UserError, match="rank 2 has another run than rank 0"):
        now = told(recipe, out)
        check_config_sync(recipe, first(now, told(beta, out), now), out, None)


def test_groups_that_cannot_be_shared_out_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    def refusal(recipe: Recipe, count: int) -> str:
        with pytest.raises(UserError) as refused:
            check_config_sync(recipe, first(*[told(recipe, tmp_path)] * (count - 1)), tmp_path, None)
        return str(refused.value)

    assert refusal(recipe, 3) == (
        "rollout.questions_per_step is 4; expected a multiple of 3 ranks, because a group is not split"
    )
    twice = replace(recipe, grpo=replace(recipe.grpo, updates_per_batch=4))
    assert "expected a multiple of 2 ranks x grpo.updates_per_batch = 4" in refusal(twice, 2)
    apart = replace(recipe, run=replace(recipe.run, async_=True))
    assert "is 4; expected a multiple of 3 ranks that sample, because a group" in refusal(apart, 5)
    assert "is 4; expected a multiple of 3 ranks that train, because a group" in refusal(apart, 6)


def test_a_verdict_in_the_middle_of_a_rollout_is_one_process_s(recipe: Recipe) -> None:
    class Judge:
        name = "judge"

        def rate(self, cases: object) -> list[bool]:
            raise AssertionError

    judges = Judges(verdict=Judge())
    both = replace(recipe, rollout=replace(recipe.rollout, partial=True), grpo=replace(recipe.grpo, refill=True))
    with pytest.raises(
        UserError, match=r"grpo.refill: with rollout.partial and a judge .* one process that samples, got 2: they"
    ):
        judges_of(judges, both, Ranks(count=2))
    assert judges_of(judges, both, Ranks()) is judges
    assert judges_of(judges, recipe, Ranks(count=2)).verdict is not judges.verdict


def test_what_rank_0_has_found_is_said_on_all(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rank 1 has another run"):
        check_config_sync(recipe, Second(decided="rank 1 has another run"), tmp_path, None)


def test_more_ranks_than_gpus_are_refused(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus = replace(recipe, model=replace(recipe.model, device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_config_sync(on_gpus, Second(local=0), tmp_path, None)
    with pytest.raises(UserError, match="rank 1 is process 2 of its machine, which has 1 GPUs; start torchrun with"):
        check_config_sync(on_gpus, Second(local=1), tmp_path, None)


def test_a_run_asks_before_there_is_a_folder(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thresher.engine.training.train.check_memory", lambda *_: pytest.fail("goes on"))
    with pytest.raises(UserError, match="expected a multiple of 2 ranks"):
        train(make_recipe(rollout={"questions_per_step": 3}), tmp_path / "run", ranks=first({}))
    assert not (tmp_path / "run").exists()
