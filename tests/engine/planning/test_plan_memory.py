"""Bytes of a plan: what autograd keeps against what torch keeps, trajectories with the same prefix, and the disk."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import make_config
from safetensors.numpy import load_file

from thresher.bench.roofline import MODELS
from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe, make_recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.planning.memory import (
    PlanSetting,
    activation_bytes,
    all_weights,
    check_disk,
    checkpoints_at_a_time,
    layer_bytes,
    micro_batch,
    one_layer,
    read_setting,
)
from thresher.engine.planning.plan import plan
from thresher.engine.planning.time import CHIPS, MeasuredRates, sent_bytes
from thresher.engine.systems import load_system
from thresher.engine.training.train import train
from thresher.kernels.attention.prefix import PrefixForest
from thresher.kernels.attention.varlen import Varlen
from thresher.policy.config import DeltaShape, ModelConfig
from thresher.policy.lora import TARGETS, add_lora
from thresher.policy.model import init_policy

TOKENS, SEQUENCES, RANK = 48, 3, 5
# Layouts of TOKENS tokens: separate sequences, and two that share half of the tokens as their prefix.
LAYOUTS = {
    False: lambda: Varlen([TOKENS // SEQUENCES] * SEQUENCES),
    True: lambda: PrefixForest([TOKENS // 2, TOKENS // 4, TOKENS // 4], [-1, 0, 0]),
}
ALL = ("q", "k", "v", "o", "gate", "up", "down")


def saved_bytes(config: ModelConfig, dtype: torch.dtype, targets: tuple[str, ...] | None, shared: bool) -> float:
    """Return the bytes per token of the storages that a forward saves, but not parameters or tensors of these alone."""
    policy = init_policy(config, 0).to(dtype)
    policy.requires_grad_(True)
    if targets is not None:
        add_lora(policy, rank=RANK, alpha=8.0, targets=targets)
    parameters = {x.untyped_storage().data_ptr() for x in policy.parameters()}
    layout, kept = LAYOUTS[shared](), {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        key = x.untyped_storage().data_ptr()
        # A and B, cast and padded, are saved once per forward: neither of their axes is a token axis.
        if key not in parameters and (x.dim() == 1 or TOKENS in x.shape or TOKENS // SEQUENCES in x.shape):
            kept[key] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden_TH = policy.hidden(torch.arange(TOKENS) % config.vocab_size, layout.positions_T, layout)
    assert hidden_TH.requires_grad
    return sum(kept.values()) / TOKENS


def recipe(**tables: dict[str, Any]) -> Recipe:
    return from_dict(Recipe, {"model": {"path": "m"}} | tables, "test")


def on_gpu(**tables: dict[str, Any]) -> Recipe:
    return recipe(**{"model": {"path": "m", "device": "cuda", "dtype": "bfloat16"}} | tables)


def setting_of(
    dtype: torch.dtype, targets: tuple[str, ...] | None, device: str = "cpu", shared: bool = False
) -> PlanSetting:
    """Return the setting of a plan. shared: prompts of a thousand tokens are computed once for eight samples."""
    setting = read_setting(
        recipe(
            model={"path": "m", "dtype": str(dtype)[6:], "device": device},
            rollout={"max_context": 1032, "max_policy_tokens": 32, "max_turns": 1},
            optim={"share_prefix": shared},
            **({} if targets is None else {"lora": {"rank": RANK, "targets": list(targets)}}),
        )
    )
    assert setting.prompt_once is shared
    return setting


@pytest.mark.parametrize("targets", [None, ALL, ("q", "v"), ("v", "o", "down")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_the_formula_is_what_torch_saves(
    model_type: str, dtype: torch.dtype, targets: tuple[str, ...] | None, shared: bool
) -> None:
    """Equal to the byte, with grouped queries, three layers, and different widths of all axes. Qwen3's norms of heads
    keep their small weights besides, which do not grow with the tokens."""
    config = make_config(
        model_type=model_type,
        num_hidden_layers=3,
        hidden_size=56,
        intermediate_size=104,
        num_attention_heads=14,
        num_key_value_heads=2,
    )
    setting = setting_of(dtype, targets, shared=shared)
    expected = activation_bytes(config, setting, checkpointed=False)
    assert saved_bytes(config, dtype, targets, shared) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_layers_of_several_types(dtype: torch.dtype, shared: bool) -> None:
    """All weights trained: equal except for storages that do not grow with the tokens, which are not counted. Adapters:
    at most a seventh too much, because nothing before the first adapter is kept."""
    config = make_config(
        model_type="qwen3_5_text",
        num_hidden_layers=4,
        layer_types=(*["linear_attention"] * 3, "full_attention"),
        hidden_size=56,
        intermediate_size=104,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=20,
        partial_rotary_factor=0.5,
        delta=DeltaShape(3, 6, 10, 22, 4),
    )
    found = saved_bytes(config, dtype, None, shared)
    expected = activation_bytes(config, setting_of(dtype, None, shared=shared), checkpointed=False)
    assert 0.99 * found < expected < 1.01 * found
    adapted = saved_bytes(config, dtype, TARGETS, shared)
    assert adapted < activation_bytes(config, setting_of(dtype, TARGETS, shared=shared), False) < 1.15 * adapted


def test_a_layer_on_a_gpu_by_hand() -> None:
    """Qwen2.5-7B's layer in bfloat16: H 3584, I 18,944, N 28, K 4, D 128. The fused norm keeps its sum, the fused gate
    only its input; rotated queries and keys are kept as well as the projection that they come from."""
    config = make_config(
        hidden_size=3584, intermediate_size=18_944, num_attention_heads=28, num_key_value_heads=4, vocab_size=100
    )
    norms_and_inputs, turned, projection, out = 4 * 3584, 3584 + 512, 3584 + 1024, 3584
    elements = norms_and_inputs + turned + projection + out + 2 * 18_944 + 18_944
    assert layer_bytes(config, setting_of(torch.bfloat16, None, "cuda")) == 2 * elements + 4 * 28


def test_checkpointed_activations_are_two_rows_a_layer_and_one_layer() -> None:
    config, setting = make_config(num_hidden_layers=9), setting_of(torch.bfloat16, None)
    a_layer_more = make_config(num_hidden_layers=10)
    more = activation_bytes(a_layer_more, setting, True) - activation_bytes(config, setting, True)
    assert more == 2 * 2 * config.hidden_size
    assert activation_bytes(config, setting, True) > layer_bytes(config, setting)


CONFIG = MODELS["0.5B"]


def of_system(name: str, **rollout: Any) -> PlanSetting:
    """Return the setting of a recipe that names only the system, as `thresher plan` reads it."""
    tables: dict[str, Any] = {"model": {"path": "m"}, "system": {"name": name}, "rollout": rollout}
    return read_setting(make_recipe(tables, "test", [], lambda system: load_system(system, {}).preset))


@pytest.mark.parametrize(
    ("name", "sampled", "searched", "prompt"),
    [
        ("arena", 256, 0, 4096 - 256),  # one turn, its passages in the prompt
        ("naive_grpo", 256, 0, 4096 - 256),
        ("eviomni", 768, 0, 3072 - 768),  # two turns of 640, 768 in all
        ("search_r1", 2048, 4 * 512, 1),  # which fill the context
        ("evinote", 2560, 5 * 512, 6144 - 5120),
    ],
)
def test_lengths_are_those_of_a_systems_preset(name: str, sampled: int, searched: int, prompt: int) -> None:
    found = of_system(name)
    assert (found.sampled, found.searched, found.prompt) == (sampled, searched, prompt)
    assert found.prompt + found.own == found.length


# Two questions of four samples: a prompt of 900 tokens, and 100 tokens of each sample.
SMALL = {"group_size": 4, "questions_per_step": 2, "max_turns": 1, "max_policy_tokens": 100, "max_context": 1000}


@pytest.mark.parametrize(
    ("optim", "tokens", "several"),
    [
        ({}, 2 * (900 + 4 * 100), False),
        ({"share_prefix": False}, 2 * 4 * 1000, False),
        ({"micro_batch_tokens": 2000}, 2000, True),
        ({"micro_batch_tokens": 10}, 1000, True),
    ],
)
def test_a_micro_batch_is_counted_in_computed_tokens(optim: dict[str, Any], tokens: int, several: bool) -> None:
    """A micro-batch takes tokens up to the budget, and at least one whole context."""
    setting = read_setting(recipe(rollout=SMALL, optim=optim))
    assert micro_batch(setting) == (tokens, several)
    activations = plan(CONFIG, recipe(rollout=SMALL, optim=optim | {"checkpoint_activations": "off"})).phases["loss"][
        "activations"
    ]
    assert activations == tokens * activation_bytes(CONFIG, setting, checkpointed=False)


def test_a_longer_context_never_needs_less() -> None:
    """Also where a prompt begins to be worth sharing, on which the search for the longest context that fits relies."""
    tokens = [micro_batch(of_system("naive_grpo", max_context=n, max_turn_tokens=60))[0] for n in range(2, 200)]
    assert tokens == sorted(tokens) and tokens[-1] > tokens[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("attention", ["auto", "xformers"])
def test_on_a_gpu_prompts_are_shared_whatever_library_computes_the_rest(dtype: str, attention: str) -> None:
    model = {"path": "m", "device": "cuda", "dtype": dtype}
    assert read_setting(on_gpu(model=model, optim={"attention": attention})).share_rows
    assert not read_setting(on_gpu(model=model, optim={"share_prefix": False})).share_rows


def test_seconds_follow_computed_tokens_and_rows_in_the_loss_do_not() -> None:
    """Without its head an update takes time in proportion to its computed tokens; with it, somewhat longer."""

    def update(share: bool) -> float:
        seconds = plan(CONFIG, on_gpu(rollout=SMALL, optim={"share_prefix": share}), rates=CHIPS["H100"]).seconds
        assert seconds is not None
        return seconds["update"]

    share = (900 + 400) / 4000
    assert share < update(True) / update(False) < 2 * share


LARGE = {"questions_per_step": 64}
APART: dict[str, dict[str, Any]] = {"rollout": LARGE, "optim": {"share_prefix": False}}


def test_what_ranks_send_by_hand() -> None:
    """All weights of 7B, four micro-batches of one update on each of eight GPUs (docs/scale.md)."""
    config = MODELS["7B"]
    p, layers = all_weights(config), config.num_hidden_layers * one_layer(config)
    setting = read_setting(on_gpu(**APART), gpus=8)
    tokens, _ = micro_batch(setting)
    batches = 8 * 8 * 4096 // tokens
    sent = sent_bytes(config, setting)
    assert sent["rollout"] == 2 * p * 7 / 8
    assert sent["update"] == (batches * (6 * p + 2 * layers + 2 * layers) + 2 * (p - layers)) * 7 / 8
    adapters = sent_bytes(config, read_setting(on_gpu(lora={"rank": 4}, **APART), gpus=8))
    assert adapters["rollout"] == sent["rollout"] and adapters["update"] < 0.7 * sent["update"]
    assert set(sent_bytes(config, read_setting(on_gpu(rollout=LARGE))).values()) == {0.0}


def test_links_count_where_a_chips_are_known() -> None:
    """A rollout waits for its copy; an update for its communication, where that takes longer than computing."""
    config, chip = MODELS["7B"], CHIPS["A100-80"]
    one, eight = (plan(config, on_gpu(rollout=LARGE), gpus, rates=chip) for gpus in (1, 8))
    assert one.links is None and eight.links == 300e9
    short = on_gpu(rollout=LARGE | {"max_context": 128}, optim={"micro_batch_tokens": 1})
    slow, sent = plan(config, short, gpus=8, rates=chip).seconds, sent_bytes(config, read_setting(short, gpus=8))
    assert slow is not None and slow["update"] == sent["update"] / 300e9

    without = plan(config, on_gpu(rollout=LARGE), 8, rates=MeasuredRates(chip.flops_per_s, chip.bytes_per_s))
    assert without.links is None and without.seconds is not None and eight.seconds is not None
    assert eight.seconds["update"] == without.seconds["update"]
    instantly = plan(config, on_gpu(rollout=LARGE), 8, rates=replace(chip, link_bytes_per_s=math.inf)).seconds
    assert instantly is not None
    assert eight.seconds["rollout"] == pytest.approx(instantly["rollout"] + sent["rollout"] / 300e9)


def test_a_run_is_refused_before_anything_is_loaded(
    tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest, the best and the one before are kept while a fourth is written, each with weights and two moments."""
    recipe, out = make_recipe(run={"keep_checkpoints": 2, "save_every": 1}), tmp_path / "run"
    weights = load_file(Path(recipe.model.path) / "model.safetensors")
    needed = 4 * 3 * sum(4 * value.size for value in weights.values())
    real, free = shutil.disk_usage, needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free))
    monkeypatch.setattr("thresher.engine.training.train.load_run_context", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"run: cannot be written \(a run with 4 checkpoints at a time of .* needs"):
        train(recipe, out)
    assert not out.exists()
    free = needed
    check_disk(recipe, recipe.model.path, out)
    # Space that a resumed run's checkpoints already take is not required again.
    (out / "checkpoints" / "step_000001").mkdir(parents=True)
    (out / "checkpoints" / "step_000001" / "model.safetensors").write_bytes(bytes(1000))
    free = needed - 1000
    check_disk(recipe, recipe.model.path, out)
    free -= 1
    with pytest.raises(UserError, match="make room for it"):
        check_disk(recipe, recipe.model.path, out)
    # Each checkpoint contains the weights that are written back unchanged.
    monkeypatch.setattr("thresher.engine.planning.memory.kept_shapes", lambda *_: {"mtp.fc.weight": (5, 5)})
    free += 1 + 4 * 100
    check_disk(recipe, recipe.model.path, out)
    free -= 1
    with pytest.raises(UserError, match="make room for it"):
        check_disk(recipe, recipe.model.path, out)


def test_checkpoints_that_lie_there_at_a_time(make_recipe: Callable[..., Recipe]) -> None:
    three, no_dev = {"steps": 9, "save_every": 3}, {"data": {"dev": None}}
    for changes, most in (
        ({"run": {"steps": 2, "save_every": 9}, **no_dev}, 1),
        ({"run": three | {"keep_checkpoints": 1, "eval_every": 1}}, 3),
        ({"run": three | {"keep_checkpoints": 1}, **no_dev}, 2),
        ({"run": three | {"keep_checkpoints": 9}, **no_dev}, 3),
    ):
        assert checkpoints_at_a_time(make_recipe(**changes)) == most
