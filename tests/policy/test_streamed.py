"""A frozen policy whose layers come over one by one: the bits of the policy itself, in the room of two layers."""

from collections.abc import Callable

import pytest
import torch

from thresher.kernels.attention.varlen import Varlen
from thresher.policy.config import RopeScaling
from thresher.policy.model import Policy
from thresher.policy.streamed import StreamedPolicy


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.fast_cases(1)
def test_hidden_states_are_the_policys(
    make_tiny_policy: Callable[..., Policy], layers: int, dtype: torch.dtype
) -> None:
    policy = make_tiny_policy(num_hidden_layers=layers, tie_word_embeddings=layers == 2).to(dtype)
    streamed = StreamedPolicy(policy, "cpu")
    layout, ids_T = Varlen([7, 4]), torch.arange(11) + 1
    for _ in range(2):  # the second forward begins where the first has left off
        found = streamed.hidden(ids_T, layout.positions_T, layout)
        assert torch.equal(found, policy.hidden(ids_T, layout.positions_T, layout)) and not found.requires_grad
    assert torch.equal(streamed.head_VH, policy.head_VH)
    own = [parameter.numel() for parameter in policy.layers[0].parameters()]
    assert sum(parameter.numel() for parameter in streamed.parameters()) == min(layers, 2) * sum(own) + len(policy.norm)
    with torch.no_grad(), streamed.adapters_off():
        policy.layers[-1].down_weight.zero_()
    if layers > 2:
        # Layers are brought over in every forward, not kept.
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
