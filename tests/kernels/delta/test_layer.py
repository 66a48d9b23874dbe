"""Tests of the layer around the gated delta rule: gradients that backward recomputes, by differences in float64; and
the tensors that autograd keeps."""

import pytest
import torch
from delta_cases import D, E, K, V
from interpreter import saved_tensors
from torch import Tensor

from thresher.kernels.delta.layer import DeltaInputs, Spans, delta_attention, gated_norm

W = 3
CHANNELS = 2 * K * D + V * E


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
def test_the_gradient_of_convolution_heads_and_rule() -> None:
    """The forest has a prefix of one token, which a window reaches beyond, and two segments that continue it."""
    spans = Spans([1, 4, 2], [-1, 0, 0], torch.device("cpu"))
    given = normal(7, CHANNELS, seed=1), normal(CHANNELS, W, seed=2), -normal(7, V, seed=3).exp(), normal(7, V, seed=4)

    def attend(mixed_TC: Tensor, conv_CW: Tensor, decay_TV: Tensor, beta_TV: Tensor) -> Tensor:
        return delta_attention(DeltaInputs(mixed_TC, conv_CW, decay_TV, beta_TV.sigmoid(), K, D), spans)

    assert torch.autograd.gradcheck(attend, tuple(x.requires_grad_() for x in given))


def test_the_gradient_of_the_gated_norm() -> None:
    given = tuple(x.requires_grad_() for x in (normal(3, 2, 5, seed=1), normal(3, 2, 5, seed=2), normal(5, seed=3)))
    assert torch.autograd.gradcheck(lambda o, z, w: gated_norm(o, z, w, 1e-6), given)


def test_the_gated_norm_keeps_its_inputs_alone() -> None:
    o, z, w = (
        x.float().requires_grad_() for x in (normal(3, 2, 5, seed=1), normal(3, 2, 5, seed=2), normal(5, seed=3))
    )
    with saved_tensors() as saved:
        y = gated_norm(o, z, w, 1e-6)
    assert saved == [x.data_ptr() for x in (o, z, w)]
    with torch.no_grad():
        assert torch.equal(gated_norm(o, z, w, 1e-6), y)
