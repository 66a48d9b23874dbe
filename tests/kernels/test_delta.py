"""Tests of the gated delta rule: the chunked form against the recurrence in float64, its gradients and states, and its
error compared with that of transformers' torch code."""

from importlib.util import find_spec
from inspect import unwrap
from itertools import pairwise
from typing import Any

import pytest
import torch
from delta_cases import D, E, K, V, drawn, gradients
from torch import Tensor

from thresher.kernels import gated_delta
from thresher.kernels.delta import reference_gated_delta
from thresher.kernels.delta import rule as delta_rule

LENGTHS = (0, 1, 5, 16, 17, 3, 40)


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
@pytest.mark.parametrize("forgets", [0.01, 1.0])
def test_by_chunks_results_and_gradients_are_the_recurrences(chunk: int, forgets: float) -> None:
    """In float64, so that rounding hides nothing: a hundred roundings of values of about 1, and 1e-13 a factor."""
    given = drawn(LENGTHS, forgets=forgets)
    wanted, found = gradients(reference_gated_delta, *given), gradients(gated_delta, *given, chunk=chunk)
    assert len(wanted) == len(found) == 8
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-12 * max(float(theirs.abs().max()), 1.0)


def test_a_sequence_goes_on_where_another_ended() -> None:
    """The gradient flows back through the state: two continuations of one prefix, as whole sequences and as a trie."""
    (tensors, _, _), first, rest = drawn((30,)), 11, 19
    inputs = [x.requires_grad_(True) for x in tensors]
    whole = [torch.cat([x, x[:first], x[first:].flip(0)]) for x in inputs]
    out, final = gated_delta(*whole, [0, 30, 60], chunk=4)
    (out[first:30].sum() + out[30 + first :].square().sum() + final.sum()).backward()
    wanted = [x.grad.clone() for x in inputs]
    for x in inputs:
        x.grad = None
    _, begun = gated_delta(*(x[:first] for x in inputs), [0, first], chunk=4)
    tails = [torch.cat([x[first:], x[first:].flip(0)]) for x in inputs]
    told, ended = gated_delta(*tails, [0, rest, 2 * rest], begun.expand(2, -1, -1, -1), chunk=4)
    assert torch.allclose(told, torch.cat([out[first:30], out[30 + first :]]), rtol=0, atol=1e-13)
    assert torch.allclose(ended, final, rtol=0, atol=1e-13)
    (told[:rest].sum() + told[rest:].square().sum() + ended.sum()).backward()
    for x, grad in zip(inputs, wanted, strict=True):
        assert torch.allclose(x.grad, grad, rtol=0, atol=1e-12)


