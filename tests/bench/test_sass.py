"""Test how a disassembly is cut into prologue, loops and epilogue, and the predictions from it, by hand."""

from typing import Any

import pytest

from thresher.bench.compile import TARGETS, Figures, blocks_per_sm, predict
from thresher.bench.sass import Code, Region, read_code
from thresher.engine.planning.time import CHIPS, fastest
from thresher.kernels.registry import ProgramWork, Specialisation


def code(*lines: str) -> Code:
    """Return a disassembly; a line that begins with ".L" is a label, any other an instruction."""
    text, address = ".text._kernel:\n", 0
    for line in lines:
        if line.startswith(".L"):
            text += f"{line}:\n"
        else:
            text += f"        /*{address:04x}*/                   {line} ;\n"
            address += 16
    return read_code(text)


def counts(found: Code) -> tuple[int, int, int]:
    return found.prologue.instructions, found.loop.instructions, found.epilogue.instructions


END = ("EXIT", ".L_x_9", "BRA `(.L_x_9)", "NOP", "NOP")


def test_a_loop_is_between_prologue_and_epilogue() -> None:
    found = code(
        "MOV R1, R2",
        "LDG.E R1, [R2.64]",
        ".L_x_0",
        "LDG.E.128 R4, [R2.64]",
        "@P0 STG.E.128 [R2.64], R4",
        "@P1 BRA `(.L_x_0)",
        "STG.E.U16 [R2.64], R4",
        *END,
    )
    assert counts(found) == (2, 3, 2) and found.loops == (3,)
    assert (found.prologue.loads, found.loop.loads, found.loop.stores) == ({4: 1}, {16: 1}, {16: 1})
    assert found.epilogue.stores == {2: 1} and found.loop.loaded == 16 and not found.asynchronous


def test_without_a_loop_all_is_epilogue() -> None:
    assert counts(code("MOV R1, R2", "@!P0 EXIT", "IADD3 R1, R1, 0x1, RZ", *END)) == (0, 0, 4)


def test_a_rare_path_behind_the_end_jumps_back_and_makes_no_loop() -> None:
    found = code("@P0 BRA `(.L_x_5)", ".L_x_4", "MOV R1, R2", "EXIT", ".L_x_5", "MOV R1, R3", "BRA `(.L_x_4)", *END[1:])
    assert counts(found) == (0, 0, 5) and found.loops == ()


def test_a_rare_path_of_a_loop_is_in_it_and_a_loop_inside_another_counts_once() -> None:
    found = code(
        ".L_x_0",
        ".L_x_1",
        "MOV R1, R2",
        "@P3 BRA `(.L_x_5)",
        ".L_x_2",
        "BRA.U UP0, `(.L_x_1)",
        "@P1 BRA `(.L_x_0)",
        "EXIT",
        ".L_x_5",
        "MOV R1, R3",
        "LDL R4, [R1]",
        "BRA `(.L_x_2)",
    )
    assert counts(found) == (0, 7, 1) and found.loops == (7,)
    assert (found.spills_in_loops, found.spills_outside) == (1, 0)


def test_two_loops_and_what_lies_between_them() -> None:
    found = code(".L_x_0", "@P0 BRA `(.L_x_0)", "STL [R1], R4", ".L_x_1", "MOV R1, R2", "@P0 BRA `(.L_x_1)", *END)
    assert counts(found) == (1, 3, 1) and found.loops == (2, 1)
    assert (found.spills_in_loops, found.spills_outside) == (0, 1)


def test_a_call_that_returns_is_a_subroutine_and_one_that_does_not_is_a_jump() -> None:
    looping = ("MOV R1, R2", ".L_x_0", "CALL.REL.NOINC `(.L_x_7)", "@P0 BRA `(.L_x_0)", "EXIT", ".L_x_7", "MOV R1, R3")
    assert counts(code(*looping, "RET.REL.NODEC R2 `(_kernel)")) == (1, 4, 1)
    leaving = (".L_x_0", "MOV R1, R2", "@P0 CALL.REL.NOINC `(.L_x_7)", "BRA `(.L_x_0)", ".L_x_7", "MOV R1, R3", "EXIT")
    assert counts(code(*leaving)) == (0, 3, 2)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("LDG.E.128 R4, [R2.64]", "STG.E.128 [R2.64], R4"), ()),
        (("LDG.E.128 R4, [R2.64]", "LDG.E R1, [R2.64]"), ()),  # one scalar next to a vector
        (("LDG.E.64 R4, [R2.64]", "LDG.E.128 R1, [R2.64]"), ("loads (1 of 8 bytes)",)),
        (("LDGSTS.E.BYPASS.LTC128B.128 [R4], [R2.64]", "STG.E.U16 [R2.64], R4"), ("stores (1 of 2 bytes)",)),
        (("LDGSTS.E [R4], [R2.64]", "STG.E.U8 [R2.64], R4"), ("loads (1 of 4 bytes)", "stores (1 of 1 bytes)")),
    ],
)
def test_a_bulk_path_is_narrow_where_its_bytes_are(lines: tuple[str, ...], said: tuple[str, ...]) -> None:
    expected = tuple(f"has narrow {one} where 16 bytes are expected" for one in said)
    assert code(*lines, *END).narrow() == expected
    looping = code("LDG.E R1, [R2.64]", "LDG.E R1, [R2.64]", ".L_x_0", *lines, "@P0 BRA `(.L_x_0)", *END)
    assert looping.narrow() == expected  # scalars before the loop are not its bulk


