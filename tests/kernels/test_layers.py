"""Tests of linear map, norm, rotation and gate against float64 formulas and transformers' own modules."""

import math
from collections.abc import Iterator

import pytest
import torch
from batch_invariance import rows_are_batch_invariant
from torch import Tensor

from thresher.kernels import layers, operands
from thresher.kernels.layers import (
    UNCUT,
    linear,
    norm_heads,
    rms_norm,
    rope_table,
    rotate,
    rotate_and_store,
    rotated_heads,
    silu_gate,
)
from thresher.kernels.operands import onednn_is_faster


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Use three threads, with which torch splits long loops at odd places on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def assert_product(found: Tensor, left: Tensor, right: Tensor) -> None:
    """Check that float32 sums of K products are off by K roundings of the sizes' sum (Higham 2002, equation 3.5)."""
    left, right = left.double(), right.double()
    bound = len(right) * 2**-24 * (left.abs() @ right.abs())
    assert ((found.double() - left @ right).abs() <= bound).all()


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(operands, "_mkl_lacks_avx512", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 48])
def test_linear(onednn: bool, rows: int, bias: bool) -> None:
    """Output and all gradients are right, also with operands that are transposed views."""
    x_TI, weight_OI = (tensor.requires_grad_() for tensor in (randn(700, rows).t(), randn(700, 400, seed=1).t()))
    bias_O = randn(400, seed=2).requires_grad_() if bias else None
    y_TO, dy_TO = linear(x_TI, weight_OI, bias_O), randn(400, rows, seed=3).t()
    assert ("OneDnn" in type(y_TO.grad_fn).__name__) == (onednn and rows > 0)
    y_TO.backward(dy_TO)
    with torch.no_grad():
        if bias_O is None:
            assert_product(y_TO, x_TI, weight_OI.t())
        else:  # a bias is one more term
            ones_T1 = torch.ones(rows, 1)
            assert_product(y_TO, torch.cat([x_TI, ones_T1], 1), torch.cat([weight_OI.t(), bias_O[None]]))
            assert bias_O.grad is not None
            assert_product(bias_O.grad[None], ones_T1.t(), dy_TO)
    assert x_TI.grad is not None and weight_OI.grad is not None
    assert_product(x_TI.grad, dy_TO, weight_OI.detach())
    assert_product(weight_OI.grad, dy_TO.t(), x_TI.detach())


def test_linear_makes_no_gradient_that_nobody_asks_for(onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    product = layers.onednn_product
    monkeypatch.setattr(layers, "onednn_product", lambda *operands: calls.append(1) or product(*operands))
    weight_OI, x_TI = randn(700, 400), randn(16, 400, seed=1)
    linear(x_TI.requires_grad_(), weight_OI).sum().backward()
    assert len(calls) == 2 * onednn and weight_OI.grad is None
    linear(x_TI.detach(), weight_OI.requires_grad_()).sum().backward()
    assert len(calls) == 4 * onednn


def test_onednn_multiplies_in_float32_on_an_amd_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "_mkl_lacks_avx512", lambda: True)
    weight = torch.empty(2, 2)
    assert onednn_is_faster(weight)
    assert not any(map(onednn_is_faster, (weight.double(), weight.bfloat16(), weight.to("meta"))))
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)  # as torch.backends.mkldnn.flags sets it
    assert not onednn_is_faster(weight)
    monkeypatch.undo()
    for vendor, avx512, expected in [(True, True, True), (True, False, False), (False, True, False)]:
        operands._mkl_lacks_avx512.cache_clear()
        monkeypatch.setattr(operands, "is_amd", lambda vendor=vendor: vendor)
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda avx512=avx512: avx512)
        libraries = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
        assert onednn_is_faster(weight) == (expected and libraries)
    operands._mkl_lacks_avx512.cache_clear()


@pytest.mark.skipif(not operands._mkl_lacks_avx512(), reason="oneDNN multiplies on an AMD processor with AVX-512")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_of_onednn_do_not_depend_on_their_batch(threads: int) -> None:
    """docs/design.md promises this."""
    assert rows_are_batch_invariant([(960, 576), (576, 1536)], threads)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 33), (3, 896)])
