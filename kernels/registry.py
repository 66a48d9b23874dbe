"""What a Triton kernel is compiled for: one record per specialisation that a launcher may ask for.

Each kernel file lists its own, beside the launcher that uses the same constants; `thresher bench compile` turns the
lists into code for GPUs that need not be there, and reports registers, spills and shared memory.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialisation:
    """One kernel with the types and constants of one launch.

    signature: argument name -> Triton's type ("*bf16", "*fp32", "i32", "i64", "fp32"), without the constants.
    constants: `tl.constexpr` argument name -> value. aligned: arguments that launches find divisible by 16
    (pointers that torch allocated, strides padded to it), which the compiler turns into wide loads.
    capabilities: the GPUs that this tiling is launched on, 80 for sm_80 and later without wgmma, 90 for sm_90.
    tensor_cores: whether the code is expected to hold matrix instructions (mma on sm_80, wgmma on sm_90).
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    tensor_cores: bool = False
    capabilities: tuple[int, ...] = (80, 90)
