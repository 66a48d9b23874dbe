"""The kinds of GPU that kernels are compiled for, and how many blocks of a kernel one multiprocessor holds.

The limits are those of the table of technical specifications per compute capability in CUDA's programming guide.

Deliberately absent: clusters of blocks (no kernel here asks for them).
"""

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of GPU. matrix: the PTX instruction of its tensor cores; shared memory in bytes."""

    name: str
    capability: int
    gpus: str
    matrix: str
    shared_per_block: int
    shared_per_sm: int


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="sm_80",
            capability=80,
            gpus="A100, A800",
            matrix="mma",
            shared_per_block=163 * KIB,
            shared_per_sm=164 * KIB,
        ),
        Target(
            name="sm_90",
            capability=90,
            gpus="H100, H200",
            matrix="wgmma",
            shared_per_block=227 * KIB,
            shared_per_sm=228 * KIB,
        ),
    )
}
# Of a multiprocessor, the same on both.
REGISTERS_PER_SM, THREADS_PER_SM, BLOCKS_PER_SM = 64 * KIB, 2048, 32
WARP, SCHEDULERS = 32, 4
REGISTER_UNIT, SHARED_UNIT = 256, 128  # allocated in multiples: registers a warp, bytes a block
SHARED_RESERVED = KIB  # of every block, by the driver; on top of what the kernel asks for


def blocks_per_sm(registers: int, threads: int, shared: int, target: Target) -> int:
    """How many blocks one multiprocessor of `target` holds at a time; 0 where not even one fits. registers: a thread's;
    threads and bytes of shared memory: a block's."""
    if shared > target.shared_per_block:
        return 0
    warps = -(-threads // WARP)
    registers_per_warp = _up(registers * WARP, REGISTER_UNIT)
    # Each of the four schedulers has a quarter of the registers, and no warp straddles two of them.
    warps_that_fit = SCHEDULERS * (REGISTERS_PER_SM // SCHEDULERS // registers_per_warp)
    return min(
        warps_that_fit // warps,
        target.shared_per_sm // _up(shared + SHARED_RESERVED, SHARED_UNIT),
        THREADS_PER_SM // (warps * WARP),
        BLOCKS_PER_SM,
    )


def occupancy(blocks: int, threads: int) -> float:
    """The share of a multiprocessor's warps that `blocks` blocks fill."""
    return blocks * -(-threads // WARP) * WARP / THREADS_PER_SM


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
