"""The gated delta rule, linear attention whose state decays and is corrected: recurrence, and chunked form.

A head has a state S [D, E], which maps a key to the value that was stored for it. With decay_t = log of a factor in
(0, 1] and beta_t in [0, 1]:

    S'  = exp(decay_t) S_{t-1}
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T          the value under k_t moves towards v_t
    o_t = S_t^T q_t / sqrt(D)

(Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, equation 10.) `reference_gated_delta` computes that. In chunks
of C tokens it becomes matrix products (the same paper, section 3.3; the WY form of Bischof and Van Loan 1987). With
c_i the sum of the decays of a chunk up to token i, G_ij = exp(c_i - c_j) for j <= i, else 0, and S the state before:

    q    <- q / sqrt(D)
    A_ij = beta_i G_ij k_i . k_j   for j < i, else 0
    u, w = (1 + A)^-1 [beta v, beta exp(c) k]         independent of S
    x    = u - w S                                    the corrections that the chunk stores
    o_i  = exp(c_i) S^T q_i + sum_j G_ij (q_i . k_j) x_j
    S   <- exp(c_C) S + sum_j exp(c_C - c_j) k_j x_j^T

Only the last three lines, the scan, run chunk by chunk; the rest is computed for all chunks at once. Backward is the
scan in reverse, with P_ij = G_ij q_i . k_j, Q = exp(c) q, R = exp(c_C - c) k:

    dx = P^T do + R dS             dS <- exp(c_C) dS + Q^T do - w^T dx

and again products for all chunks at once: du = dx, dw = -dx S^T, dP = do x^T, dQ = do S^T, dR = x dS^T. It keeps the
inputs, and recomputes the rest.

No exponent is above 0, so nothing overflows. A product of decays may underflow to 0; what it multiplies is then
forgotten, as in the recurrence. Sums c are float64, because a difference of two float32 sums near -100 is off by 1e-5.

Sequences are packed, each with a state before and after it, and gradients pass through both. A sequence may begin where
another ended, by `parents` or by the states. A prefix that several share is therefore computed once.

On a GPU the kernels of rule_triton.py compute this if keys and values both have 32, 64 or 128 dimensions. This file is
their reference, and computes all other cases.

Axes: T tokens of all sequences, B sequences, K query and key heads, V value heads (V / K per key head, adjacent),
D dimension of a key, E of a value; X chunks, C tokens of a chunk (docs/notation.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from thresher.kernels.layers import uses_triton

if TYPE_CHECKING:
    from thresher.kernels.delta.rule_triton import SegmentLists

CHUNK = 64
# The largest workspace of the heads that are computed at a time. On a CPU more heads at a time are no faster.
WORKSPACE_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}


def gated_delta(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay_TV: Tensor,
    beta_TV: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    initial_state_BVDE: Tensor | None = None,
    *,
    chunk: int = CHUNK,
    backend: Literal["auto", "fla"] = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute (o [T, V, E] in v's dtype, the states after the sequences [B, V, D, E], float32).

    q, k: already normalised, if the model does so; any float dtype. decay: natural logs, at most 0. cu_seqlens:
    B + 1 bounds of the sequences, from 0 to T. initial_state: before each sequence; None: zeros. chunk: tokens that are
    computed together, except by a GPU's kernels; it changes the result only by rounding. backend: "fla" for
    flash-linear-attention's kernels, on a GPU. Computed in float32, or float64 if v is; a GPU's kernels multiply
    bfloat16 operands in bfloat16 (rule_triton.py). Raises ValueError for shapes that do not match, and for a backend
    that is not available.
    """
    bounds = _bounds(cu_seqlens, q_TKD, k_TKD, v_TVE, decay_TV, beta_TV, initial_state_BVDE)
    if backend == "fla":
        return _by_fla(q_TKD, k_TKD, v_TVE, decay_TV, beta_TV, bounds, initial_state_BVDE)
    if backend != "auto":
        raise ValueError(f'backend is {backend!r}; expected "auto" or "fla"')
    plan = ChunkPlan(bounds, None, v_TVE.device, chunk)
    (V, E), D = v_TVE.shape[1:], k_TKD.shape[2]
    dtype = torch.promote_types(v_TVE.dtype, torch.float32)
    if initial_state_BVDE is None:
        initial_state_BVDE = v_TVE.new_zeros(len(bounds) - 1, V, D, E, dtype=dtype)
    return gated_delta_planned(q_TKD, k_TKD, v_TVE, decay_TV, beta_TV, initial_state_BVDE.to(dtype), plan)


