"""What the plan says that autograd keeps, against what torch keeps: every storage that is saved for a backward."""

from typing import Any

import pytest
import torch
from model_cases import make_config

from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.planning.memory import PlanSetting, activation_bytes, layer_bytes, read_setting
from thresher.kernels.attention.prefix import PrefixForest
from thresher.kernels.attention.varlen import Varlen
from thresher.policy.config import ModelConfig
from thresher.policy.lora import add_lora
from thresher.policy.model import init_policy

TOKENS, SEQUENCES, RANK = 48, 3, 5
# Of TOKENS tokens: sequences by themselves, and two that begin with half of them.
LAYOUTS = {
    False: lambda: Varlen([TOKENS // SEQUENCES] * SEQUENCES),
    True: lambda: PrefixForest([TOKENS // 2, TOKENS // 4, TOKENS // 4], [-1, 0, 0]),
}
ALL = ("q", "k", "v", "o", "gate", "up", "down")


def saved_bytes(config: ModelConfig, dtype: torch.dtype, targets: tuple[str, ...] | None, shared: bool) -> float:
    """Bytes a token of the storages that a forward saves, parameters and what is made of them alone left out."""
    policy = init_policy(config, 0).to(dtype)
    policy.requires_grad_(True)
    if targets is not None:
        add_lora(policy, rank=RANK, alpha=8.0, targets=targets)
    parameters = {x.untyped_storage().data_ptr() for x in policy.parameters()}
    layout, kept = LAYOUTS[shared](), {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        key = x.untyped_storage().data_ptr()
        # A and B, cast and padded, are saved once a forward: neither of their axes is one of tokens.
        if key not in parameters and (x.dim() == 1 or TOKENS in x.shape or TOKENS // SEQUENCES in x.shape):
            kept[key] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden_TH = policy.hidden(torch.arange(TOKENS) % config.vocab_size, layout.positions_T, layout)
    assert hidden_TH.requires_grad
    return sum(kept.values()) / TOKENS


def setting_of(
    dtype: torch.dtype, targets: tuple[str, ...] | None, device: str = "cpu", shared: bool = False
) -> PlanSetting:
    """shared: prompts of a thousand tokens, once for eight samples."""
    table: dict[str, Any] = {
        "model": {"path": "m", "dtype": str(dtype)[6:], "device": device},
        "rollout": {"max_context": 1032, "max_policy_tokens": 32, "max_turns": 1},
        "optim": {"share_prefix": shared},
    }
    if targets is not None:
        table["lora"] = {"rank": RANK, "targets": list(targets)}
    setting = read_setting(from_dict(Recipe, table, "test"))
    assert setting.prompt_once is shared
    return setting


@pytest.mark.parametrize("targets", [None, ALL, ("q", "v"), ("v", "o", "down")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_the_formula_is_what_torch_saves(dtype: torch.dtype, targets: tuple[str, ...] | None, shared: bool) -> None:
    """To the byte, with grouped queries, three layers, and widths that no two axes share."""
    config = make_config(
        num_hidden_layers=3, hidden_size=56, intermediate_size=104, num_attention_heads=14, num_key_value_heads=2
    )
    setting = setting_of(dtype, targets, shared=shared)
    expected = activation_bytes(config, setting, checkpointed=False)
    assert saved_bytes(config, dtype, targets, shared) == expected


def test_a_layer_on_a_gpu_by_hand() -> None:
    """Qwen2.5-7B's layer in bfloat16: H 3584, I 18,944, N 28, K 4, D 128. The fused norm keeps its sum, the fused gate
    only its input; queries and keys lie beside the projection that they were turned from."""
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
