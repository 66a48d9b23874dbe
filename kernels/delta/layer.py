"""Operations of a layer with the gated delta rule between its projections, for whole sequences and for segments, each
of which continues another (Yang, Kautz, Hatamizadeh 2024, section 3.4, as in Qwen3.5).

    x = silu(conv(mixed))           depthwise and causal: a token sees itself and the W - 1 before it
    q, k, v = x                     q / |q|, k / |k| of each head
    decay = -exp(a_log) softplus(a + dt_bias)         beta = sigmoid(b)
    o = gated delta rule            (rule.py)
    y = w * o / rms(o) * silu(z)    of each head

Convolution, gates and norms are computed in float32 whatever the model's dtype, or in float64. q, k, v and o are
rounded to the model's dtype, as in transformers; rule_triton.py describes what the rule itself rounds. The W - 1 tokens
before a segment's first are its parent's last. Rows of a rollout: steps.py.

Without gradients a row's bits do not depend on the other rows (CPU) in `gates` and `gated_norm`, which a rollout calls:
their elementwise functions go through `uncut`.

Axes: T packed tokens, C channels of the convolution, W tokens that it sees, R rows whose window is not the W rows up to
them, X entries of a list, K query and key heads, V value heads, D dimension of a key, E of a value.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.kernels.delta.rule import ChunkPlan, add_rows, gated_delta_forest, sent
from thresher.kernels.layers import UNCUT, rms_norm, uses_triton

UNIT_EPS = 1e-6  # added to the square of a query's or key's length
VECTOR = 16  # elements; a multiple of it leaves no rest, which torch would compute by scalars


class DeltaInputs(NamedTuple):
    """Inputs that a layer passes to its layout.

    mixed: q, k and v of all heads, before the convolution, in the model's dtype. decay, beta: float32."""

    mixed_TC: Tensor
    conv_CW: Tensor
    decay_TV: Tensor
    beta_TV: Tensor
    key_heads: int
    key_dim: int

    def heads(self, convolved_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, K, D], k [T, K, D] and v [T, V, E] from the convolution's output, in the model's dtype."""
        keys, heads = self.key_heads * self.key_dim, self.beta_TV.shape[1]
        q, k, v = convolved_TC.split([keys, keys, convolved_TC.shape[1] - 2 * keys], 1)
        q_TKD, k_TKD = (unit(x.unflatten(1, (self.key_heads, self.key_dim))) for x in (q, k))
        q_TKD, k_TKD, v_TVE = (x.to(self.mixed_TC.dtype) for x in (q_TKD, k_TKD, v.unflatten(1, (heads, -1))))
        return q_TKD, k_TKD, v_TVE


class Spans:
    """Packed segments of at least one token, each of which begins where its parent ended; a root has parent -1.

    A parent comes before its children."""

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> None:
        assert all(parent < n for n, parent in enumerate(parents)) and all(lengths)
        self.lengths, self.parents, self.device = list(lengths), list(parents), device
        self.bounds = [0, *accumulate(self.lengths)]
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}
        self._readers: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def plan(self) -> ChunkPlan:
        return ChunkPlan(self.bounds, self.parents, self.device)

    @cached_property
    def _before(self) -> npt.NDArray[np.int64]:
        """Return `before_T` on the host."""
        ends = np.array([*self.bounds[1:], 0])
        before_T = np.arange(-1, self.bounds[-1] - 1)
        before_T[self.bounds[:-1]] = ends[self.parents] - 1
        return before_T

    @cached_property
    def before_T(self) -> Tensor:
        """Return the row that each row follows, -1 for none: int32, on the device."""
        return self._sent(self._before.astype(np.int32))

    def _edges(self, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the rows [R] whose window is not the rows up to them, and the rows each sees [R, W], -1 for none."""
        seen = [np.arange(self.bounds[-1])]
        while len(seen) < width:
            seen.append(np.where(seen[-1] < 0, -1, self._before[seen[-1]]))
        window_TW = np.stack(seen[::-1], 1)
        rows_R = np.flatnonzero((window_TW != seen[0][:, None] - np.arange(width)[::-1]).any(1))
        return rows_R, window_TW[rows_R]

    def windows(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the rows [R] whose window is not the rows up to them, and the rows each sees [R, W], T for none."""
        if width not in self._windows:
            rows_R, window_RW = self._edges(width)
            window_RW = np.where(window_RW < 0, self.bounds[-1], window_RW)
            self._windows[width] = self._sent(rows_R), self._sent(window_RW)
        return self._windows[width]

    def readers(self, width: int) -> tuple[Tensor, Tensor]:
        """Return, for each row t, the rows s that see it j steps before them although t is not s - j.

        As two tensors, int32, on the device: where each t's entries begin [T + 1], and the entries [X], W s + j."""
        if width not in self._readers:
            rows_R, window_RW = self._edges(width)
            back_W = np.arange(width)[::-1]
            row_X, place_X = np.nonzero((window_RW >= 0) & (window_RW != rows_R[:, None] - back_W))
            seen_X = window_RW[row_X, place_X]
            order_X = np.argsort(seen_X, kind="stable")
            begin = np.searchsorted(seen_X[order_X], np.arange(self.bounds[-1] + 1))
            reader_X = (rows_R[row_X] * width + back_W[place_X])[order_X]
            self._readers[width] = self._sent(begin.astype(np.int32)), self._sent(reader_X.astype(np.int32))
        return self._readers[width]

    def _sent(self, x: npt.NDArray[np.generic]) -> Tensor:
        with torch.inference_mode(False):  # they outlive the first forward that uses them
            return sent(torch.from_numpy(x), self.device)


def delta_attention(inputs: DeltaInputs, spans: Spans) -> Tensor:
    """Compute convolution and gated delta rule over segments: [T, V, E] in the model's dtype, differentiable."""
    q_TKD, k_TKD, v_TVE = convolved_heads(inputs, spans)
    return gated_delta_forest(q_TKD, k_TKD, v_TVE, inputs.decay_TV, inputs.beta_TV, spans.plan)


def convolved_heads(inputs: DeltaInputs, spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """Compute q [T, K, D], k [T, K, D] and v [T, V, E] of segments, in the model's dtype, differentiable."""
    if uses_triton(inputs.mixed_TC):
        from thresher.kernels.delta.layer_triton import fused_heads

        readers = partial(spans.readers, inputs.conv_CW.shape[1])
        heads = inputs.key_heads, inputs.beta_TV.shape[1]
        given = inputs.mixed_TC, inputs.conv_CW, spans.before_T
        return fused_heads(*given, readers, heads, inputs.key_dim, UNIT_EPS)
    q_TKD, k_TKD, v_TVE = _ConvolvedHeads.apply(inputs.mixed_TC, inputs.conv_CW, inputs, spans)
    return q_TKD, k_TKD, v_TVE


def uncut(function: Callable[[Tensor], Tensor], x_TX: Tensor) -> Tensor:
    """Apply an elementwise function to [T, ..].

    On a CPU without gradients a row's bits do not depend on T, if T is a multiple of VECTOR. torch itself splits more
    than UNCUT elements among its threads, at any place."""
    width = max(x_TX[:1].numel(), 1)
    rows = max(UNCUT // width, 1)
    if width % VECTOR:
        rows = max(rows // VECTOR, 1) * VECTOR
    if len(x_TX) <= rows or x_TX.is_cuda or torch.is_grad_enabled():
        return function(x_TX)
    return torch.cat([function(part) for part in x_TX.split(rows)])


def gates(a_TV: Tensor, b_TV: Tensor, a_log_V: Tensor, dt_bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """Return decay and beta [T, V], in float32 or wider."""
    dtype = torch.promote_types(a_TV.dtype, torch.float32)
    rate_V = a_log_V.to(dtype).exp()
    steps_TV = uncut(F.softplus, (a_TV.to(dtype) + dt_bias_V.to(dtype)).contiguous())
    return -rate_V * steps_TV, uncut(torch.sigmoid, b_TV.to(dtype).contiguous())


def gated_norm(o_TVE: Tensor, z_TVE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Return the norm of each head times silu(z), [T, V, E] in z's dtype."""
    if uses_triton(z_TVE):
        from thresher.kernels.delta.layer_triton import fused_gated_norm

        return fused_gated_norm(o_TVE, z_TVE, weight_E, eps)
    if torch.is_grad_enabled():
        y_TVE: Tensor = _GatedNorm.apply(o_TVE, z_TVE, weight_E, eps)
        return y_TVE
    return _gated(o_TVE, z_TVE, weight_E, eps, partial(uncut, F.silu))


def _gated(o_TVE: Tensor, z_TVE: Tensor, weight_E: Tensor, eps: float, silu: Callable[[Tensor], Tensor]) -> Tensor:
    o_TVE = o_TVE.to(torch.promote_types(o_TVE.dtype, torch.float32))
    normed_TVE = rms_norm(o_TVE, weight_E.to(o_TVE.dtype), eps)
    return (normed_TVE * silu(z_TVE.to(o_TVE.dtype).contiguous())).to(z_TVE.dtype)


class _GatedNorm(torch.autograd.Function):
    """The gated norm; backward recomputes everything from the inputs."""

    @staticmethod
    def forward(ctx: Any, o_TVE: Tensor, z_TVE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(o_TVE, z_TVE, weight_E)
        ctx.eps = eps
        return _gated(o_TVE, z_TVE, weight_E, eps, F.silu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        o_TVE, z_TVE, weight_E = ctx.saved_tensors
        wide = torch.promote_types(o_TVE.dtype, torch.float32)
        o, z, weight, grad = (x.to(wide) for x in (o_TVE, z_TVE, weight_E, grads[0]))
        factor_TV1 = (o.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normed, share = o * factor_TV1, torch.sigmoid(z)
        through = grad * z * share  # the gradient of w n
        d_weight_E = (through * normed).sum((0, 1)) if ctx.needs_input_grad[2] else None
        through *= weight
        d_o = factor_TV1 * (through - normed * (through * normed).mean(-1, keepdim=True))
        d_z = grad * weight * normed * (share * (1 + z * (1 - share)))
        found = (
            x if x is None else x.to(like.dtype) for x, like in ((d_o, o_TVE), (d_z, z_TVE), (d_weight_E, weight_E))
        )
        return *found, None


def unit(x_TKD: Tensor) -> Tensor:
    """Normalise each head's vector to length 1."""
    return x_TKD * (x_TKD.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


class _ConvolvedHeads(torch.autograd.Function):
    """q, k and v of the convolution, whose output is recomputed in backward.

    Rows whose window is the W rows up to them are computed by shifts of the whole tensor, the few others separately."""

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CW: Tensor, inputs: DeltaInputs, spans: Spans
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x_TC, weight_CW)
        ctx.spans = spans
        q_TKD, k_TKD, v_TVE = inputs.heads(F.silu(_convolved(x_TC, weight_CW, spans)[0]))
        return q_TKD, k_TKD, v_TVE.contiguous()  # a view would keep the whole output of the convolution

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CW = ctx.saved_tensors
        y_TC, wide_TC, weight_WC = _convolved(x_TC, weight_CW, ctx.spans)
        width = len(weight_WC)
        share_TC = torch.sigmoid(y_TC)
        dy_TC = share_TC * (1 + y_TC * (1 - share_TC))
        slopes, first = [], 0
        for grad_TKD in grads[:2]:
            columns = slice(first, first + grad_TKD.shape[1] * grad_TKD.shape[2])
            x_TKD = (y_TC[:, columns] * share_TC[:, columns]).view_as(grad_TKD)
            slopes.append(_unit_backward(x_TKD, grad_TKD.to(x_TKD.dtype)).flatten(1))
            first = columns.stop
        dy_TC *= torch.cat([*slopes, grads[2].flatten(1).to(dy_TC.dtype)], 1)
        rows_R, window_RW = ctx.spans.windows(width)
        edge_RC = dy_TC[rows_R]
        dy_TC[rows_R] = 0
        dx_TC = F.pad(dy_TC * weight_WC[-1], (0, 0, 0, 1))  # with a row for places without a token
        for back in range(1, width):
            dx_TC[: -back - 1].addcmul_(dy_TC[back:], weight_WC[-1 - back])
        add_rows(dx_TC, window_RW.flatten(), (edge_RC[:, None] * weight_WC).flatten(0, 1))
        d_weight_CW = None
        if ctx.needs_input_grad[1]:
            d_weight_WC = torch.einsum("rc,rwc->wc", edge_RC, _rows(wide_TC, window_RW))
            for back in range(width):
                d_weight_WC[-1 - back] += (dy_TC[back:] * wide_TC[: max(len(wide_TC) - back, 0)]).sum(0)
            d_weight_CW = d_weight_WC.T.to(weight_CW.dtype)
        return dx_TC[:-1].to(x_TC.dtype), d_weight_CW, None, None


def _unit_backward(x_TKD: Tensor, grad_TKD: Tensor) -> Tensor:
    """Return the gradient of `unit`'s input."""
    factor_TK1 = (x_TKD.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
    along_TK1 = (x_TKD * grad_TKD).sum(-1, keepdim=True)
    return factor_TK1 * (grad_TKD - x_TKD * (factor_TK1.square() * along_TK1))


def _convolved(x_TC: Tensor, weight_CW: Tensor, spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """Return the convolution, and its operands in the dtype in which they are multiplied."""
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    x_TC, weight_WC = x_TC.to(wide), weight_CW.to(wide).T
    rows_R, window_RW = spans.windows(len(weight_WC))
    y_TC = x_TC * weight_WC[-1]
    for back in range(1, len(weight_WC)):
        y_TC[back:].addcmul_(x_TC[:-back], weight_WC[-1 - back])
    y_TC[rows_R] = (_rows(x_TC, window_RW) * weight_WC).sum(1)
    return y_TC, x_TC, weight_WC


def _rows(x_TC: Tensor, window_RW: Tensor) -> Tensor:
    """Return the rows of each window, [R, W, C], zeros for T."""
    inside = window_RW < len(x_TC)
    return x_TC[window_RW.clamp_max(len(x_TC) - 1)] * inside[..., None]
