"""Recipes: what is read back, what is refused with which message, what `--set` overrides."""

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_cases import FULL, SMALLEST, refusal, writer

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.config.sampling import BOUNDS
from thresher.engine.config.sections import (
    DataSection,
    GrpoSection,
    ModelSection,
    OptimSection,
    RolloutSection,
    SystemSection,
)
from thresher.engine.config.tables import from_dict, to_toml, toml_value
from thresher.kernels.objective import LossSettings
from thresher.kernels.sampling import SamplingTensors


@pytest.fixture
def write(tmp_path: Path) -> Any:
    return writer(tmp_path)


def test_defaults_fill_what_the_file_leaves_out(write: Any) -> None:
    recipe = load_recipe(write(SMALLEST))
    assert recipe == Recipe(model=ModelSection(path="m"))
    assert (recipe.grpo.clip_low, recipe.grpo.kl_value, recipe.grpo.beta) == (0.2, "k3", 1e-3)
    assert (recipe.grpo.dual_clip, recipe.grpo.kl_gradient, recipe.sft) == (None, None, None)
    assert recipe.optim.betas == (0.9, 0.999)
    assert recipe.rollout.temperature == 1.0


def test_every_kind_of_value_is_read_with_its_type(write: Any) -> None:
    recipe = load_recipe(write(FULL))
    assert recipe.model == ModelSection(path="models/tiny", dtype="bfloat16", device="cuda", prompt="chat")
    assert recipe.need(DataSection) == DataSection(train="train.jsonl", dev="dev.jsonl", limit=100)
    assert type(recipe.grpo.clip_high) is float and recipe.grpo.clip_high == 1.0
    assert type(recipe.grpo.aggregation_constant) is float
    assert recipe.optim.betas == (0.9, 0.95) and recipe.optim.max_grad_norm == math.inf
    options = recipe.need(SystemSection).options
    assert options == {"partial_credit": False, "weights": [0.1, 1, "x"], "odd key": {"deep": 1.0}}
    assert type(options["weights"][1]) is int and type(options["odd key"]["deep"]) is float


@pytest.mark.parametrize("text", [SMALLEST, FULL])
def test_a_written_recipe_reads_back_the_same(write: Any, tmp_path: Path, text: str) -> None:
    recipe = load_recipe(write(text), ["run.seed=9223372036854775807", "optim.lr=1.0000000000000002e-6"])
    recipe.write(tmp_path / "again.toml")
    again = load_recipe(tmp_path / "again.toml")
    assert again == recipe
    assert again.to_toml() == recipe.to_toml()
    assert again.digest() == recipe.digest()
    assert from_dict(Recipe, recipe.to_dict(), "memory") == recipe


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALLEST.replace("\n", "\r\n").encode())
    assert load_recipe(path).model.path == "m"


values = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Compare value and type, distinguishing -0.0 from 0.0."""
    return repr(a) == repr(b)


@settings(derandomize=True, max_examples=300)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values, max_size=3))
def test_toml_reads_back_any_options(options: dict[str, Any]) -> None:
    text = to_toml({"system": {"name": "x", "options": options}})
    assert same(tomllib.loads(text)["system"]["options"], options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.toml: model: expected a section, got nothing; add it"),
        ("model = 3", "r.toml: model: expected a section, got 3"),
        ("[model]", "r.toml: [model] path: expected a string that is not empty, got nothing; add it"),
        ('[model]\npath = ""', 'r.toml: [model] path: expected a string that is not empty, got ""'),
        (
            "[model]\npath = 2024-01-01",
            "r.toml: [model] path: expected a string that is not empty, got datetime",
        ),
        (SMALLEST + "[rollot]\nk = 1", "r.toml: rollot: unknown key; did you mean rollout?"),
        ("steps = 3\n" + SMALLEST, "r.toml: steps: unknown key; expected one of model, data,"),
        (SMALLEST + "[grpo]\nclip_hi = 1", "r.toml: [grpo] clip_hi: unknown key; did you mean clip_high?"),
        (SMALLEST + "[run]\nzzz = 1", "r.toml: [run] zzz: unknown key; expected one of steps, token_budget,"),
        # a wrong type for every kind of field
        (
            SMALLEST + "[rollout]\ngroup_size = 4.0",
            "[rollout] group_size: expected an integer >= 1 and <= 65536, got 4",
        ),
        (SMALLEST + "[rollout]\ngroup_size = true", "expected an integer >= 1 and <= 65536, got true"),
        (SMALLEST + '[rollout]\nmax_turns = "4"', 'expected an integer >= 1 and <= 65536, got "4"'),
        (SMALLEST + '[optim]\nlr = "1e-6"', '[optim] lr: expected a number >= 0, got "1e-6"'),
        (SMALLEST + "[optim]\nlr = true", "expected a number >= 0, got true"),
        (SMALLEST + f"[optim]\nlr = {10**400}", "[optim] lr: expected a number >= 0, got 10000"),
        (SMALLEST + "[optim]\nlr = nan", "expected a number >= 0, got nan"),
        (SMALLEST + "[optim]\nlr = inf", "expected a number >= 0, got inf"),
        (SMALLEST + "[grpo]\nsample_std = 1", "[grpo] sample_std: expected true or false, got 1"),
        (
            SMALLEST + '[grpo]\nkl_value = "k4"',
            'expected "k1" or "k2" or "k3" or "k3_ratio" or "none", got "k4"',
        ),
        (SMALLEST + "[grpo]\nkl_gradient = true", 'or "none", got true'),
        (
            SMALLEST + "[optim]\nbetas = 0.9",
            "expected a list of 2 values, each a number >= 0 and < 1, got 0.9",
        ),
        (SMALLEST + "[optim]\nbetas = [0.9]", "each a number >= 0 and < 1, got [0.9]"),
        (SMALLEST + "[optim]\nbetas = [0.9, 1.0]", "each a number >= 0 and < 1, got [0.9, 1.0]"),
        (SMALLEST + '[optim]\nbetas = [0.9, "b"]', 'each a number >= 0 and < 1, got [0.9, "b"]'),
        (SMALLEST + '[system]\nname = "x"\noptions = 3', "[system] options: expected a table of strings,"),
        (
            SMALLEST + '[system]\nname = "x"\noptions = {a = [2024-01-01]}',
            "booleans, lists and tables, got a table",
        ),
        (SMALLEST + '[system]\nname = "x"\noptions = {a = nan}', "booleans, lists and tables, got a table"),
        (
            SMALLEST + "[data]\ntrain = {a = 1}",
            "[data] train: expected a string that is not empty, got a table",
        ),
        # malformed
        ("[model\n", "r.toml: expected a recipe in TOML, but Expected ']' at the end of a table declaration"),
        (SMALLEST + "[run]\nsteps = 1\nsteps = 2\n", "Cannot overwrite a value (at line 5, column "),
    ],
)
def test_what_is_refused(write: Any, text: str, message: str) -> None:
    assert message in refusal(write(text))


def float_or_int(text: str) -> float | int:
    return int(text) if text.isdigit() else float(text)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("rollout.temperature", ["1e-30", "1e-3", "2", "1e30"], ["0", "-1", "inf", "1e-300", "9e-31", "1e300"]),
        ("rollout.kv_block_size", ["1"], ["0"]),
        ("rollout.questions_per_step", ["1", "65536"], ["0", "-3", "65537"]),
        ("rollout.group_size", ["65536"], ["1000000000"]),
        ("grpo.clip_low", ["0", "1"], ["1.01", "-0.1"]),
        ("grpo.clip_high", ["0", "5", "3.4e38"], ["-0.1", "1e39", "1e308"]),
        ("grpo.dual_clip", ["1.01", "3"], ["1", "0", "1e308"]),
        ("grpo.beta", ["0"], ["-1e-9", "1e308"]),
        ("grpo.entropy_coef", ["0"], ["-1e-9", "1e308"]),
        ("grpo.std_floor", ["1e-9"], ["0"]),
        ("optim.eps", ["1e-12"], ["0", "1e-300"]),
        ("optim.max_grad_norm", ["inf", "0.1"], ["0", "-inf", "nan"]),
        ("run.steps", ["0"], ["-1"]),
        ("run.seed", ["0", str(2**63 - 1)], ["-1", str(2**63)]),
        ("run.keep_trajectories", ["0"], ["-1"]),
        ("run.keep_checkpoints", ["1"], ["0"]),
        ("sft.stop_at_copy_accuracy", ["0", "1"], ["1.01", "-0.1"]),
        ("sft.held_out", ["0.5"], ["1"]),
    ],
)
def test_bounds(write: Any, key: str, good: list[str], bad: list[str]) -> None:
    path = write(SMALLEST + '[sft]\ntranscripts = "t"\n')
    for value in good:
        section, name = key.split(".")
        assert getattr(getattr(load_recipe(path, [f"{key}={value}"]), section), name) == float_or_int(value)
    for value in bad:
        assert refusal(path, f"{key}={value}").startswith(f"--set {key}: expected a")


def test_what_the_recipe_takes_the_kernels_take() -> None:
    """No value within the recipe's bounds is refused by a kernel, neither by the sampling rules nor by the loss."""
    values = [sign * 10.0**power for sign in (1, 3.4) for power in (*range(-310, 309, 7), -30, 0, 30, 38, 39)]
    for name in ("temperature", "clip_low", "clip_high", "dual_clip", "beta", "entropy_coef"):
        section: Any = RolloutSection if name == "temperature" else GrpoSection
        taken = 0
        for value in values:
            try:
                section(**{name: value})
            except UserError:
                continue
            LossSettings(**{name: value})
            taken += 1
        assert 0 < taken < len(values)
    for value in values:
        if BOUNDS["temperature"].admits(value):
            assert SamplingTensors.uniform(value, 1).temperature == value
        if BOUNDS["top_p"].admits(value):
            rows = (torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor([value]), torch.zeros(1))
            SamplingTensors.of(*rows)


