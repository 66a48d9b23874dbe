"""From a kernel's code to a predicted share of peak. A prediction, to be held against the first measurement.

One multiprocessor holds `blocks` programs. What they keep on the way from memory, in bytes:

    in flight = blocks x (stages - 1) x tile       where copies are asynchronous (LDGSTS, TMA): one stage is in use
              = blocks x threads x bytes loaded    elsewhere: by a thread in one pass of the loops, or of all code

tile: what one trip of the main loop copies, declared as `tile_bytes`, else what the loops' text copies, else shared
memory / buffers; never more in flight than there is shared memory. wgmma reads its operands in shared memory, so Triton
gives it a buffer for every stage, and one fewer elsewhere, where the stage in use lies in registers. Little's law asks
for latency x bandwidth (engine/planning/time.py), and of a target's chips the one is taken that asks for most.

Where the work of a program is declared (`ProgramWork`: flops, bytes of memory, trips), its times on one SM are

    t_flops = flops / (peak / SMs)         t_bytes = bytes / (bandwidth / SMs) / min(1, in flight / needed)
    t_loop, t_rest = warps x instructions / (4 a cycle)        of the loops x trips, and of prologue and epilogue
    predicted = max(t_flops, t_bytes, t_loop + t_rest) where another block's loop hides what surrounds this one's,
                max(t_flops, t_bytes, t_loop) + t_rest where a block is alone
    share of peak = max(t_flops, t_bytes with enough in flight) / predicted

Flops count where the kernel has matrix instructions; elsewhere the instructions themselves are the limit.

Deliberately absent: the L2 cache, waves of programs, launches, special functions (MUFU), stalls.
"""

from dataclasses import dataclass

from thresher.bench.compile.compiler import Figures
from thresher.bench.compile.sass import Code
from thresher.bench.compile.target import SCHEDULERS, WARP, Target, blocks_per_sm, occupancy
from thresher.engine.planning.time import Chip, fastest
from thresher.kernels.registry import Specialisation


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one multiprocessor. in_flight and needed in bytes; occupancy: the share of its warps that blocks fill;
    share_of_peak: None where the kernel declares no work, or no block fits."""

    blocks: int
    occupancy: float
    in_flight: int
    needed: int
    chip: str
    share_of_peak: float | None


def predict(specialisation: Specialisation, figures: Figures, code: Code, target: Target) -> Prediction:
    """What the compiled kernel should do on the chip of `target` whose memory is fastest."""
    chip = fastest(target.capability)
    blocks = blocks_per_sm(figures.registers, figures.threads, figures.shared, target)
    in_flight = blocks * _in_flight(specialisation, figures, code)
    share = None
    if specialisation.work is not None and blocks:
        share = _share(specialisation, figures, code, chip, blocks, in_flight)
    return Prediction(
        blocks=blocks,
        occupancy=occupancy(blocks, figures.threads),
        in_flight=in_flight,
        needed=round(chip.bytes_in_flight_per_sm),
        chip=chip.name,
        share_of_peak=share,
    )


def _in_flight(specialisation: Specialisation, figures: Figures, code: Code) -> int:
    """Bytes that one program keeps on the way."""
    stages = specialisation.num_stages
    if code.asynchronous and stages > 1:
        copied = figures.threads * sum(width * count for width, count in code.loop.copies.items())
        buffers = stages if "wgmma" in figures.matrix else stages - 1
        tile = specialisation.tile_bytes or copied or figures.dynamic_shared // buffers
        return min((stages - 1) * tile, figures.dynamic_shared)
    return figures.threads * sum(width * count for width, count in code.bulk_path("loads").items())


def _share(
    specialisation: Specialisation, figures: Figures, code: Code, chip: Chip, blocks: int, in_flight: int
) -> float:
    work = specialisation.work
    assert work is not None
    by_flops = work.flops / (chip.flops_per_s / chip.sms) if figures.matrix else 0.0
    by_bytes = work.bytes / (chip.bytes_per_s / chip.sms)
    warp_instructions = -(-figures.threads // WARP) / (SCHEDULERS * chip.clock_hz)
    in_loops = warp_instructions * code.loop.instructions * _passes(specialisation, figures, code)
    around = warp_instructions * (code.prologue.instructions + code.epilogue.instructions)
    slowed = by_bytes / min(1.0, in_flight / chip.bytes_in_flight_per_sm) if in_flight else by_bytes
    hidden = blocks > 1
    predicted = max(by_flops, slowed, in_loops + around * hidden) + around * (not hidden)
    return max(by_flops, by_bytes) / predicted


def _passes(specialisation: Specialisation, figures: Figures, code: Code) -> float:
    """How often the loop's text is run: the trips, by how many of them ptxas put into one pass."""
    assert specialisation.work is not None
    loaded = figures.threads * code.loop.loaded
    unrolled = max(1, round(loaded / specialisation.tile_bytes)) if specialisation.tile_bytes else 1
    return specialisation.work.trips / unrolled
