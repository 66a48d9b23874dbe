"""A disassembly is cut into prologue, loops and epilogue; what lies in a loop is told by the graph of blocks."""

import pytest

from thresher.bench.compile.sass import Code, read_code


def code(*lines: str) -> Code:
    """A disassembly: a line that begins with ".L" is a label, any other an instruction."""
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
        (("LDG.E.128 R4, [R2.64]", "LDG.E R1, [R2.64]"), ()),  # one scalar beside a vector
        (("LDG.E.64 R4, [R2.64]", "LDG.E.128 R1, [R2.64]"), ("loads (1 of 8 bytes)",)),
        (("LDGSTS.E.BYPASS.LTC128B.128 [R4], [R2.64]", "STG.E.U16 [R2.64], R4"), ("stores (1 of 2 bytes)",)),
        (("LDGSTS.E [R4], [R2.64]", "STG.E.U8 [R2.64], R4"), ("loads (1 of 4 bytes)", "stores (1 of 1 bytes)")),
    ],
)
def test_a_bulk_path_is_narrow_where_its_bytes_are(lines: tuple[str, ...], said: tuple[str, ...]) -> None:
    expected = tuple(f"has narrow {one} where 16 bytes are meant" for one in said)
    assert code(*lines, *END).narrow() == expected
    looping = code("LDG.E R1, [R2.64]", "LDG.E R1, [R2.64]", ".L_x_0", *lines, "@P0 BRA `(.L_x_0)", *END)
    assert looping.narrow() == expected  # scalars before the loop are not its bulk


def test_copies_to_shared_memory_are_asynchronous() -> None:
    assert code("LDGSTS.E.BYPASS.128 [R4], [R2.64]", *END).epilogue.copies == {16: 1}
    tensor = code("UTMALDG.2D [UR8], [UR4]", *END)
    assert tensor.asynchronous and tensor.epilogue.bulk == 1


def test_a_text_without_instructions_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has its form changed"):
        read_code("nothing of the kind\n")
