"""The number of threads of a run: the rule, its restoration after the run, and its record."""

from pathlib import Path

import pytest
import torch

from thresher.bench.roofline import MODELS
from thresher.common.errors import UserError
from thresher.engine.config.recipe import MAY_CHANGE, make_recipe
from thresher.engine.threads import SMALL, threads_for, use_threads
from thresher.policy.config import read_config

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.fixture(autouse=True)
def three_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_tiny_model_takes_one_thread_and_others_what_torch_has() -> None:
    tiny = read_config(DEMO)
    assert threads_for("auto", tiny) == 1 and threads_for(2, tiny) == 2
    assert threads_for("auto", MODELS["0.5B"]) == 3
    edge = tiny.replace(hidden_size=256, intermediate_size=SMALL // 256)
    assert threads_for("auto", edge) == 3 and threads_for("auto", edge.replace(intermediate_size=255)) == 1


def test_threads_are_put_back_even_behind_an_error() -> None:
    with pytest.raises(ZeroDivisionError), use_threads(1):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def test_the_recipe_has_the_key_and_a_resumed_run_may_change_it() -> None:
    def recipe(*overrides: str) -> object:
        return make_recipe({"model": {"path": "m"}}, "r.toml", overrides)

    assert recipe().run.threads == "auto" and recipe("run.threads=2").run.threads == 2  # type: ignore[attr-defined]
    assert "run.threads" in MAY_CHANGE
    assert recipe().digest() == recipe("run.threads=2").digest()  # type: ignore[attr-defined]
    for wrong in ("0", "many", "1.5"):
        with pytest.raises(UserError, match="threads: expected"):
            recipe(f"run.threads={wrong}")