def _by_fla(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay_TV: Tensor,
    beta_TV: Tensor,
    bounds: list[int],
    initial_BVDE: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta` by flash-linear-attention, which packs sequences along T of a batch of one."""
    out_1TVE, final_BVDE = load_fla(v_TVE.device)(
        *(x[None] for x in (q_TKD, k_TKD, v_TVE)),
        g=decay_TV[None],
        beta=beta_TV[None],
        initial_state=initial_BVDE,
        output_final_state=True,
        cu_seqlens=torch.tensor(bounds, device=v_TVE.device),
    )
    return out_1TVE[0], final_BVDE


def load_fla(device: torch.device) -> Any:
    """Return flash-linear-attention's rule. ValueError if there is none for this device."""
    if device.type != "cuda":
        raise ValueError(f'backend is "fla", which needs a GPU, and v is on {device}; expected "auto"')
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError(
            f'backend is "fla", which does not load here ({error}); expected "auto", or pip install '
            "flash-linear-attention"
        ) from None
    return chunk_gated_delta_rule


def gated_delta_planned(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay_TV: Tensor,
    beta_TV: Tensor,
    initial_BVDE: Tensor,
    plan: "ChunkPlan",
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta` for a plan without parents. initial: float32, or wider if v is."""
    out_TVE, final_BVDE = _GatedDelta.apply(q_TKD, k_TKD, v_TVE, decay_TV, beta_TV, initial_BVDE, plan)
    return out_TVE, final_BVDE


def gated_delta_forest(
    q_TKD: Tensor, k_TKD: Tensor, v_TVE: Tensor, decay_TV: Tensor, beta_TV: Tensor, plan: "ChunkPlan"
) -> Tensor:
    """Compute o of `gated_delta` over segments, each of which begins where its parent ended, a root at zeros."""
    out_TVE: Tensor = _GatedDelta.apply(q_TKD, k_TKD, v_TVE, decay_TV, beta_TV, None, plan)[0]
    return out_TVE


def reference_gated_delta(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay_TV: Tensor,
    beta_TV: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    initial_state_BVDE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta` token by token, in the dtype of the tensors."""
    bounds = _bounds(cu_seqlens, q_TKD, k_TKD, v_TVE, decay_TV, beta_TV, initial_state_BVDE)
    (V, E), (K, D) = v_TVE.shape[1:], k_TKD.shape[1:]
    q_TVD, k_TVD = (x.repeat_interleave(V // K, 1) for x in (q_TKD * D**-0.5, k_TKD))
    out, final = [v_TVE.new_zeros(0, V, E)], [v_TVE.new_zeros(0, V, D, E)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        state = v_TVE.new_zeros(V, D, E) if initial_state_BVDE is None else initial_state_BVDE[number]
        for t in range(start, stop):
            state = decay_TV[t, :, None, None].exp() * state
            correction_VE = v_TVE[t] - torch.einsum("vde,vd->ve", state, k_TVD[t])
            state = state + torch.einsum("vd,ve->vde", beta_TV[t, :, None] * k_TVD[t], correction_VE)
            out.append(torch.einsum("vde,vd->ve", state, q_TVD[t])[None])
        final.append(state[None])
    return torch.cat(out), torch.cat(final)


# --- Chunks that are computed together


class _Step(NamedTuple):
    """A step of the scan, over `chunks` chunks.

    source: the index of the state with which each begins, among those of the last step, or the initial ones in the
    first step; None: the first ones, in order. ends: the places of the chunks that end a sequence."""

    chunks: int
    source: Tensor | None
    ends: Tensor


class ChunkPlan:
    """Packed sequences, and their division into chunks.

    parents: the sequence at whose end each begins, -1: none; None: none for all. Neither a sequence with a parent nor
    its parent may be empty. chunk: of the torch code; the Triton kernels have their own."""

    def __init__(
        self, bounds: Sequence[int], parents: Sequence[int] | None, device: torch.device, chunk: int = CHUNK
    ) -> None:
        self.bounds, self.parents, self.device, self.chunk = bounds, parents, device, chunk
        self._lists: dict[int, SegmentLists] = {}

    @cached_property
    def tables(self) -> "ChunkTables":
        with torch.inference_mode(False):  # they outlive the first forward that uses them
            return _tables(self.bounds, self.parents, self.device, self.chunk)

    def lists(self, chunk: int) -> "SegmentLists":
        """Return the lists that the Triton kernels use."""
        from thresher.kernels.delta.rule_triton import make_lists

        if chunk not in self._lists:
            with torch.inference_mode(False):
                self._lists[chunk] = make_lists(self.bounds, self.parents, chunk, self.device)
        return self._lists[chunk]


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, for a GPU without waiting; on a CPU the tensor itself."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """The chunks of a plan for torch: the first chunk of each root, then the chunks that follow these, and so on.

    row_XC: the tokens of each chunk, 0 beyond its last. short_X: the chunks with fewer tokens; missing_XC: which they
    lack. chunk_T, place_T: each token's chunk and its place in it. ended_B: the sequences in the order in which they
    end. final_B: the place of each sequence's last state in that order, followed by the empty ones. empty_B: these.
    """

    row_XC: Tensor
    short_X: Tensor
    missing_XC: Tensor
    chunk_T: Tensor
    place_T: Tensor
    steps: list[_Step]
    ended_B: Tensor
    final_B: Tensor
    empty_B: Tensor

    def chunked(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, heads, ..] as [X, heads, C, ..], with zeros after a sequence's last token."""
        place_XVC = self.row_XC[:, None] * x.shape[1] + torch.arange(x.shape[1], device=x.device)[:, None]
        taken = x.flatten(0, 1).index_select(0, place_XVC.flatten()).view(*place_XVC.shape, *x.shape[2:]).to(dtype)
        if len(self.short_X):
            missing = self.missing_XC[self.short_X][:, None].unflatten(-1, (-1, *[1] * (taken.dim() - 3)))
            taken[self.short_X] = taken[self.short_X].masked_fill(missing, 0)
        return taken

    def packed(self, x: Tensor) -> Tensor:
        """Return [X, heads, C, ..] as [T, heads, ..]."""
        heads, chunk = x.shape[1:3]
        head_V = torch.arange(heads, device=x.device)
        place_TV = (self.chunk_T[:, None] * heads + head_V) * chunk + self.place_T[:, None]
        return x.flatten(0, 2).index_select(0, place_TV.flatten()).view(*place_TV.shape, *x.shape[3:])


def _tables(bounds: Sequence[int], parents: Sequence[int] | None, device: torch.device, chunk: int) -> ChunkTables:
    lengths = [stop - start for start, stop in pairwise(bounds)]
    children: dict[int, list[int]] = {}
    for n, parent in enumerate(parents or [-1] * len(lengths)):
        children.setdefault(parent, []).append(n)
    order = sorted((n for n in children.get(-1, []) if lengths[n]), key=lambda n: -lengths[n])
    now = [(n, bounds[n], n) for n in order]  # sequence, first token, and source of its state
    begins: list[tuple[int, int]] = []
    steps: list[_Step] = []
    ended: list[int] = []
    while now:
        begins += [(start, bounds[n + 1]) for n, start, _ in now]
        ends = [place for place, (n, start, _) in enumerate(now) if start + chunk >= bounds[n + 1]]
        ends = ends if parents is None else []  # the states at the ends of a forest are not used
        ended += [now[place][0] for place in ends]
        source = [found for _, _, found in now]
        told = None if steps and source == list(range(len(now))) else sent(torch.tensor(source), device)
        steps.append(_Step(len(now), told, sent(torch.tensor(ends, dtype=torch.int64), device)))
        now = list(_following(now, chunk, bounds, children))
    first_X1, stop_X1 = torch.tensor(begins, dtype=torch.int64).view(-1, 2).split(1, 1)
    row_XC = first_X1 + torch.arange(chunk)
    there_XC = row_XC < stop_X1
    place_T = torch.empty(bounds[-1], dtype=torch.int64)
    place_T[row_XC[there_XC]] = torch.arange(row_XC.numel()).view_as(row_XC)[there_XC]
    short_X = torch.nonzero(~there_XC[:, -1])[:, 0]
    empty = [n for n, length in enumerate(lengths) if not length]
    ended_B, order_B, empty_B = (torch.tensor(x, dtype=torch.int64) for x in (ended, ended + empty, empty))
    return ChunkTables(
        row_XC=sent(torch.where(there_XC, row_XC, 0), device),
        short_X=sent(short_X, device),
        missing_XC=sent(~there_XC, device),
        chunk_T=sent(place_T // chunk, device),
        place_T=sent(place_T % chunk, device),
        steps=steps,
        ended_B=sent(ended_B, device),
        final_B=sent(order_B.argsort(), device),
        empty_B=sent(empty_B, device),
    )


def _following(
    now: Sequence[tuple[int, int, int]], chunk: int, bounds: Sequence[int], children: dict[int, list[int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield the chunks of the next step, in the order of those that they follow."""
    for place, (n, start, _) in enumerate(now):
        if start + chunk < bounds[n + 1]:
            yield n, start + chunk, place
        else:
            yield from ((child, bounds[child], place) for child in children.get(n, ()))


# --- The chunked form


class _Chunks(NamedTuple):
    """Tensors that are computed for all chunks at once, before the scan."""

    q_XKCD: Tensor  # times D^-1/2
    k_XKCD: Tensor
    v_XVCE: Tensor
    beta_XVC1: Tensor
    gaps_XVCC: Tensor  # G
    since_XVC1: Tensor  # exp(c)
    left_XVC1: Tensor  # exp(c_C - c)
    kk_XVCC: Tensor  # k k^T, of each value head
    system_XVCC: Tensor  # A, with arbitrary values on and above the diagonal
    within_XVCC: Tensor  # P
    inverse_XVCC: Tensor  # (1 + A)^-1
    solved_XVCF: Tensor  # u and w side by side
    queries_XVCD: Tensor  # Q
    keys_XVCD: Tensor  # R


def _by_value_head(x_XKCN: Tensor, heads: int) -> Tensor:
    return x_XKCN if x_XKCN.shape[1] == heads else x_XKCN.repeat_interleave(heads // x_XKCN.shape[1], 1)


def _by_key_head(x_XVCN: Tensor, heads: int) -> Tensor:
    """Return the sum over the value heads of each key head."""
    return x_XVCN if x_XVCN.shape[1] == heads else x_XVCN.unflatten(1, (heads, -1)).sum(2)


def _prepare(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, tables: ChunkTables) -> _Chunks:
    dtype, D = torch.promote_types(v.dtype, torch.float32), k.shape[2]
    q_XKCD, k_XKCD = (tables.chunked(x, dtype) for x in (q, k))
    q_XKCD *= D**-0.5
    v_XVCE, beta_XVC1 = tables.chunked(v, dtype), tables.chunked(beta, dtype)[..., None]
    sum_XVC = tables.chunked(decay, torch.float64).cumsum(2)
    heads = v_XVCE.shape[1]
    later_CC = torch.ones(2 * [sum_XVC.shape[2]], dtype=torch.bool, device=v.device).triu(1)
    gaps_XVCC = (sum_XVC[..., :, None] - sum_XVC[..., None, :]).to(dtype).masked_fill_(later_CC, -torch.inf).exp_()
    since_XVC1, left_XVC1 = (x.to(dtype).exp()[..., None] for x in (sum_XVC, sum_XVC[..., -1:] - sum_XVC))
    kk_XVCC = _by_value_head(k_XKCD @ k_XKCD.mT, heads)
    system_XVCC = kk_XVCC * gaps_XVCC * beta_XVC1
    k_XVCD = _by_value_head(k_XKCD, heads)
    right_XVCF = torch.cat([beta_XVC1 * v_XVCE, beta_XVC1 * since_XVC1 * k_XVCD], -1)
    one_CC = torch.eye(sum_XVC.shape[2], dtype=dtype, device=v.device)
    inverse_XVCC = torch.linalg.solve_triangular(system_XVCC, one_CC, upper=False, unitriangular=True)
    solved_XVCF = inverse_XVCC @ right_XVCF
    within_XVCC = _by_value_head(q_XKCD @ k_XKCD.mT, heads) * gaps_XVCC
    queries_XVCD, keys_XVCD = _by_value_head(q_XKCD, heads) * since_XVC1, k_XVCD * left_XVC1
    gates = (beta_XVC1, gaps_XVCC, since_XVC1, left_XVC1)
    products = (kk_XVCC, system_XVCC, within_XVCC, inverse_XVCC, solved_XVCF, queries_XVCD, keys_XVCD)
    return _Chunks(q_XKCD, k_XKCD, v_XVCE, *gates, *products)


class _Scanned(NamedTuple):
    """Results of the scan, chunks in order.

    Forward: o, and the states after the chunks that end a sequence. Backward: the states before, and corrections."""

    out_XVCE: Tensor
    ended_BVDE: Tensor
    before_XVDE: Tensor
    x_XVCE: Tensor


def _scan(chunks: _Chunks, initial_BVDE: Tensor | None, tables: ChunkTables, backward: bool) -> _Scanned:
    E, D = chunks.v_XVCE.shape[-1], chunks.k_XKCD.shape[-1]
    counts = [step.chunks for step in tables.steps]
    u_XVCE, w_XVCD = chunks.solved_XVCF.split((E, D), -1)
    whole_XV11 = chunks.since_XVC1[:, :, -1:]
    split = (u_XVCE, w_XVCD, chunks.queries_XVCD, chunks.keys_XVCD, chunks.within_XVCC, whole_XV11)
    V = u_XVCE.shape[1]
    state = u_XVCE.new_zeros(counts[0] if counts else 0, V, D, E) if initial_BVDE is None else initial_BVDE
    before, corrections, out, ended = [], [], [], []
    for number, (step, u, w, q, k, within, whole) in enumerate(
        zip(tables.steps, *(x.split(counts) for x in split), strict=True)
    ):
        if number or initial_BVDE is not None:
            state = state[: step.chunks] if step.source is None else state.index_select(0, step.source)
        x = u - w @ state
        if backward:
            before.append(state)
            corrections.append(x)
        else:
            out.append((q @ state).add_(within @ x))
        state = (whole * state).add_(k.mT @ x)
        if not backward:
            ended.append(state.index_select(0, step.ends))

    def joined(parts: list[Tensor], like: Tensor) -> Tensor:
        return torch.cat(parts) if parts else like

    nothing = u_XVCE.new_zeros(0, V, D, E)
    return _Scanned(joined(out, u_XVCE), joined(ended, nothing), joined(before, nothing), joined(corrections, u_XVCE))


class _GatedDelta(torch.autograd.Function):
    """The rule and its gradient. Forward returns o and the states after the sequences, none for a plan with parents.

    Heads are independent, so a few are computed at a time."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, initial: Tensor | None, plan: ChunkPlan
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, decay, beta, initial)
        ctx.plan = plan
        compute, _, layout = _implementation(q, k, v, plan)
        few_heads = _few_heads(q, k, v, decay, beta, initial, plan, backward=False)
        out, final = _joined([compute(*few, layout) for few in few_heads])
        assert out is not None and final is not None
        return out, final if plan.parents is None else final[:0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_out, d_final = grads
        q, k, v, decay, beta, initial = ctx.saved_tensors  # read once: a checkpoint does not return them again
        _, compute, layout = _implementation(q, k, v, ctx.plan)
        found, first = [], 0
        for few in _few_heads(q, k, v, decay, beta, initial, ctx.plan, backward=True):
            heads = slice(first, first + few.v_TVE.shape[1])
            found.append(compute(*few, d_out[:, heads], d_final[:, heads], layout))
            first = heads.stop
        return *_joined(found), None


def _joined(found: list[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """Concatenate the results of a few heads at a time into those of all heads."""
    if len(found) == 1:
        return found[0]
    return tuple(None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*found, strict=True))


def _implementation(q: Tensor, k: Tensor, v: Tensor, plan: ChunkPlan) -> tuple[Any, Any, Any]:
    """Return forward and backward of a few heads, in torch or Triton, and the chunks in their form."""
    if (kernels := _kernels(q, k, v)) is None:
        return _forward, _backward, plan.tables
    return kernels.forward, kernels.backward, plan.lists(kernels.tiling_of(v.dtype).chunk)


def _kernels(q: Tensor, k: Tensor, v: Tensor) -> ModuleType | None:
    """Return the module of kernels, or None if they do not serve these inputs."""
    if not uses_triton(v):
        return None
    from thresher.kernels.delta import rule_triton

    return rule_triton if rule_triton.is_served(q, k, v) else None


class _Few(NamedTuple):
    """Some key heads, and their value heads."""

    q_TKD: Tensor
    k_TKD: Tensor
    v_TVE: Tensor
    decay_TV: Tensor
    beta_TV: Tensor
    initial_BVDE: Tensor | None


def _few_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    plan: ChunkPlan,
    backward: bool,
) -> Iterator[_Few]:
    """Yield groups of heads whose workspace is at most WORKSPACE_BYTES, or that of one key head."""
    (K, D), (V, E) = k.shape[1:], v.shape[1:]
    if kernels := _kernels(q, k, v):
        held = kernels.workspace(k, v, plan.lists(kernels.tiling_of(v.dtype).chunk), backward) * (V // K)
    else:
        chunks, chunk = plan.tables.row_XC.shape
        held = chunks * (2 * D * E + chunk * (9 * chunk + 8 * D + 7 * E)) * max(v.element_size(), 4) * (V // K)
    each = min(max(int(WORKSPACE_BYTES[v.device.type] // max(held, 1)), 1), K)
    each = -(-K // -(-K // each))  # the same number of groups, of about equal sizes
    for first, stop in pairwise([*range(0, K, each), K]):
        keys, values = slice(first, stop), slice(first * V // K, stop * V // K)
        gates = decay[:, values], beta[:, values], None if initial is None else initial[:, values]
        yield _Few(q[:, keys], k[:, keys], v[:, values], *gates)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, initial: Tensor | None, tables: ChunkTables
) -> tuple[Tensor, Tensor]:
    """Return o and the states after the sequences, none for a forest."""
    scanned = _scan(_prepare(q, k, v, decay, beta, tables), initial, tables, backward=False)
    ended = scanned.ended_BVDE
    if initial is not None:  # an empty sequence ends as it began
        ended = torch.cat([ended, initial[tables.empty_B]])[tables.final_B]
    return tables.packed(scanned.out_XVCE).to(v.dtype), ended


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    d_out: Tensor,
    d_final: Tensor,
    tables: ChunkTables,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the first six arguments, from those of the results of `_forward`."""
    c = _prepare(q, k, v, decay, beta, tables)
    *_, state_XVDE, x_XVCE = _scan(c, initial, tables, backward=True)
    (V, E), (K, D) = c.v_XVCE.shape[1::2], c.k_XKCD.shape[1::2]
    do_XVCE = tables.chunked(d_out, x_XVCE.dtype)
    d_ended = d_final if initial is None else d_final.index_select(0, tables.ended_B)
    dx_XVCE, after_XVDE, d_initial = _scan_back(c, do_XVCE, d_ended, initial, tables)
    if d_initial is not None:
        d_initial.index_add_(0, tables.empty_B, d_final.index_select(0, tables.empty_B).to(d_initial.dtype))

    # The products of the scan, whose gradients need its states.
    d_within = do_XVCE @ x_XVCE.mT
    d_queries, d_keys = do_XVCE @ state_XVDE.mT, x_XVCE @ after_XVDE.mT
    d_solved = torch.cat([dx_XVCE, -dx_XVCE @ state_XVDE.mT], -1)
    whole_XV = c.since_XVC1[:, :, -1, 0]
    d_last = whole_XV * (after_XVDE * state_XVDE).sum((-2, -1))

    # The solve: of (1 + A) y = r, dr = (1 + A)^-T dy and dA = -dr y^T.
    d_right = c.inverse_XVCC.mT @ d_solved
    d_system = (d_right @ c.solved_XVCF.mT).neg_().tril_(-1)
    dv, d_read = d_right.split((E, D), -1)

    d_kk = d_system * c.gaps_XVCC
    d_beta = (d_kk * c.kk_XVCC).sum(-1) + (dv * c.v_XVCE).sum(-1)
    d_kk *= c.beta_XVC1
    between = d_system * c.system_XVCC + d_within * c.within_XVCC  # of log G
    d_sum = between.sum(-1) - between.sum(-2)
    d_read *= c.since_XVC1
    read = (d_read * _by_value_head(c.k_XKCD, V)).sum(-1)
    d_beta += read
    kept = (d_keys * c.keys_XVCD).sum(-1)
    d_sum += c.beta_XVC1[..., 0] * read + (d_queries * c.queries_XVCD).sum(-1) - kept
    d_sum[..., -1] += kept.sum(-1) + d_last
    d_decay = d_sum.double().flip(2).cumsum(2).flip(2)

    d_kk, d_qk = _by_key_head(d_kk, K), _by_key_head(d_within * c.gaps_XVCC, K)
    dq = d_qk @ c.k_XKCD + _by_key_head(d_queries * c.since_XVC1, K)
    dk = (d_kk + d_kk.mT) @ c.k_XKCD + d_qk.mT @ c.q_XKCD
    dk += _by_key_head(d_read * c.beta_XVC1 + d_keys * c.left_XVC1, K)
    slopes = (dq * D**-0.5, dk, dv * c.beta_XVC1, d_decay, d_beta)
    found = (tables.packed(s).to(x.dtype) for s, x in zip(slopes, (q, k, v, decay, beta), strict=True))
    return *found, d_initial


def _scan_back(
    c: _Chunks, do_XVCE: Tensor, ended_BVDE: Tensor, initial: Tensor | None, tables: ChunkTables
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the corrections, of the state after each chunk, and of the initial states."""
    counts = [step.chunks for step in tables.steps]
    D = c.k_XKCD.shape[-1]
    w_XVCD, whole_XV11 = c.solved_XVCF[..., -D:], c.since_XVC1[:, :, -1:]
    split = (c.within_XVCC.mT @ do_XVCE, c.queries_XVCD.mT @ do_XVCE, w_XVCD, c.keys_XVCD, whole_XV11)
    steps = list(zip(tables.steps, *(x.split(counts) for x in split), strict=True))
    ends = ended_BVDE.split([len(step.ends) for step in tables.steps])
    corrections: list[Tensor] = []
    after: list[Tensor] = []
    carried: tuple[Tensor, _Step] | None = None  # the gradient of the states before the following step
    for number in reversed(range(len(steps))):
        step, dx, d_state, w, k, whole = steps[number]
        later = _given_back(carried, (step.chunks, *d_state.shape[1:]), d_state)
        later.index_add_(0, step.ends, ends[number].to(later.dtype))
        dx = dx + k @ later
        corrections.append(dx)
        after.append(later)
        carried = whole * later + d_state - w.mT @ dx, step
    d_initial = None if initial is None else _given_back(carried, initial.shape, initial)
    if not steps:
        return do_XVCE, c.k_XKCD.new_zeros(0, do_XVCE.shape[1], D, do_XVCE.shape[-1]), d_initial
    return torch.cat(corrections[::-1]), torch.cat(after[::-1]), d_initial


def _given_back(carried: tuple[Tensor, _Step] | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return the gradient of a step's states from that of the states with which the next step began."""
    given = like.new_zeros(shape)
    if carried is not None:
        slope, step = carried
        if step.source is None:
            given[: step.chunks] = slope
        else:
            add_rows(given, step.source, slope)
    return given


def add_rows(into: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows at an index that may have duplicates, in a fixed order."""
    if into.is_cuda:
        into.index_put_((index,), rows, accumulate=True)  # it sorts; index_add_ has no fixed order there
    else:
        into.index_add_(0, index, rows)


def _bounds(
    cu_seqlens: Tensor | Sequence[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
) -> list[int]:
    """Return the sequences' bounds. ValueError if the arguments do not match."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [int(bound) for bound in cu_seqlens]
    if q.dim() != 3 or k.shape != q.shape or v.dim() != 3:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected [T, K, D] twice, [T, V, E]"
        )
    (T, K, D), (V, E) = k.shape, v.shape[1:]
    if len(v) != T or V % K or decay.shape != (T, V) or beta.shape != (T, V):
        raise ValueError(
            f"v {list(v.shape)}, decay {list(decay.shape)}, beta {list(beta.shape)} with k {list(k.shape)}; expected "
            "[T, V, E], [T, V] and [T, V], V a multiple of K"
        )
    if not bounds or bounds[0] != 0 or bounds[-1] != T or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens is {bounds}; expected bounds that rise from 0 to {T}")
    if state is not None and state.shape != (len(bounds) - 1, V, D, E):
        raise ValueError(f"initial_state is {list(state.shape)}; expected {[len(bounds) - 1, V, D, E]}")
    return bounds