def test_copies_to_shared_memory_are_asynchronous() -> None:
    assert code("LDGSTS.E.BYPASS.128 [R4], [R2.64]", *END).epilogue.copies == {16: 1}
    tensor = code("UTMALDG.2D [UR8], [UR4]", *END)
    assert tensor.asynchronous and tensor.epilogue.bulk == 1


def test_a_text_without_instructions_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has its format changed"):
        read_code("nothing of the kind\n")


def figures(registers: int = 64, shared: int = 0, matrix: tuple[str, ...] = ()) -> Figures:
    none = {"stack": 0, "spill_stores": 0, "spill_loads": 0, "static_shared": 0, "wgmma_serialised": False}
    return Figures(registers=registers, dynamic_shared=shared, threads=128, matrix=matrix, **none)


def region(instructions: int, loads: dict[int, int] | None = None, copies: dict[int, int] | None = None) -> Region:
    none = {"stores": {}, "bulk": 0, "spill_loads": 0, "spill_stores": 0}
    return Region(instructions=instructions, loads=loads or {}, copies=copies or {}, **none)


def compiled(loop: Region, around: int = 0) -> Code:
    copies = None if loop.loads else {16: 100}
    return Code(prologue=region(around), loop=loop, epilogue=region(0, copies, copies), loops=(loop.instructions,))


def entry(**changes: Any) -> Specialisation:
    return Specialisation(name="toy", kernel=None, signature={}, constants={}, **changes)


COPIES = region(100, {16: 8}, {16: 8})  # 8 x 16 bytes x 128 threads = 16 KiB per trip
SM80, SM90 = TARGETS["sm_80"], TARGETS["sm_90"]


