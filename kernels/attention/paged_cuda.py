"""Attention of new rows to a cache in blocks, for generation on CUDA: the torch reference, and the choice of a kernel.

    o[i] = sum_{j <= i} softmax_j(q[i] . k[j] / sqrt(D)) v[j]         (Vaswani et al. 2017, equation 1)

`decode_attention` takes few rows per sequence (decode_triton.py), `prefill_attention` runs of many (prefill_triton.py).
CUDA tensors, and all tensors in Triton's interpreter, go to Triton; others to `reference_cached_attention`. k and v of
a layer are [P, K, S, D], the inner three axes contiguous. A slot that no row sees may have any value, also NaN. A
row's bits may depend on its batch; those of paged_cpu.py do not.

Axes: T rows of all runs, B sequences, Q rows of a sequence, N query heads (and runs, in PrefillRows), K key/value
heads, R query heads of a KV head, D head dimension, P blocks, S slots of a block, J keys, G and M as in rows.py
(docs/notation.md).
"""

import os

import torch
from torch import Tensor

from thresher.kernels.attention.rows import DecodeRows, PrefillRows, SharedPrefix

MOST_PER_KV = 8  # query heads of a KV head
SLOT_STEP = 16


def decode_attention(
    q_BQND: Tensor, k_PKSD: Tensor, v_PKSD: Tensor, rows: DecodeRows, *, splits: int | None = None
) -> Tensor:
    """Attend few new rows of each sequence to the cache: o [B, Q, N, D], contiguous, in q's dtype.

    Rows beyond a count are zeros. q_BQND: the cache's dtype, any strides but the last axis contiguous. splits: parts of
    a sequence's own keys, and of a prefix's; None: `decode_splits` and `prefix_splits`. Raises ValueError for shapes,
    dtypes, strides and devices that do not match. No value is read from the device: with static tensors the call can
    be captured in a CUDA graph.
    """
    B, Q = q_BQND.shape[:2] if q_BQND.dim() == 4 else (0, 0)
    _check_cache("q_BQND", 4, q_BQND, k_PKSD, v_PKSD)
    _check_rows(q_BQND, table_BP=(rows.table_BP, (B, None)), start_B=(rows.start_B, (B,)), count_B=(rows.count_B, (B,)))
    if rows.first_B is not None:
        _check_rows(q_BQND, first_B=(rows.first_B, (B,)))
    if rows.prefix is not None:
        if rows.first_B is None:
            raise ValueError("first_B is None; expected each sequence's first own key where there is a prefix")
        G = rows.prefix.length_G.shape[0]
        _check_rows(
            q_BQND,
            table_GP=(rows.prefix.table_GP, (G, None)),
            length_G=(rows.prefix.length_G, (G,)),
            members_GM=(rows.prefix.members_GM, (G, None)),
        )
    if splits is not None and splits < 1:
        raise ValueError(f"splits is {splits}; expected 1 or more, or None")
    if not B * Q:
        return q_BQND.new_zeros(q_BQND.shape)
    if _runs_triton(q_BQND):
        from thresher.kernels.attention.cascade_triton import triton_decode  # triton is not installed everywhere

        return triton_decode(q_BQND, k_PKSD, v_PKSD, rows, splits)
    return _reference_decode(q_BQND, k_PKSD, v_PKSD, rows)


def prefill_attention(q_TND: Tensor, k_PKSD: Tensor, v_PKSD: Tensor, rows: PrefillRows) -> Tensor:
    """Attend runs of new rows to the cache: o [T, N, D], contiguous, in q's dtype; rows of no run are zeros.

    Row i of a run sees keys 0 .. start + i of its sequence; the new ones are already written. Otherwise as
    `decode_attention`.
    """
    N = rows.row_N.shape[0]
    _check_cache("q_TND", 3, q_TND, k_PKSD, v_PKSD)
    _check_rows(
        q_TND,
        table_NP=(rows.table_NP, (N, None)),
        row_N=(rows.row_N, (N,)),
        start_N=(rows.start_N, (N,)),
        count_N=(rows.count_N, (N,)),
    )
    if not N * rows.longest * q_TND.shape[0]:
        return q_TND.new_zeros(q_TND.shape)
    if _runs_triton(q_TND):
        from thresher.kernels.attention.prefill_triton import triton_prefill

        return triton_prefill(q_TND, k_PKSD, v_PKSD, rows)
    return _reference_prefill(q_TND, k_PKSD, v_PKSD, rows)


