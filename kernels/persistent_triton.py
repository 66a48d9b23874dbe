"""The head's kernel for sm_90 with a program for each multiprocessor, which takes tile after tile and reads by TMA.

The product and what a tile leaves behind are those of head_triton.py, and so are its results to the bit where the tile
has the same shape. What differs is who fetches: a descriptor of each operand, made on the host, lets one thread ask
for a whole block, so that the loop computes no addresses, and a program's set-up is paid once and not for every tile.

It is a candidate to be timed (autotune_cache.py) and nobody's choice until it was. Deliberately absent:
`warp_specialize`, which Triton 3.6 and 3.7 ignore on sm_90 without a word, and `flatten`, with which neither compiles
this.

Axes: R rows of a chunk, V vocabulary (columns that exist), H hidden width (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from thresher.kernels.head_tiling import PERSISTENT, Tiling, processors
from thresher.kernels.head_triton import LENGTHS, NARROW, TILE_TYPES, leave_tile, tile_constants
from thresher.kernels.registry import Specialisation


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=NARROW)
def _persistent_head_kernel(
    rows,  # descriptor of [R, H] bf16, blocks [ROWS, WIDTH]
    head,  # descriptor of [V, H] bf16, blocks [COLUMNS, WIDTH]
    targets_ptr,  # from here on as in _head_kernel
    offsets_ptr,
    below_target_ptr,
    parts_ptr,
    exps_ptr,
    count,
    store,
    parts_stride,
    scale,
    exps_stride_r,
    V: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row_tiles = tl.cdiv(count, ROWS)
    for tile in range(tl.program_id(0), row_tiles * tl.cdiv(V, COLUMNS), tl.num_programs(0)):
        row_tile = tile % row_tiles
        column_tile = tile // row_tiles
        logits = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, H, WIDTH):
            x = rows.load([row_tile * ROWS, start])
            w = head.load([column_tile * COLUMNS, start])
            if INTERPRETED:
                x, w = x.to(tl.float32), w.to(tl.float32)
            logits = tl.dot(x, w.T, logits)
        if (column_tile + 1) * COLUMNS > V:  # a descriptor reads zeros there
            column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
            logits = tl.where((column < V)[None, :], logits, float("-inf"))
        leave_tile(
            logits, row_tile, column_tile, targets_ptr, offsets_ptr, below_target_ptr, parts_ptr, exps_ptr, count,
            store, parts_stride, scale, exps_stride_r, V, ROWS, COLUMNS, INTERPRETED,
        )  # fmt: skip


def launch_persistent_head(
    rows_RH: Tensor,
    lm_head_VH: Tensor,
    targets_R: Tensor,
    offsets_R: Tensor,
    below_target_R: Tensor,
    parts: Tensor,
    exps_RV: Tensor,
    exps_stride: int,
    store: bool,
    scale: float,
    tiling: Tiling,
) -> None:
    """As `launch_head`, for a head of which `takes_descriptors` (autotune_cache.py) holds."""
    rows_RH = rows_RH if rows_RH.data_ptr() % 16 == 0 else rows_RH.clone()
    (count, width), columns = rows_RH.shape, lm_head_VH.shape[0]
    tiles = triton.cdiv(count, tiling.rows) * triton.cdiv(columns, tiling.columns)
    _persistent_head_kernel[(min(processors(rows_RH.device), tiles),)](
        TensorDescriptor.from_tensor(rows_RH, [tiling.rows, tiling.width]),
        TensorDescriptor.from_tensor(lm_head_VH, [tiling.columns, tiling.width]),
        targets_R,
        offsets_R,
        below_target_R,
        parts,
        exps_RV,
        count,
        int(store),
        triton.cdiv(columns, tiling.columns) * count,
        scale,
        exps_stride,
        **tile_constants(tiling, columns, width),
        **tiling.launch,
    )


def specialisations() -> tuple[Specialisation, ...]:
    """The one tiling that is a candidate, at the trainer's vocabulary."""
    tiling = PERSISTENT
    blocks = {"rows": [tiling.rows, tiling.width], "head": [tiling.columns, tiling.width]}
    descriptors = {name: f"tensordesc<bf16{block}>" for name, block in blocks.items()}
    return (
        Specialisation(
            name="persistent head bf16 V 151,665 H 1,536",
            kernel=_persistent_head_kernel,
            signature=descriptors | TILE_TYPES | {"exps_ptr": "*bf16"},
            constants={**tile_constants(tiling, 151_665, 1536), "INTERPRETED": False},
            aligned=("parts_ptr", "exps_ptr", "exps_stride_r"),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            tensor_cores=True,
            capabilities=(90,),
        ),
    )