def test_rules_between_fields(write: Any) -> None:
    path = write(SMALLEST + '[sft]\ntranscripts = "t"\nheld_out = 0.0\n')
    assert refusal(path, "grpo.aggregation=constant") == (
        'r.toml: [grpo] aggregation_constant: expected a number > 0 with aggregation = "constant", got nothing'
    )
    assert (
        refusal(path, "grpo.aggregation_constant=5")
        == '--set grpo.aggregation_constant: expected no value with aggregation = "trajectory", got 5.0'
    )
    assert refusal(path, "grpo.updates_per_batch=3", "rollout.questions_per_step=2") == (
        "--set grpo.updates_per_batch: expected at most rollout.questions_per_step = 2, because a group is not split, "
        "got 3"
    )
    assert "[sft] held_out: expected a number > 0 with stop_at_copy_accuracy" in refusal(
        path, "sft.stop_at_copy_accuracy=0.5"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("optim.offload=masters", 'offload: expected "none" or "moments" with model.dtype = "float32"'),
        ("optim.offload=masters model.dtype=bfloat16 lora.rank=4", 'offload: expected "none" or "moments" with [lora]'),
        ("grpo.reference=cpu lora.rank=4", 'reference: expected "auto" with [lora]'),
        ("grpo.reference=cpu grpo.beta=0", "reference: expected a beta > 0"),
        ("grpo.tis_level=token", 'old_logprobs: expected "recomputed" with tis_level = "token"'),
        ("grpo.tis_floor=0.5", "tis_floor: expected none with tis_rule"),
        (
            "grpo.guard=llds grpo.old_logprobs=recomputed grpo.tis_level=token grpo.tis_rule=mask",
            'tis_rule: expected "truncate" with guard = "llds"',
        ),
        (
            "grpo.objective=reinforce++ grpo.refill=true rollout.partial=true",
            "baseline: expected a value other than batch with grpo.refill",
        ),
        ("sft.steps=3", "expected either transcripts or data, questions, got neither"),
        ("sft.transcripts=t sft.data=d", "expected either transcripts or data, questions, got both"),
        ("sft.data=d sft.format=reasoning sft.answer=plain", "leave out template and answer"),
        ("sft.data=d sft.format=chat", 'format: expected "qa" or'),
    ],
)
def test_settings_that_contradict_each_other(write: Any, overrides: str, said: str) -> None:
    assert said in refusal(write(SMALLEST), *overrides.split())


