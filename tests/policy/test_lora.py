"""Tests of low-rank adapters: fresh ones change nothing, trained ones have the gradients of a dense product, their bits
are batch-invariant, and saving gives an ordinary model with PEFT's files next to it."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_rows, using_threads, weight_shapes
from model_cases import make_config
from safetensors.torch import load_file, save_file

from thresher.common.errors import UserError
from thresher.kernels.operands import ROW_MULTIPLE
from thresher.policy.lora import (
    CONFIG,
    FOLDER,
    MODULES,
    WEIGHTS,
    Adapter,
    LoraSettings,
    adapters,
    add_lora,
    load_adapters,
    merged_weights,
    save_adapters,
)
from thresher.policy.model import Policy, hf_views, init_policy, load_policy

DENSE = ("q", "k", "v", "o", "gate", "up", "down")  # the targets of these layers
IDS = torch.tensor([3, 14, 1, 5, 9, 2, 6, 5, 3])


def make_policy(seed: int = 0, **changes: Any) -> Policy:
    config = make_config(hidden_size=24, intermediate_size=40, max_position_embeddings=64, initializer_range=0.3)
    return init_policy(config.replace(**changes), seed)


@torch.no_grad()
def stirred(policy: Policy, seed: int = 5) -> Policy:
    """Fill the adapters as if trained: B is no longer 0."""
    generator = torch.Generator().manual_seed(seed)
    for _, adapter in adapters(policy):
        adapter.b_OR.copy_(0.3 * torch.randn(adapter.b_OR.shape, generator=generator))
    return policy


def dense(policy: Policy) -> Policy:
    """Return the same function without adapters: their products are merged into the weights."""
    other = make_policy(hidden_size=policy.config.hidden_size).to(policy.dtype)
    other.load_state_dict({name: value for name, value in policy.state_dict().items() if "adapters" not in name})
    with torch.no_grad():
        for name, weight in merged_weights(policy, hf_views(policy)).items():
            hf_views(other)[name].copy_(weight)
    return other


def test_fresh_adapters_change_no_bit_and_are_all_that_is_trained() -> None:
    policy = make_policy()
    before = policy.logits(IDS)
    add_lora(policy, rank=3, alpha=6)
    assert torch.equal(policy.logits(IDS), before)
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * len(DENSE) and all(".adapters." in name for name in trained)
    for name, adapter in adapters(policy):
        inputs = adapter.a_RI.shape[1]
        assert adapter.b_OR.count_nonzero() == 0 and adapter.scale == 2
        largest = adapter.a_RI.abs().max()
        assert 0.5 / math.sqrt(inputs) < largest <= 1 / math.sqrt(inputs), name  # bound: where the draws end


def test_adapters_are_a_function_of_their_seed() -> None:
    first, same, other = ([a.a_RI for _, a in adapters(fresh(seed=seed))] for seed in (1, 1, 2))
    assert all(map(torch.equal, first, same)) and not any(map(torch.equal, first, other))
    assert len({tensor.sum().item() for tensor in first}) == len(first), "two of them are alike"


@pytest.mark.parametrize("targets", [("q",), ("k", "v"), ("o", "up"), ("gate",), ("down",), DENSE], ids="+".join)
def test_they_add_their_product_and_off_they_add_nothing(targets: tuple[str, ...]) -> None:
    policy = make_policy().double()
    base = policy.logits(IDS)
    add_lora(policy, rank=3, alpha=4.5, targets=targets)
    stirred(policy)
    found = {name.removeprefix("model.layers.") for name, _ in adapters(policy)}
    assert found == {f"{layer}.{MODULES[target]}" for layer in (0, 1) for target in targets}
    with_them = policy.logits(IDS)
    assert (with_them - base).abs().max() > 0.05
    torch.testing.assert_close(with_them, dense(policy).logits(IDS), rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError), policy.adapters_off():
        with policy.adapters_off():
            pass
        assert torch.equal(policy.logits(IDS), base)
        raise RuntimeError
    assert torch.equal(policy.logits(IDS), with_them), "an error left them off"


def test_their_gradients_are_those_of_the_dense_product() -> None:
    """With G = dloss/dW of the merged weight: dB = s G A^T and dA = s B^T G."""
    policy = make_policy().double()
    add_lora(policy, rank=3, alpha=4.5)
    other = dense(stirred(policy)).requires_grad_(True)
    for each in (policy, other):
        torch.nn.functional.cross_entropy(each.logits(IDS[:-1]), IDS[1:]).backward()
    assert all(p.grad is None for name, p in policy.named_parameters() if "adapters" not in name)
    gradients = make_policy().double()
    for name, parameter in gradients.named_parameters():
        parameter.data = other.get_parameter(name).grad  # type: ignore[assignment]
    slopes = hf_views(gradients)
    for name, adapter in adapters(policy):
        slope_OI = slopes[f"{name}.weight"]
        torch.testing.assert_close(adapter.b_OR.grad, 1.5 * slope_OI @ adapter.a_RI.detach().T, rtol=0, atol=1e-12)
        torch.testing.assert_close(adapter.a_RI.grad, 1.5 * adapter.b_OR.detach().T @ slope_OI, rtol=0, atol=1e-12)
        assert slope_OI.abs().max() > 1e-3


@pytest.mark.bits
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rank", [1, 2, 3, 8, 20])
def test_an_adapters_rows_are_batch_invariant(rank: int, threads: int) -> None:
    """Rows come in multiples of ROW_MULTIPLE (kv_cache.py). Ranks 2 to 4, unpadded, would fail on three threads."""
    settings = LoraSettings(rank=rank, alpha=8.0)
    generator = torch.Generator().manual_seed(rank)
    adapter = Adapter(24, 24, settings, generator)
    torch.nn.init.normal_(adapter.b_OR, generator=generator)
    x_TI = torch.randn(128, 24, generator=generator)
    needs_invariant_rows(weight_shapes(adapter), threads, len(x_TI))
    with using_threads(threads):
        alone = torch.cat([adapter(rows) for rows in x_TI.split(ROW_MULTIPLE)])
        for count in (32, 48, 64, 112, 128):
            assert torch.equal(adapter(x_TI[:count]), alone[:count]), count
    torch.testing.assert_close(alone, x_TI @ adapter.product().T, rtol=0, atol=1e-4)


def test_on_a_bfloat16_base_they_are_float32_and_learn() -> None:
    policy = make_policy().bfloat16()
    add_lora(policy, rank=4, alpha=8)
    assert {parameter.dtype for _, adapter in adapters(policy) for parameter in adapter.parameters()} == {torch.float32}
    stirred(policy)
    logits = policy.logits(IDS)
    assert policy.dtype == logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 for _, a in adapters(policy) for p in a.parameters()
    )
    merged = merged_weights(policy, hf_views(policy))
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
    name, adapter = next(adapters(policy))
    kept = merged[f"{name}.weight"] - hf_views(policy)[f"{name}.weight"].float()
    torch.testing.assert_close(kept, adapter.product(), rtol=0, atol=1e-6)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Policy, Path]:
    policy = make_policy()
    add_lora(policy, rank=3, alpha=6, targets=("q", "v", "down"))
    stirred(policy).save(tmp_path / "model")
    return policy, tmp_path / "model"


def fresh(**changes: Any) -> Policy:
    policy = make_policy()
    add_lora(policy, **{"rank": 3, "alpha": 6, "targets": ("q", "v", "down"), "seed": 9, **changes})
    return policy


def test_what_is_saved_is_an_ordinary_model_with_pefts_files(saved: tuple[Policy, Path]) -> None:
    policy, folder = saved
    plain = load_policy(folder)
    assert plain.lora is None
    torch.testing.assert_close(plain.logits(IDS), policy.logits(IDS), rtol=0, atol=1e-4)
    with policy.adapters_off():
        assert (plain.logits(IDS) - policy.logits(IDS)).abs().max() > 0.05
    # transformers applies an adapter in the model's own folder, whose weights already contain it.
    names = [FOLDER, "config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    tensors = load_file(folder / FOLDER / WEIGHTS)
    assert len(tensors) == 2 * 3 * 2
    down = tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    assert down.shape == (3, 40) and torch.equal(down, dict(adapters(policy))["model.layers.1.mlp.down_proj"].a_RI)
    config = json.loads((folder / FOLDER / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6, "LORA")
    assert config["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    other = fresh()
    load_adapters(other, folder / FOLDER)
    assert torch.equal(other.logits(IDS), policy.logits(IDS))
    for (name, one), (_, two) in zip(policy.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def damaged(change: Callable[[Path], Any], folder: Path, **changes: Any) -> str:
    change(folder / FOLDER)
    policy = fresh(**changes)
    before = deepcopy(policy.state_dict())
    with pytest.raises(UserError) as caught:
        load_adapters(policy, folder / FOLDER)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    return str(caught.value)


def test_other_and_damaged_adapters_are_refused(saved: tuple[Policy, Path]) -> None:
    _, folder = saved
    for changes, message in (
        ({"rank": 4}, "r is 3, the recipe's [lora] says 4"),
        ({"alpha": 7}, "lora_alpha is 6, the recipe's [lora] says 7"),
        ({"targets": ("q", "v")}, "layers.0.mlp.down_proj.lora_A.weight does not match"),
        ({"targets": DENSE}, "layers.0.mlp.gate_proj.lora_A.weight does not match"),
    ):
        assert message in damaged(lambda _: None, folder, **changes)
    whole = (folder / FOLDER / WEIGHTS).read_bytes()
    wrong = load_file(folder / FOLDER / WEIGHTS)
    last = max(wrong)
    turned = wrong | {last: wrong[last].T.contiguous()}
    assert f"tensor {last} does not match" in damaged(lambda at: save_file(turned, at / WEIGHTS), folder)
    assert "cannot be read" in damaged(lambda at: (at / WEIGHTS).write_bytes(whole[:-5]), folder)
    assert "no such file" in damaged(lambda at: (at / WEIGHTS).unlink(), folder)
    assert CONFIG in damaged(lambda at: (at / CONFIG).unlink(), folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "a rank of at least 1"),
        ({"alpha": 0.0}, "an alpha > 0"),
        ({"alpha": math.inf}, "an alpha > 0"),
        ({"targets": ()}, "expected some of q, k, v, o, gate, up, down, linear_qkv, .* each once"),
        ({"targets": ("q", "q")}, "each once"),
        ({"targets": ("q_proj",)}, r"targets are \['q_proj'\]"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fresh(**changes)


def test_a_policy_has_one_set_of_adapters() -> None:
    with pytest.raises(ValueError, match="has adapters already"):
        add_lora(fresh(), rank=2, alpha=2)


@pytest.mark.parametrize("call", [save_adapters, load_adapters])
def test_a_policy_without_adapters_is_refused_before_a_file_is_touched(
    call: Callable[..., None], tmp_path: Path
) -> None:
    policy = init_policy(make_config(), 0)
    with pytest.raises(ValueError, match=r"the policy has no adapters; add them with add_lora"):
        call(policy, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []
