"""Bytes in flight beside Little's law, and the share of peak that follows, by arithmetic done here by hand."""

from typing import Any

import pytest

from thresher.bench.compile.compiler import Figures
from thresher.bench.compile.predict import predict
from thresher.bench.compile.sass import Code, Region
from thresher.bench.compile.target import TARGETS
from thresher.engine.planning.time import CHIPS, fastest
from thresher.kernels.registry import ProgramWork, Specialisation


def figures(registers: int = 64, shared: int = 0, matrix: tuple[str, ...] = ()) -> Figures:
    return Figures(
        registers=registers,
        stack=0,
        spill_stores=0,
        spill_loads=0,
        static_shared=0,
        dynamic_shared=shared,
        threads=128,
        matrix=matrix,
        wgmma_serialised=False,
    )


def region(instructions: int, loads: dict[int, int] | None = None, copies: dict[int, int] | None = None) -> Region:
    return Region(
        instructions=instructions,
        loads=loads or {},
        copies=copies or {},
        stores={},
        bulk=0,
        spill_loads=0,
        spill_stores=0,
    )


def code(loop: Region, around: int = 0) -> Code:
    copies = None if loop.loads else {16: 100}
    return Code(prologue=region(around), loop=loop, epilogue=region(0, copies, copies), loops=(loop.instructions,))


def entry(**changes: Any) -> Specialisation:
    return Specialisation(name="toy", kernel=None, signature={}, constants={}, **changes)


COPIES = region(100, {16: 8}, {16: 8})  # 8 x 16 bytes x 128 threads = 16 KiB a trip
SM80, SM90 = TARGETS["sm_80"], TARGETS["sm_90"]


@pytest.mark.parametrize(
    ("changes", "loop", "shared", "bytes_a_program"),
    [
        ({"num_stages": 3}, COPIES, 48 * 1024, 2 * 16 * 1024),  # two stages of three are on the way
        ({"num_stages": 4}, COPIES, 64 * 1024, 3 * 16 * 1024),
        ({"num_stages": 3}, region(100, {16: 32}, {16: 32}), 48 * 1024, 48 * 1024),  # several trips in one pass
        ({"num_stages": 3}, region(0), 48 * 1024, 48 * 1024),  # all trips unrolled: two buffers, both on the way
        ({"num_stages": 3, "tile_bytes": 8192}, COPIES, 48 * 1024, 2 * 8192),  # as declared
        ({"num_stages": 3}, region(100, {16: 2, 4: 1}), 0, 128 * 36),  # through registers: a pass of the loop
    ],
)
def test_bytes_in_flight(changes: dict[str, Any], loop: Region, shared: int, bytes_a_program: int) -> None:
    found = predict(entry(**changes), figures(shared=shared), code(loop), SM80)
    assert found.blocks == min(8, 164 * 1024 // (shared + 1024)) and found.occupancy == found.blocks * 4 / 64
    assert found.in_flight == found.blocks * bytes_a_program
    assert found.share_of_peak is None


def test_wgmma_keeps_the_stage_in_use_in_shared_memory() -> None:
    taken = figures(shared=48 * 1024, matrix=("wgmma",))
    found = predict(entry(num_stages=3, tensor_cores=True), taken, code(region(0)), SM90)
    assert found.in_flight == found.blocks * 32 * 1024


def test_what_little_s_law_asks_for_is_that_of_the_fastest_memory() -> None:
    assert (fastest(80).name, fastest(90).name) == ("A100-80", "H200")
    assert CHIPS["H100"].bytes_in_flight_per_sm == pytest.approx(479 / 1.83e9 * 3.35e12 / 132)
    assert predict(entry(), figures(), code(COPIES), SM90).needed == round(479 / 1.83e9 * 4.8e12 / 132)


def test_a_chip_s_peak_is_its_multiprocessors_at_their_clock() -> None:
    """1,024 and 2,048 multiply-adds a cycle of tensor cores: the data sheets agree with themselves."""
    for chip in CHIPS.values():
        a_cycle = 2 * (1024 if chip.capability == 80 else 2048)
        assert chip.sms * a_cycle * chip.clock_hz == pytest.approx(chip.flops_per_s, rel=2e-3)


def test_memory_is_filled_where_enough_is_in_flight_and_else_in_proportion() -> None:
    chip = fastest(80)
    work = ProgramWork(flops=0, bytes=1e6, trips=10)
    full = predict(entry(work=work), figures(), code(region(10, {16: 8})), SM80)
    assert full.in_flight > full.needed and full.share_of_peak == pytest.approx(1)
    slow = predict(entry(work=work), figures(registers=255), code(region(10, {4: 1})), SM80)
    assert slow.share_of_peak == pytest.approx(slow.in_flight / chip.bytes_in_flight_per_sm) and slow.in_flight == 1024


def test_instructions_bound_what_they_outlast() -> None:
    chip = fastest(90)
    flops = 1e6
    work = ProgramWork(flops=flops, bytes=1, trips=20)
    by_flops = flops / (chip.flops_per_s / chip.sms)
    a_warp_instruction = 4 / (4 * chip.clock_hz)  # 128 threads, four schedulers
    taken = figures(matrix=("wgmma",))
    hidden = predict(entry(work=work, tensor_cores=True), taken, code(region(100, {16: 8}), 50), SM90)
    assert hidden.blocks > 1
    assert hidden.share_of_peak == pytest.approx(by_flops / (2050 * a_warp_instruction))
    alone = predict(
        entry(work=work, tensor_cores=True), figures(shared=200 * 1024, matrix=("wgmma",)), code(COPIES, 5000), SM90
    )
    assert alone.blocks == 1
    loop = max(by_flops, 2000 * a_warp_instruction)
    assert alone.share_of_peak == pytest.approx(by_flops / (loop + 5000 * a_warp_instruction))


def test_trips_that_ptxas_put_into_one_pass_are_counted_once() -> None:
    work = ProgramWork(flops=1e6, bytes=1, trips=20)
    chosen = entry(work=work, tensor_cores=True, tile_bytes=4096)  # a quarter of what a pass of COPIES loads
    found = predict(chosen, figures(matrix=("mma",), shared=12288), code(COPIES), SM80)
    chip = fastest(80)
    by_flops = 1e6 / (chip.flops_per_s / chip.sms)
    assert found.share_of_peak == pytest.approx(by_flops / max(by_flops, 5 * 100 / chip.clock_hz))


def test_where_no_block_fits_nothing_is_predicted() -> None:
    work = ProgramWork(flops=1, bytes=1)
    found = predict(entry(work=work), figures(shared=300 * 1024), code(COPIES), SM90)
    assert (found.blocks, found.in_flight, found.share_of_peak) == (0, 0, None)