def test_sections_made_in_python_are_checked_too() -> None:
    assert OptimSection(lr=1, betas=[0, 0.5]).betas == (0.0, 0.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=re.escape("clip_low: expected a number >= 0 and <= 1, got 2")):
        GrpoSection(clip_low=2)
    with pytest.raises(UserError, match="group_size: expected an integer >= 1 and <= 65536, got 0"):
        replace(RolloutSection(), group_size=0)
    with pytest.raises(UserError, match="model: expected a section, got nothing"):
        Recipe(model=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ModelSection("m")  # type: ignore[misc]  # keyword-only


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.seed=3", "run", "seed", 3),
        (" run . seed = 3 ", "run", "seed", 3),
        ("grpo.kl_value=k2", "grpo", "kl_value", "k2"),
        ('grpo.kl_value="k2"', "grpo", "kl_value", "k2"),
        ("grpo.beta=0", "grpo", "beta", 0.0),
        ("grpo.sample_std=true", "grpo", "sample_std", True),
        ("optim.betas=[0.8, 0.9]", "optim", "betas", (0.8, 0.9)),
        ("model.path=runs/a=b.c", "model", "path", "runs/a=b.c"),
        ("model.path=2024-01-01", "model", "path", "2024-01-01"),
        ("model.path=a\nb = 1", "model", "path", "a\nb = 1"),
        ("data.train=q.jsonl", "data", "train", "q.jsonl"),
        ("sft.transcripts='t'", "sft", "transcripts", "t"),
    ],
)
def test_overrides(write: Any, override: str, section: str, key: str, value: Any) -> None:
    recipe = load_recipe(write(SMALLEST), [override])
    assert same(getattr(getattr(recipe, section), key), value)


def test_overrides_reach_into_options_and_the_last_one_counts(write: Any) -> None:
    recipe = load_recipe(write(FULL), ["system.options.new=1", "system.options.new=[2]", "system.name=search_r1"])
    system = recipe.need(SystemSection)
    assert system.name == "search_r1"
    assert system.options["new"] == [2] and system.options["partial_credit"] is False


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed", "--set run.seed: expected section.key=value"),
        ("seed=3", "--set seed=3: expected section.key=value"),
        ("run.=3", "--set run.=3: expected section.key=value"),
        ("model.path.x=3", "--set model.path.x=3: path is not a table in the recipe"),
        ("run.sede=3", "--set run.sede: unknown key; did you mean seed?"),
        ("run.seed=x", '--set run.seed: expected an integer >= 0 and <= 9223372036854775807, got "x"'),
        ("model.path=", "--set model.path: expected a string that is not empty, got nothing; add it"),
        ('model.path=""', '--set model.path: expected a string that is not empty, got ""'),
        ("grop.beta=1", "--set grop.beta: unknown key; did you mean grpo?"),
        ("run.sede=", "--set run.sede: unknown key; did you mean seed?"),
        ("rnu=", "--set rnu: unknown key; did you mean run?"),
        ("run.seed.x=", "--set run.seed.x: unknown key; there is no section of that name"),
        ("model.path=5", "--set model.path: expected a string that is not empty, got 5"),
        ("model.path=\udcff", "--set model.path: expected a string"),
        ("data.limit=5", "r.toml: [data] train: expected a string that is not empty, got nothing; add it"),
    ],
)
def test_overrides_refused(write: Any, override: str, message: str) -> None:
    assert message in refusal(write(SMALLEST), override)


def test_unreadable_files(tmp_path: Path, write: Any) -> None:
    assert refusal(tmp_path / "absent.toml").startswith("absent.toml: no such file")
    assert refusal(tmp_path).endswith("is a folder; give the path of a recipe in TOML")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").touch()
    assert refusal(tmp_path / "run").endswith("run/recipe.toml")
    path = write(SMALLEST)
    path.write_bytes(b"\xff\xfe")
    assert "r.toml: expected a recipe in TOML, but 'utf-8' codec can't decode" in refusal(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1, "1"),
        (1.0, "1.0"),
        (1e-5, "1e-05"),
        (math.inf, "inf"),
        ('a"\\\n\x7f\x00é😀', '"a\\"\\\\\\n\\u007f\\u0000é😀"'),
        ([], "[]"),
        ({"a b": [1, "c"]}, '{"a b" = [1, "c"]}'),
    ],
)
def test_toml_value(value: Any, text: str) -> None:
    assert toml_value(value) == text