@pytest.mark.parametrize(
    ("changes", "loop", "shared", "bytes_a_program"),
    [
        ({"num_stages": 3}, COPIES, 48 * 1024, 2 * 16 * 1024),  # two stages of three are in flight
        ({"num_stages": 4}, COPIES, 64 * 1024, 3 * 16 * 1024),
        ({"num_stages": 3}, region(100, {16: 32}, {16: 32}), 48 * 1024, 48 * 1024),  # several trips in one pass
        ({"num_stages": 3}, region(0), 48 * 1024, 48 * 1024),  # all trips unrolled: two buffers, both in flight
        ({"num_stages": 3, "tile_bytes": 8192}, COPIES, 48 * 1024, 2 * 8192),  # as declared
        ({"num_stages": 3}, region(100, {16: 2, 4: 1}), 0, 128 * 36),  # through registers: one pass of the loop
    ],
)
def test_bytes_in_flight(changes: dict[str, Any], loop: Region, shared: int, bytes_a_program: int) -> None:
    found = predict(entry(**changes), figures(shared=shared), compiled(loop), SM80)
    assert found.blocks == min(8, 164 * 1024 // (shared + 1024)) and found.occupancy == found.blocks * 4 / 64
    assert found.in_flight == found.blocks * bytes_a_program
    assert found.share_of_peak is None


def test_wgmma_keeps_the_stage_in_use_in_shared_memory() -> None:
    taken = figures(shared=48 * 1024, matrix=("wgmma",))
    found = predict(entry(num_stages=3, tensor_cores=True), taken, compiled(region(0)), SM90)
    assert found.in_flight == found.blocks * 32 * 1024


def test_what_little_s_law_asks_for_is_that_of_the_fastest_memory() -> None:
    assert (fastest(80).name, fastest(90).name) == ("A100-80", "H200")
    assert CHIPS["H100"].bytes_in_flight_per_sm == pytest.approx(479 / 1.83e9 * 3.35e12 / 132)
    assert predict(entry(), figures(), compiled(COPIES), SM90).needed == round(479 / 1.83e9 * 4.8e12 / 132)


def test_a_chip_s_peak_is_its_multiprocessors_at_their_clock() -> None:
    """Tensor cores do 1,024 and 2,048 multiply-adds per cycle, so the data sheets are consistent."""
    for chip in CHIPS.values():
        a_cycle = 2 * (1024 if chip.capability == 80 else 2048)
        assert chip.sms * a_cycle * chip.clock_hz == pytest.approx(chip.flops_per_s, rel=2e-3)


def test_memory_is_filled_where_enough_is_in_flight_and_else_in_proportion() -> None:
    chip = fastest(80)
    work = ProgramWork(flops=0, bytes=1e6, trips=10)
    full = predict(entry(work=work), figures(), compiled(region(10, {16: 8})), SM80)
    assert full.in_flight > full.needed and full.share_of_peak == pytest.approx(1)
    slow = predict(entry(work=work), figures(registers=255), compiled(region(10, {4: 1})), SM80)
    assert slow.share_of_peak == pytest.approx(slow.in_flight / chip.bytes_in_flight_per_sm) and slow.in_flight == 1024


def test_instructions_bound_what_they_outlast() -> None:
    chip = fastest(90)
    flops = 1e6
    work = ProgramWork(flops=flops, bytes=1, trips=20)
    by_flops = flops / (chip.flops_per_s / chip.sms)
    a_warp_instruction = 4 / (4 * chip.clock_hz)  # 128 threads, four schedulers
    taken = figures(matrix=("wgmma",))
    hidden = predict(entry(work=work, tensor_cores=True), taken, compiled(region(100, {16: 8}), 50), SM90)
    assert hidden.blocks > 1
    assert hidden.share_of_peak == pytest.approx(by_flops / (2050 * a_warp_instruction))
    alone = predict(
        entry(work=work, tensor_cores=True), figures(shared=200 * 1024, matrix=("wgmma",)), compiled(COPIES, 5000), SM90
    )
    assert alone.blocks == 1
    loop = max(by_flops, 2000 * a_warp_instruction)
    assert alone.share_of_peak == pytest.approx(by_flops / (loop + 5000 * a_warp_instruction))


def test_trips_that_ptxas_put_into_one_pass_are_counted_once() -> None:
    work = ProgramWork(flops=1e6, bytes=1, trips=20)
    chosen = entry(work=work, tensor_cores=True, tile_bytes=4096)  # a quarter of what a pass of COPIES loads
    found = predict(chosen, figures(matrix=("mma",), shared=12288), compiled(COPIES), SM80)
    chip = fastest(80)
    by_flops = 1e6 / (chip.flops_per_s / chip.sms)
    assert found.share_of_peak == pytest.approx(by_flops / max(by_flops, 5 * 100 / chip.clock_hz))


def test_where_no_block_fits_nothing_is_predicted() -> None:
    work = ProgramWork(flops=1, bytes=1)
    found = predict(entry(work=work), figures(shared=300 * 1024), compiled(COPIES), SM90)
    assert (found.blocks, found.in_flight, found.share_of_peak) == (0, 0, None)


@pytest.mark.parametrize(
    ("registers", "threads", "kib", "on_80", "on_90"),
    [
        (32, 256, 0, 8, 8),  # the limit of threads
        (16, 32, 0, 32, 32),  # the limit of blocks
        (128, 256, 0, 2, 2),
        (129, 256, 0, 1, 1),  # 136 are allocated
        (168, 128, 0, 3, 3),  # 12 warps, and not the 65,536 // 21,504 of a file without quarters
        (216, 32, 0, 8, 8),  # 2 per scheduler; 9 would fit an undivided register file
        (255, 128, 0, 2, 2),
        (32, 128, 64, 2, 3),
        (32, 128, 81, 2, 2),  # with the driver's KiB exactly half of 164
        (32, 128, 113, 1, 2),  # and of 228
        (32, 128, 114, 1, 1),
        (32, 128, 163, 1, 1),
        (32, 128, 164, 0, 1),
        (32, 128, 227, 0, 1),
        (32, 128, 227.5, 0, 0),
    ],
)
def test_blocks_per_multiprocessor(registers: int, threads: int, kib: float, on_80: int, on_90: int) -> None:
    shared = int(kib * 1024)
    assert [blocks_per_sm(registers, threads, shared, TARGETS[name]) for name in ("sm_80", "sm_90")] == [on_80, on_90]
