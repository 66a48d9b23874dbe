"""Attention of runs of new rows to a cache in blocks: prompts, passages, drafts, each after its own history.

    o_i = sum_{j <= start + i} softmax_j(q_i . k_j / sqrt(D)) v_j         (Vaswani et al. 2017, equation 1)

The softmax is computed one block of keys at a time (Dao et al. 2022, algorithm 1; decode_triton.py). A program computes
`ROWS` rows of one run for one KV head: row i is new row i // R of head i % R. It processes the keys that all its rows
see without a mask, then those at the diagonal. A run's last rows, which have the most keys, start first.

Axes: T rows of all runs, N runs in `table_NP` and query heads in `q_TND`, K KV heads, R query heads of a KV head, D
head dimension, P blocks, S slots (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.attention.decode_triton import (
    DEEP,
    FLOAT32,
    MODEL_SLOTS,
    MODELS,
    KeyTiling,
    attend_keys,
    gpu,
    is_exact,
    key_specialisation,
    model_constants,
    no_keys,
    options,
    strides,
)
from thresher.kernels.attention.rows import KEYS, PrefillRows
from thresher.kernels.registry import Specialisation

# Two blocks of keys are in flight while a third is used. Half as many keys where mma has to hold them in registers in
# addition to 128 rows of output, which would spill.
WIDE = KeyTiling(rows=128, keys=KEYS, num_warps=8, num_stages=3)
NARROW = KeyTiling(rows=128, keys=32, num_warps=8, num_stages=3)
_INDICES = ["table_ptr", "row_ptr", "start_ptr", "count_ptr"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_INDICES)
def _prefill_kernel(
    q_ptr,  # [T, N, D] bf16 or fp32
    k_ptr,  # [P, K, S, D] the same, a block dense
    v_ptr,  # [P, K, S, D] the same
    table_ptr,  # [runs, P] int32
    row_ptr,  # [runs] int32: first row in q and o
    start_ptr,  # [runs] int32
    count_ptr,  # [runs] int32
    o_ptr,  # [T, N, D] q's dtype, dense
    table_stride,
    q_stride_t,
    q_stride_n,
    k_stride,
    v_stride,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PER_KV: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv = tl.program_id(1)
    run = tl.program_id(2)
    count = tl.load(count_ptr + run)
    if tile * ROWS >= count * PER_KV:
        return
    start = tl.load(start_ptr + run)
    i = tile * ROWS + tl.arange(0, ROWS)
    row = i // PER_KV
    head = kv * PER_KV + i % PER_KV
    depth = tl.arange(0, WIDTH)
    present = (row < count)[:, None] & (depth < D)[None, :]
    first_row = tl.load(row_ptr + run).to(tl.int64)
    q_at = (row * q_stride_t + head * q_stride_n)[:, None] + depth[None, :]
    q = tl.load(q_ptr + first_row * q_stride_t + q_at, mask=present, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    highest, total, o = no_keys(ROWS, WIDTH)
    last = start + row
    # Keys that the tile's first row sees (a multiple of KEYS), and those that its last row sees.
    full = (start + tile * ROWS // PER_KV + 1) // KEYS * KEYS
    end = start + tl.minimum((tile * ROWS + ROWS - 1) // PER_KV + 1, count)
    k_head, v_head = k_ptr + kv * SLOTS * D, v_ptr + kv * SLOTS * D
    table = table_ptr + run.to(tl.int64) * table_stride
    highest, total, o = attend_keys(
        q, highest, total, o, last, 0, full, table, k_head, v_head, k_stride, v_stride, scale,
        D, WIDTH, SLOTS, KEYS, False, UPCAST,
    )  # fmt: skip
    highest, total, o = attend_keys(
        q, highest, total, o, last, full, end, table, k_head, v_head, k_stride, v_stride, scale,
        D, WIDTH, SLOTS, KEYS, True, UPCAST,
    )  # fmt: skip
    o = o / total[:, None]  # every row sees at least its own key
    o_at = (row * (KV_HEADS * PER_KV * D) + head * D)[:, None] + depth[None, :]
    tl.store(o_ptr + first_row * (KV_HEADS * PER_KV * D) + o_at, o.to(o_ptr.dtype.element_ty), mask=present)


def triton_prefill(q_TND: Tensor, k_PKSD: Tensor, v_PKSD: Tensor, rows: PrefillRows) -> Tensor:
    """Compute `prefill_attention` of paged_cuda.py, which has checked the arguments."""
    (T, N, D), (K, S) = q_TND.shape, k_PKSD.shape[1:3]
    out_TND = q_TND.new_zeros(T, N, D)
    width = model_constants(N, K, D, S)["WIDTH"]
    tiling = prefill_tiling(is_exact(q_TND), width, gpu(q_TND.device)[1])
    _prefill_kernel[(triton.cdiv(rows.longest * N // K, tiling.rows), K, rows.row_N.shape[0])](
        q_TND,
        k_PKSD,
        v_PKSD,
        rows.table_NP,
        rows.row_N,
        rows.start_N,
        rows.count_N,
        out_TND,
        rows.table_NP.stride(0),
        *strides(q_TND, k_PKSD, v_PKSD),
        **options(q_TND, k_PKSD, tiling),
    )
    return out_TND


def prefill_tiling(exact: bool, width: int, capability: int) -> KeyTiling:
    """Return the tiling by head dimension and GPU. exact: float32."""
    if exact:
        return FLOAT32
    if width > 128:
        return DEEP
    return NARROW if width > 64 and capability < 90 else WIDE


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that the launcher requests at the models' shapes.

    In addition there is one with blocks shorter than a step and one in float32."""
    models = [_specialisation(*model, capability) for model in MODELS for capability in (80, 90)]
    short = [_specialisation(*MODELS[1], capability, slots=16) for capability in (80, 90)]
    return (*models, *short, *(_specialisation(*MODELS[1], capability, "fp32") for capability in (80, 90)))


def _specialisation(
    dim: int, per_kv: int, kv_heads: int, capability: int, dtype: str = "bf16", slots: int = MODEL_SLOTS
) -> Specialisation:
    constants = model_constants(per_kv * kv_heads, kv_heads, dim, slots)
    return key_specialisation(
        f"prefill {dtype} D {dim} {per_kv} x {kv_heads}{f' S {slots}' if slots != MODEL_SLOTS else ''}",
        _prefill_kernel,
        prefill_tiling(dtype == "fp32", constants["WIDTH"], capability),
        dtype,
        others={"o_ptr": f"*{dtype}", "table_stride": "i32"} | dict.fromkeys(_INDICES, "*i32"),
        constants=constants,
        strides=("q_stride_t", "q_stride_n", "k_stride", "v_stride"),
        capabilities=(capability,),
    )
