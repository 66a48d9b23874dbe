"""Tests of other ways to the same hidden states: layers copied over one by one, and layers recomputed in backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from thresher.kernels.attention.varlen import Varlen
from thresher.policy.config import RopeScaling
from thresher.policy.lora import add_lora
from thresher.policy.model import Policy
from thresher.policy.streamed import StreamedPolicy

IDS = torch.arange(24) * 5 % 28 + 1


class Counted:
    """A layout that counts its calls and exposes nothing else."""

    def __init__(self) -> None:
        self.layout, self.calls = Varlen([15, 9]), [0] * 3

    def __call__(self, layer: int, *arguments: Any) -> torch.Tensor:
        self.calls[layer] += 1
        return self.layout(layer, *arguments)


def passed(policy: Policy, recompute: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int], int]:
    """Return hidden states, gradients, attention calls per layer, and bytes that the forward kept for the backward."""
    attend, kept = Counted(), {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden_TH = policy.hidden(IDS, attend.layout.positions_T, attend, recompute)
    weights_TH = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(1))
    hidden_TH.backward(weights_TH.to(hidden_TH.dtype))
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    for parameter in policy.parameters():
        parameter.grad = None
    return hidden_TH.detach(), found, attend.calls, sum(kept.values())


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.fast_cases(1)
def test_recomputing_changes_no_bit(make_tiny_policy: Callable[..., Policy], adapted: bool) -> None:
    policy = make_tiny_policy(num_hidden_layers=3).requires_grad_(True)
    if adapted:
        add_lora(policy, rank=4, alpha=8.0)
    plain, again = passed(policy, False), passed(policy, True)
    assert torch.equal(plain[0], again[0]) and plain[1].keys() == again[1].keys() != set()
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])
    assert plain[2] == [1, 1, 1] and again[2] == [2, 2, 2]
    weights = sum(parameter.nbytes for parameter in policy.parameters())
    assert again[3] < plain[3] and again[3] < weights + 12 * plain[0].nbytes


def test_without_gradients_nothing_is_computed_twice(make_tiny_policy: Callable[..., Policy]) -> None:
    policy, attend = make_tiny_policy(num_hidden_layers=3).requires_grad_(True), Counted()
    with torch.no_grad(), policy.adapters_off():
        policy.hidden(IDS, attend.layout.positions_T, attend, True)
    assert attend.calls == [1, 1, 1]


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.fast_cases(1)
def test_hidden_states_are_the_policys(
    make_tiny_policy: Callable[..., Policy], layers: int, dtype: torch.dtype
) -> None:
    policy = make_tiny_policy(num_hidden_layers=layers, tie_word_embeddings=layers == 2).to(dtype)
    streamed = StreamedPolicy(policy, "cpu")
    layout, ids_T = Varlen([7, 4]), torch.arange(11) + 1
    for _ in range(2):  # the second forward starts where the first one stopped
        found = streamed.hidden(ids_T, layout.positions_T, layout)
        assert torch.equal(found, policy.hidden(ids_T, layout.positions_T, layout)) and not found.requires_grad
    assert torch.equal(streamed.head_VH, policy.head_VH)
    own = [parameter.numel() for parameter in policy.layers[0].parameters()]
    assert sum(parameter.numel() for parameter in streamed.parameters()) == min(layers, 2) * sum(own) + len(policy.norm)
    with torch.no_grad(), streamed.adapters_off():
        policy.layers[-1].down_weight.zero_()
    if layers > 2:
        # Layers are copied in every forward, not kept.
        moved = streamed.hidden(ids_T, layout.positions_T, layout)
        assert torch.equal(moved, policy.hidden(ids_T, layout.positions_T, layout)) and not torch.equal(moved, found)


def test_positions_are_scaled_as_the_policys_are(make_tiny_policy: Callable[..., Policy]) -> None:
    policy = make_tiny_policy()
    policy.config = policy.config.replace(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))
    layout, ids_T = Varlen([150]), torch.arange(150) % 90
    scaled = policy.hidden(ids_T, layout.positions_T, layout)
    assert torch.equal(StreamedPolicy(policy, "cpu").hidden(ids_T, layout.positions_T, layout), scaled)
    policy.config = policy.config.replace(rope_scaling=None)
    assert not torch.equal(policy.hidden(ids_T, layout.positions_T, layout), scaled)


def test_adapters_are_refused(make_tiny_policy: Callable[..., Policy]) -> None:
    policy = make_tiny_policy()
    add_lora(policy, rank=2, alpha=2.0)
    with pytest.raises(ValueError, match="in CPU memory, without adapters"):
        StreamedPolicy(policy, "cpu")