def reference_cached_attention(q: Tensor, k_PKSD: Tensor, v_PKSD: Tensor, rows: DecodeRows | PrefillRows) -> Tensor:
    """Compute `decode_attention` (q [B, Q, N, D]) or `prefill_attention` (q [T, N, D]) in plain torch.

    Scores and weights are float32, or float64 for float64 inputs."""
    if isinstance(rows, PrefillRows):
        return _reference_prefill(q, k_PKSD, v_PKSD, rows)
    return _reference_decode(q, k_PKSD, v_PKSD, rows)


def _reference_decode(q_BQND: Tensor, k_PKSD: Tensor, v_PKSD: Tensor, rows: DecodeRows) -> Tensor:
    device, (B, Q), S = q_BQND.device, q_BQND.shape[:2], k_PKSD.shape[2]
    end_B = torch.where(rows.count_B > 0, rows.start_B + rows.count_B, 0)
    key_J = torch.arange(rows.table_BP.shape[1] * S, device=device)
    used_BJ = key_J < end_B[:, None]
    if rows.first_B is not None:
        used_BJ &= key_J >= rows.first_B[:, None]
    i_Q = torch.arange(Q, device=device)
    seen_BQJ = used_BJ[:, None] & (key_J <= (rows.start_B[:, None] + i_Q)[:, :, None])
    caches = (k_PKSD, v_PKSD)
    k_BJKD, v_BJKD = (_keys(cache, rows.table_BP, used_BJ) for cache in caches)
    if rows.prefix is not None:
        table_BP, length_B = _prefix_of_each(rows.prefix, B)
        early_BJ = torch.arange(table_BP.shape[1] * S, device=device) < length_B[:, None]
        early_BQJ = early_BJ[:, None].expand(B, Q, -1)
        early = [_keys(cache, table_BP, early_BJ) for cache in caches]
        k_BJKD, v_BJKD = torch.cat([early[0], k_BJKD], 1), torch.cat([early[1], v_BJKD], 1)
        seen_BQJ = torch.cat([early_BQJ, seen_BQJ], 2)
    seen_BQJ = seen_BQJ & (i_Q < rows.count_B[:, None])[:, :, None]
    return _attend(q_BQND, k_BJKD, v_BJKD, seen_BQJ)


def _prefix_of_each(prefix: SharedPrefix, sequences: int) -> tuple[Tensor, Tensor]:
    """Return table_BP and length_B of every sequence's prefix; length 0 for those in no group."""
    groups, members = prefix.members_GM.shape
    # One additional sequence, the target of padding, and one additional group, of the sequences without a group.
    exists_GM = (prefix.members_GM >= 0) & (prefix.length_G > 0)[:, None]
    number_GM = torch.where(exists_GM, prefix.members_GM, sequences).long()
    group_B = number_GM.new_full((sequences + 1,), groups)
    group_B[number_GM.reshape(-1)] = torch.arange(groups, device=group_B.device).repeat_interleave(members)
    group_B = group_B[:sequences]
    table_GP = torch.cat([prefix.table_GP, torch.zeros_like(prefix.table_GP[:1])])
    length_G = torch.cat([prefix.length_G, torch.zeros_like(prefix.length_G[:1])])
    return table_GP[group_B], length_G[group_B]


def _reference_prefill(q_TND: Tensor, k_PKSD: Tensor, v_PKSD: Tensor, rows: PrefillRows) -> Tensor:
    T, S = q_TND.shape[0], k_PKSD.shape[2]
    out_TND = q_TND.new_zeros(T + 1, *q_TND.shape[1:])  # the last row receives rows beyond a run
    i_Q = torch.arange(rows.longest, device=q_TND.device)
    key_J = torch.arange(rows.table_NP.shape[1] * S, device=q_TND.device)
    for run in range(rows.row_N.shape[0]):
        start, count = rows.start_N[run], rows.count_N[run]
        used_1J = (key_J < torch.where(count > 0, start + count, 0))[None]
        k_1JKD, v_1JKD = (_keys(cache, rows.table_NP[run : run + 1], used_1J) for cache in (k_PKSD, v_PKSD))
        seen_1QJ = used_1J[:, None] & (key_J <= (start + i_Q)[:, None]) & (i_Q < count)[:, None]
        row_Q = torch.where(i_Q < count, rows.row_N[run] + i_Q, T).long()
        q_1QND = q_TND[row_Q.clamp(max=T - 1)][None]
        out_TND[row_Q] = _attend(q_1QND, k_1JKD, v_1JKD, seen_1QJ)[0]
    return out_TND[:T].contiguous()