def test_rms_norm(rows: int, width: int, scale: float) -> None:
    x_TH, weight_H = randn(rows, width) * scale, 1 + 0.5 * randn(width, seed=1)
    x, w = x_TH.double(), weight_H.double()
    expected = w * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x_TH, weight_H, 1e-6).double(), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_in_bfloat16_rounds_where_qwen2_does() -> None:
    modeling = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
    x_TH, weight_H = randn(64, 96, dtype=torch.bfloat16), (1 + randn(96, seed=1)).bfloat16()
    theirs = modeling.Qwen2RMSNorm(96, eps=1e-6)
    theirs.weight.data = weight_H
    assert torch.equal(rms_norm(x_TH, weight_H, 1e-6), theirs(x_TH))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("theta", [300.0, 1e4, 1e6])
@pytest.mark.parametrize("dim", [2, 10, 64])
def test_rotation_by_the_formula(dim: int, theta: float) -> None:
    """Pair i, of the i-th elements of both halves, is a complex number turned by position * theta^(-2i/D)."""
    positions_T = torch.tensor([0, 1, 17, 400, 2047])
    x_TND = randn(5, 3, dim)
    turned_TND = rotate(x_TND, rope_table(positions_T, dim, theta, torch.float32))
    half = dim // 2
    pairs = torch.complex(x_TND[..., :half].double(), x_TND[..., half:].double())
    power = 2 * torch.arange(half).double() / dim
    angle = positions_T.double()[:, None] * theta**-power
    expected = pairs * torch.exp(1j * angle)[:, None]
    # In float32 the power is rounded, theta to it has an error of at most two roundings, their quotient of one, cosine
    # and sine of two, a product and a sum of one each.
    off = 2.0**-24 * (angle * (power * math.log(theta) + 3) + 4 * 2**0.5)[:, None] * pairs.abs()
    for found, true in zip(turned_TND.double().split(half, -1), (expected.real, expected.imag), strict=True):
        assert ((found - true).abs() <= 1.01 * off).all()  # bound: roundings, counted
    assert torch.equal(turned_TND[0], x_TND[0]), "position 0 is not turned"


LLAMA_3_1 = (8.0, 1.0, 4.0, 8192)


def test_scaled_angles_by_the_formula() -> None:
    """Long waves are divided by the factor, short ones unchanged, and those in between interpolated, as Llama 3.1
    defines it: here by wavelengths, in the code by turns."""
    factor, low, high, context = LLAMA_3_1
    positions_T = torch.tensor([0, 1, 17, 400, 2047])
    plain = 5e5 ** (-2 * torch.arange(64).double() / 128)
    wave = 2 * torch.pi / plain
    between = (context / wave - low) / (high - low)
    expected = torch.where(wave > context / low, plain / factor, plain)
    middle = (wave <= context / low) & (wave >= context / high)
    expected = torch.where(middle, (1 - between) * plain / factor + between * plain, expected)
    assert 0 < middle.sum() < 10 and (expected < 0.2 * plain).any() and (expected == plain).any()
    table = rope_table(positions_T, 128, 5e5, torch.float32, LLAMA_3_1)
    angle = positions_T.double()[:, None] * expected
    torch.testing.assert_close(table[0, :, 0].double(), angle.cos(), rtol=0, atol=5e-4)
    torch.testing.assert_close(table[1, :, 0].double(), angle.sin(), rtol=0, atol=5e-4)


@pytest.mark.parametrize("scaling", [LLAMA_3_1, (32.0, 1.0, 4.0, 8192), (1.5, 0.5, 3.0, 64)])
def test_scaled_angles_are_those_of_transformers(scaling: tuple[float, float, float, float]) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    config = modeling.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", **dict(zip(names, scaling, strict=True))},
        max_position_embeddings=131_072,
    )
    positions_T = torch.arange(0, 131_072, 997)
    cos, sin = modeling.LlamaRotaryEmbedding(config)(torch.ones(1), positions_T[None])
    table = rope_table(positions_T, 64, 5e5, torch.float32, scaling)
    # An angle of up to 131,072 radians in float32 is off by half a unit in the last place, 2^-8; two roundings of its
    # factor add as much each.
    for ours, theirs in zip(table[:, :, 0], (cos[0], sin[0]), strict=True):
        limit = 3 * 2.0**-24 * positions_T[:, None] + 1e-6
        assert ((ours - theirs[:, :32]).abs() <= limit).all()


