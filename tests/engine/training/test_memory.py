"""A device that is full says what holds how much and what to lower; and weights stay where they are over updates."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.training import train
from thresher.engine.training import update as update_module
from thresher.engine.training.update import Updater, memory_by_use


def test_a_full_device_names_what_it_holds_and_what_to_lower(
    tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_module, "GIB", 1 << 10)
    update, steps = Updater.update, []

    def full(self: Updater, *arguments: object) -> object:
        steps.append(1)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return update(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Updater, "update", full)
    with pytest.raises(UserError, match=r"^cpu is out of memory; GiB held: weights [\d.]+, moments") as found:
        train.train(make_recipe(run={"steps": 3}), tmp_path / "run")
    said = str(found.value)
    for name in ("moments", "the reference", "keys and values", "optim.micro_batch_tokens", "rollout.kv_tokens"):
        assert name in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"], "what was learned"


def test_a_device_that_is_full_in_an_evaluation_says_the_same(
    tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(train, "evaluate", full)
    with pytest.raises(UserError, match=r"^cpu is out of memory; GiB held: .*; lower optim.micro_batch_tokens"):
        train.train(make_recipe(), tmp_path / "run")


def test_what_is_held_is_counted_once_and_weights_stay_in_place(
    tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[list[int]] = []
    step = train.Trainer.step
    parts: dict[str, int] = {}

    def noted(self: train.Trainer, number: int) -> object:
        done = step(self, number)
        policy = self.updater.policy
        places.append([parameter.data_ptr() for parameter in policy.parameters()])
        parts.update(memory_by_use(self.updater, self.rollout))
        weights = sum(parameter.nbytes for parameter in policy.parameters())
        assert parts["weights"] == parts["the reference"] == weights  # the policy is its own master
        assert parts["gradients"] == 0  # between two updates there are none
        assert 2 * weights <= parts["moments"] <= 2 * weights + 8 * len(places[-1])
        return done

    monkeypatch.setattr(train.Trainer, "step", noted)
    train.train(make_recipe(run={"steps": 3}), tmp_path / "run")
    assert len(places) == 3 and places[0] == places[1] == places[2], "a CUDA graph may hold their addresses"
    assert parts["keys and values"] > 0


def test_what_lies_elsewhere_or_in_8_bits_is_counted_as_it_is(
    tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a streamed reference the two layers' room; moments by their codes; and nothing of another device."""
    parts: dict[str, int] = {}
    elsewhere: dict[str, int] = {}
    step = train.Trainer.step

    def noted(self: train.Trainer, number: int) -> object:
        done = step(self, number)
        parts.update(memory_by_use(self.updater, self.rollout))
        self.updater.device = torch.device("meta")
        elsewhere.update(memory_by_use(self.updater, self.rollout))
        return done

    monkeypatch.setattr(train.Trainer, "step", noted)
    recipe = make_recipe(run={"steps": 1}, optim={"optimizer_state_dtype": "8bit"}, grpo={"reference": "cpu"})
    train.train(recipe, tmp_path / "run")
    weights = parts["weights"]
    assert parts["moments"] < 1.5 * weights  # in float32 twice as much; here many matrices are too small for codes
    assert 0 < parts["the reference"] < weights
    assert set(elsewhere.values()) == {0}