def _keys(cache_PKSD: Tensor, table_BP: Tensor, used_BJ: Tensor) -> Tensor:
    """Gather the keys or values of each table, [B, J, K, D], with zeros where they are not used."""
    (B, P), (_, K, S, D) = table_BP.shape, cache_PKSD.shape
    block_BP = torch.where(used_BJ.view(B, P, S).any(2), table_BP, 0).long()
    cache_BJKD = cache_PKSD[block_BP].transpose(2, 3).reshape(B, P * S, K, D)
    return cache_BJKD.masked_fill(~used_BJ[:, :, None, None], 0)


def _attend(q_BQND: Tensor, k_BJKD: Tensor, v_BJKD: Tensor, seen_BQJ: Tensor) -> Tensor:
    """Compute the formula above; zeros for a row that sees no key."""
    dtype = torch.promote_types(q_BQND.dtype, torch.float32)
    (B, Q, N, D), K = q_BQND.shape, k_BJKD.shape[2]
    q_BQKRD = q_BQND.to(dtype).reshape(B, Q, K, N // K, D) * D**-0.5
    scores_BKRQJ = torch.einsum("bqkrd,bjkd->bkrqj", q_BQKRD, k_BJKD.to(dtype))
    weights_BKRQJ = torch.softmax(scores_BKRQJ.masked_fill(~seen_BQJ[:, None, None], -torch.inf), -1)
    o_BQKRD = torch.einsum("bkrqj,bjkd->bqkrd", weights_BKRQJ, v_BJKD.to(dtype))
    o_BQND = o_BQKRD.reshape(B, Q, N, D).masked_fill(~seen_BQJ.any(2)[:, :, None, None], 0)
    return o_BQND.to(q_BQND.dtype)


def _runs_triton(q: Tensor) -> bool:
    """Return whether to run Triton: on CUDA, or if Triton interprets its kernels; never for float64."""
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    return (q.is_cuda or interpreted) and q.dtype != torch.float64


def _check_cache(name: str, axes: int, q: Tensor, k_PKSD: Tensor, v_PKSD: Tensor) -> None:
    if q.dim() != axes or k_PKSD.dim() != 4 or k_PKSD.shape != v_PKSD.shape:
        raise ValueError(
            f"{name}, k_PKSD and v_PKSD have shapes {tuple(q.shape)}, {tuple(k_PKSD.shape)} and {tuple(v_PKSD.shape)}; "
            f"expected {axes}, 4 and 4 axes, and the last two alike"
        )
    _, K, S, D = k_PKSD.shape
    if q.shape[-1] != D or q.shape[-2] % K or not 1 <= q.shape[-2] // K <= MOST_PER_KV:
        raise ValueError(
            f"{name} has {q.shape[-2]} heads of {q.shape[-1]}, the cache {K} of {D}; expected the same dimension, and "
            f"1 to {MOST_PER_KV} query heads to a KV head"
        )
    if S % SLOT_STEP:
        raise ValueError(f"k_PKSD has blocks of {S} slots; expected a multiple of {SLOT_STEP}")
    for cache in (k_PKSD, v_PKSD):
        if not cache[0].is_contiguous() or cache.dtype != q.dtype or cache.device != q.device:
            raise ValueError(
                f"a cache has strides {cache.stride()}, {cache.dtype}, {cache.device}; expected the inner three axes "
                f"contiguous, {q.dtype} and {q.device} as {name} is"
            )
    if q.stride(-1) != 1 or not q.is_floating_point():
        raise ValueError(f"{name} has strides {q.stride()} and is {q.dtype}; expected floats, the last axis contiguous")


def _check_rows(q: Tensor, **wanted: tuple[Tensor, tuple[int | None, ...]]) -> None:
    """Check that each tensor is int32, on q's device, of its shape (None: any length), with a contiguous last axis."""
    for name, (tensor, shape) in wanted.items():
        fits = tensor.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        dense = tensor.dim() > 0 and (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
        if not fits or not dense or tensor.dtype != torch.int32 or tensor.device != q.device:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}, {tensor.device}; "
                f"expected int32 {list(shape)} on {q.device} (None: any length), the last axis contiguous"
            )