def test_scores_depend_on_the_distance_only() -> None:
    q, k = randn(1, 1, 16), randn(1, 1, 16, seed=1)

    def score(at: int, of: int) -> float:
        turned = [rotate(x, rope_table(torch.tensor([p]), 16, 1e4, torch.float32)) for x, p in ((q, at), (k, of))]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert abs(score(5, 2) - score(6, 2)) > 1e-2


def test_rope_table_rounds_after_the_cosine() -> None:
    table = rope_table(torch.arange(3000), 32, 1e4, torch.bfloat16)
    exact = rope_table(torch.arange(3000), 32, 1e4, torch.float32)
    assert table.shape == (2, 3000, 1, 16) and table.dtype == torch.bfloat16
    assert torch.equal(table, exact.bfloat16())


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (3, 1, 10)])
def test_heads_are_normed_alike_in_every_batch(heads: int, kv_heads: int, dim: int) -> None:
    qkv_TMD = randn(700, heads + 2 * kv_heads, dim)
    weights = 1 + 0.5 * randn(2, dim, seed=1)
    together_TMD = norm_heads(qkv_TMD, *weights, kv_heads, 1e-6)
    for rows in (slice(0, 1), slice(17, 18), slice(5, 40), slice(300, 699)):
        assert torch.equal(norm_heads(qkv_TMD[rows], *weights, kv_heads, 1e-6), together_TMD[rows])


def test_silu_gate_by_the_formula_and_its_gradient() -> None:
    x_T2I = torch.cat([randn(4, 14) * 3, torch.tensor([[-200.0, 200.0] * 7])])
    g, u = x_T2I.double().chunk(2, -1)
    torch.testing.assert_close(silu_gate(x_T2I).double(), g * torch.sigmoid(g) * u, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(silu_gate, x_T2I[:4].double().requires_grad_())


def test_a_long_gate_gives_each_row_its_own_bits(three_threads: None) -> None:
    """Regression: torch split 200 rows of 488 among three threads inside a row, which changed last bits."""
    for inner in (48, 488, 4864, UNCUT + 8):
        x_T2I = randn(max(24, 4 * UNCUT // inner), 2 * inner) * 3
        with torch.no_grad():
            together = silu_gate(x_T2I)
            for rows in range(8, len(x_T2I), 8 if inner > 400 else 300):
                assert torch.equal(silu_gate(x_T2I[:rows].clone()), together[:rows]), (inner, rows)
        torch.testing.assert_close(silu_gate(x_T2I), together, rtol=1e-6, atol=1e-6)


def test_rotated_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    qkv_TMD, rope = randn(4, 7, 10), rope_table(torch.tensor([5, 0, 99, 3]), 10, 300.0, torch.float32)
    block_T, offset_T = torch.tensor([[2, 0, -1, 2], [1, 3, 2, 0]], dtype=torch.int32)
    k_PKSD, v_PKSD = torch.zeros(2, 3, 2, 4, 10)
    q_TND = rotate_and_store(qkv_TMD, rope, 2, k_PKSD, v_PKSD, block_T, offset_T)
    expected_TND, k_TKD, v_TKD = rotated_heads(qkv_TMD, rope, 2)
    assert torch.equal(q_TND, expected_TND) and q_TND.is_contiguous()
    for cache_PKSD, rows_TKD in ((k_PKSD, k_TKD), (v_PKSD, v_TKD)):
        for row, (block, slot) in enumerate(((2, 1), (0, 3), (-1, 2), (2, 0))):
            if block >= 0:
                assert torch.equal(cache_PKSD[block, :, slot], rows_TKD[row])
                cache_PKSD[block, :, slot] = 0
        assert not cache_PKSD.any()


def test_what_is_cached_has_no_gradient() -> None:
    qkv_TMD, rope = randn(1, 3, 4).requires_grad_(), rope_table(torch.tensor([1]), 4, 300.0, torch.float32)
    k_PKSD, v_PKSD = torch.zeros(2, 1, 1, 1, 4)
    place = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="requires a gradient"):
        rotate_and_store(qkv_TMD, rope, 1, k_PKSD, v_PKSD, place, place)
    with torch.no_grad():
        assert rotate_and_store(qkv_TMD, rope, 1, k_PKSD, v_PKSD, place, place).isfinite().all()