def test_nothing_overflows_where_all_is_forgotten() -> None:
    """A decay of -1e4 per token: the product underflows, o is the last correction alone, and no gradient is NaN."""
    tensors, bounds, state = drawn((70,), dtype=torch.float32)
    tensors[3] = torch.full_like(tensors[3], -1e4)
    out, _, *slopes = gradients(gated_delta, tensors, bounds, state)
    q, k, v, _, beta = tensors
    q_TV, k_TV = (x.repeat_interleave(V // K, 1) for x in (q, k))
    wanted = ((q_TV * k_TV).sum(-1) * beta)[..., None] * v * D**-0.5
    # Sums of D products, and three factors: ten roundings of half a unit each.
    assert float((out - wanted).abs().max()) <= 10 * 2**-24 * float(v.abs().max())
    assert all(bool(slope.isfinite().all()) for slope in slopes)


def test_float32_is_at_most_twice_as_far_from_the_truth_as_transformers() -> None:
    """Compares whole tensors, results and gradients, with the model's heads of 128 and over several chunks."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    plain = unwrap(modeling.torch_chunk_gated_delta_rule)  # if fla is installed, its kernels replace the function
    lengths = (200, 64, 150)
    tensors, bounds, state = drawn(lengths, forgets=0.1, width=128)

    def theirs(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, _: Any, state: Tensor) -> Any:
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))  # older versions require it
        found = [
            plain(
                *(x[None, a:b] for x in (q, k, v)),
                g=decay[None, a:b],
                beta=beta[None, a:b],
                initial_state=state[n : n + 1],
                output_final_state=True,
            )
            for n, (a, b) in enumerate(pairwise(bounds))
        ]
        return torch.cat([out[0] for out, _ in found]), torch.cat([final for _, final in found])

    narrow, narrow_state = [x.float() for x in tensors], state.float()
    # The truth is computed from the float32 inputs.
    truth = gradients(reference_gated_delta, [x.double() for x in narrow], bounds, narrow_state.double())
    ours, peer = (gradients(f, narrow, bounds, narrow_state) for f in (gated_delta, theirs))
    for mine, other, exact in zip(ours, peer, truth, strict=True):
        errors = [float((x.double() - exact).norm()) for x in (mine, other)]
        assert errors[0] <= 2 * errors[1]


def test_dtypes_and_what_does_not_fit() -> None:
    (q, k, v, decay, beta), bounds, state = drawn((5, 3), dtype=torch.float32)
    out, final = gated_delta(q.bfloat16(), k.bfloat16(), v.bfloat16(), decay, beta, torch.tensor(bounds))
    assert (out.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    empty = [x[:0] for x in (q, k, v, decay, beta)]
    out, final = gated_delta(*empty, [0, 0, 0], state)
    assert out.shape == (0, V, E) and torch.equal(final, state)
    for wrong, why in (
        ((q, k[:, :1], v, decay, beta, bounds), r"expected \[T, K, D\] twice"),
        ((q, k, v[:, :3], decay[:, :3], beta[:, :3], bounds), "V a multiple of K"),
        ((q, k, v, decay[:-1], beta, bounds), r"expected \[T, V, E\], \[T, V\] and \[T, V\]"),
        ((q, k, v, decay, beta, [0, 5, 3, 8]), r"cu_seqlens is \[0, 5, 3, 8\]; expected bounds that rise from 0 to 8"),
        ((q, k, v, decay, beta, [0, 5]), "from 0 to 8"),
        ((q, k, v, decay, beta, bounds, state[:1]), r"initial_state is \[1, 4, 8, 6\]; expected \[2, 4, 8, 6\]"),
    ):
        with pytest.raises(ValueError, match=why):
            gated_delta(*wrong)


def test_flash_linear_attention_gets_what_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences along the second axis, decays as logs, states [N, V, D, E]; the GPU test runs the library itself."""

    def rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        assert given.keys() == {"initial_state", "output_final_state", "cu_seqlens"} and given["output_final_state"]
        assert given["cu_seqlens"].dtype == torch.int64
        flat = (x.squeeze(0) for x in (q, k, v, g, beta))
        out, final = reference_gated_delta(*flat, given["cu_seqlens"], given["initial_state"])
        return out[None], final

    monkeypatch.setattr(delta_rule, "load_fla", lambda device: rule)
    given = drawn(LENGTHS)
    wanted, found = gradients(reference_gated_delta, *given), gradients(gated_delta, *given, backend="fla")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("fla") is None, reason="needs a GPU and fla")
def test_flash_linear_attention_on_a_gpu() -> None:
    tensors, bounds, state = drawn((5, 130, 64), dtype=torch.bfloat16, width=64, values=64, device="cuda")
    wide = [x.double() for x in (*tensors, state)]
    wanted = gradients(reference_gated_delta, wide[:5], bounds, wide[5])
    for ours, true in zip(gradients(gated_delta, tensors, bounds, state, backend="fla"), wanted, strict=True):
        assert float((ours.double() - true).norm()) <= 0.05 * float(true.norm())


def test_a_backend_that_is_not_there_is_refused() -> None:
    tensors, bounds, state = drawn((3,))
    with pytest.raises(ValueError, match='backend is "fla", which needs a GPU, and v is on cpu; expected "auto"'):
        gated_delta(*tensors, bounds, state, backend="fla")
    with pytest.raises(ValueError, match='backend is \'flash\'; expected "auto" or "fla"'):
        gated_delta(*tensors, bounds, state, backend="flash")  # type: ignore[arg-type]
