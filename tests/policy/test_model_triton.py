"""Tests of a whole policy on the fused kernels of its layers, against the torch path: hidden states and all gradients.

On a CUDA device the compiled kernels run, otherwise Triton's interpreter, which the layers are forced to use.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
from exact_norms import exact_norms, off
from interpreter import DEVICE
from model_cases import make_config

from thresher.kernels import layers
from thresher.kernels.attention.prefix import PrefixForest
from thresher.kernels.attention.varlen import Varlen
from thresher.kernels.delta import layer, rule
from thresher.policy.config import DeltaShape, RopeScaling
from thresher.policy.lora import adapters, add_lora
from thresher.policy.model import Policy, init_policy

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes

LENGTHS = (5, 1, 9)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 14},
    "llama": {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)},
    "qwen3_5_text": {
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "layer_types": ("linear_attention", "full_attention"),
        "delta": DeltaShape(2, 4, 8, 6, 4),
    },
}


def make_policy(family: str, lora: bool) -> Policy:
    """Return a policy whose norms and biases are random, too: those of `init_policy` would hide mistakes."""
    sizes = {"hidden_size": 40, "intermediate_size": 52, **SHAPES[family]}
    policy = init_policy(make_config(model_type=family, **sizes), seed=0)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=noise))
        if lora:
            add_lora(policy, rank=4, alpha=8.0)
            for _, adapter in adapters(policy):
                adapter.b_OR.copy_(0.3 * torch.randn(adapter.b_OR.shape, generator=noise))
    return policy


def results(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the hidden states of three packed sequences (for a model with states, a prefix and two continuations) and
    the gradients of a weighted sum of them."""
    ids_T = torch.randint(29, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2)).to(policy.device)
    states = policy.config.layer_types
    layout = PrefixForest(LENGTHS, [-1, 0, 0], policy.device) if states else Varlen(LENGTHS, policy.device)
    hidden_TH = policy.hidden(ids_T, layout.positions_T, layout)
    weights_TH = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(3)).to(hidden_TH)
    (hidden_TH * weights_TH).sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {"hidden": hidden_TH.detach(), **grads}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.fast_cases(2)
def test_hidden_states_and_gradients(family: str, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error against float64 is at most four times the torch path's, of this tensor and of all together."""
    policy = make_policy(family, lora)
    with exact_norms():
        truth = results(deepcopy(policy).double())
    torchs = results(deepcopy(policy))
    served: list[Any] = []

    def serves(tensor: torch.Tensor) -> bool:
        served.append(tensor.shape)
        return True

    for module in (layers, layer, rule):
        monkeypatch.setattr(module, "uses_triton", serves)
    fused = results(deepcopy(policy).to(DEVICE))
    layer_count = policy.config.num_hidden_layers
    # Two norms, a rotation and a gate per layer, and the last norm; Qwen3's norms of heads. With states, norms and
    # gates; norms of heads and rotation of one layer; convolution, norm of heads and the rule, four times, of another.
    hybrid = {"qwen3_5_text": 2 * 3 + 2 + 6 + 1}
    assert len(served) == hybrid.get(family, (5 if family == "qwen3" else 4) * layer_count + 1)
    assert fused.keys() == torchs.keys() == truth.keys() and len(truth) > (8 if lora else 14)
    assert any("norm" in name for name in truth) != lora
    of_torch = off(torchs, truth)
    assert of_torch <= 1e-5  # about a hundred roundings of float32
    for name, true in truth.items():
        assert true.norm() > 0, name
        assert off(fused, {name: true}) <= 4 * (off(torchs, {name: true}) + of_torch), name
    assert not torch.equal(fused["hidden"].cpu(), torchs["hidden"]), "the torch path ran twice"
