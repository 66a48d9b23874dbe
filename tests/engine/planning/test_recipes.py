"""Every shipped recipe says what it needs, by the plan, and says so where one GPU does not hold it."""

import json
import textwrap
from pathlib import Path

import pytest

from thresher.bench.roofline import MODELS
from thresher.engine.assemble import read_run_recipe
from thresher.engine.planning.plan import GB, plan
from thresher.policy.config import ModelConfig, config_from_dict

ROOT = Path(__file__).parents[3]
GPU, LAPTOP = 80 * GB, 16 * GB
START = "# Memory, by thresher plan: "
# All but those of SFT: a plan is of a GRPO run.
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.toml") if "[sft]" not in path.read_text("utf-8"))


def model_of(path: Path, named: str) -> ModelConfig:
    """The model that a recipe is for: a size of Qwen2.5, the config beside it, or two layers of the smallest."""
    if (path.parent / "config.json").exists():
        return config_from_dict(json.loads((path.parent / "config.json").read_text("utf-8")), "config.json")
    size = next((size for size in MODELS if f"-{size}-" in named), None)
    return MODELS["0.5B"].replace(num_hidden_layers=2) if size is None else MODELS[size]


def statement(path: Path) -> list[str]:
    """The lines that belong at a recipe's head."""
    recipe = read_run_recipe(path, [])
    cuda = recipe.model.device == "cuda"
    found = plan(model_of(path, recipe.model.path), recipe, memory_bytes=GPU if cuda else LAPTOP)
    where = "an 80 GB GPU" if cuda else "a CPU with 16 GB"
    total = f"{found.total_bytes / GB:.1f} GB"
    if found.fits:
        turned = ["activations recomputed"] if found.checkpointed else []
        turned += ["the reference in CPU memory"] if found.reference == "cpu" else []
        how = f", with {' and '.join(turned)}" if turned else ""
        return [f"{START}{total} at most{how}; it fits {where}."]
    advice = "; or ".join(found.advice)
    return textwrap.wrap(f"{START}{total}; it does not fit {where}: {advice}.", 118, subsequent_indent="# ")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_states_what_it_needs(path: Path) -> None:
    text, wanted = path.read_text("utf-8"), "\n".join(statement(path))
    assert text.count(START) == 1
    assert f"\n{wanted}\n\n" in text, f"{path.name} should say:\n{wanted}"


def test_a_recipe_of_all_weights_of_7b_says_that_it_takes_several_gpus() -> None:
    full = [path for path in RECIPES if "7b" in path.name]
    assert len(RECIPES) > 10 and full
    for path in full:
        assert "sharded over" in " ".join(statement(path)), path
