"""`thresher bench compile` on kernels with one fault each: it is found, counted, named, and no other one is."""

from typing import Any

import pytest

pytest.importorskip("triton")

from thresher.bench.compile.target import TARGETS

pytestmark = pytest.mark.slow


def test_nothing_is_left_in_the_cache(ours: Any, toys: Any) -> None:
    """Nor taken from it: a kernel that is found there leaves no log to read."""
    assert ours.left_in_cache == toys.left_in_cache == []


def test_what_is_sound_passes(toys: Any) -> None:
    for target, instruction in (("sm_80", "mma"), ("sm_90", "wgmma")):
        row = toys.rows["sound product", target]
        assert row["faults"] == [] and row["figures"]["matrix"] == [instruction]
        assert row["figures"]["threads"] == 128 and row["figures"]["dynamic_shared"] >= (64 + 128) * 64 * 2
        few = toys.rows["few rows", target]  # a wgmma takes 64
        assert few["faults"] == [] and few["figures"]["matrix"] == ["mma"]
        assert few["maxnreg"] == 64 >= few["figures"]["registers"]
        assert toys.rows["sound", target]["faults"] == [] and toys.rows["sound", target]["figures"]["matrix"] == []


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("spilling", "spills inside a loop ("),
        ("narrow", "has narrow loads ("),
        ("sprawling", " bytes of shared memory a block, and there are "),
        ("inexact", "instructions where products are meant to be exact"),
        ("plain", "instruction and is meant to"),
    ],
)
def test_what_is_wrong_is_found_and_named(toys: Any, kernel: str, fault: str, target: str) -> None:
    row = toys.rows[kernel, target]
    assert fault in row["faults"][0]
    assert f"{kernel} for {target} {row['faults'][0]}" in toys.complaint


def test_a_kernel_is_compiled_only_for_the_gpus_that_it_is_launched_on(toys: Any) -> None:
    assert ("elsewhere", "sm_90") in toys.rows and ("elsewhere", "sm_80") not in toys.rows


def test_a_fault_is_status_1_and_one_line(toys: Any) -> None:
    assert toys.status == 1
    assert toys.complaint.startswith("thresher: ") and toys.complaint.count("\n") == 1
    assert "sound" not in toys.complaint


def test_a_spill_is_counted(toys: Any) -> None:
    for target in ("sm_80", "sm_90"):
        for kernel in ("spilling", "spilling once"):
            found = toys.rows[kernel, target]["figures"]
            assert min(found["stack"], found["spill_stores"], found["spill_loads"]) > 0


def test_a_spill_outside_of_loops_is_reported_and_no_fault(toys: Any) -> None:
    for target in ("sm_80", "sm_90"):
        row = toys.rows["spilling once", target]
        code = row["code"]
        assert row["faults"] == [] and code["loops"] == [] and code["epilogue"]["spill_stores"] > 0
        looping = toys.rows["spilling", target]["code"]
        assert looping["loop"]["spill_stores"] + looping["loop"]["spill_loads"] > 0 and len(looping["loops"]) == 1


def test_the_widths_of_loads_and_stores_are_counted(toys: Any) -> None:
    """1,024 float32 by 128 threads: two vectors of four each; and by scalars, where a mask may cut any of them off."""
    for target in ("sm_80", "sm_90"):
        wide, narrow = toys.rows["wide", target], toys.rows["narrow", target]
        assert wide["faults"] == [] and wide["code"]["epilogue"]["loads"] == wide["code"]["epilogue"]["stores"] == {
            "16": 2
        }
        assert narrow["code"]["epilogue"]["loads"] == narrow["code"]["epilogue"]["stores"] == {"4": 16}
        assert toys.rows["sound", target]["faults"] == []  # as narrow, and not declared wide


def test_what_a_program_keeps_in_flight_and_its_share_of_peak(toys: Any) -> None:
    for target, chip, sms in (("sm_80", "A100-80", 108), ("sm_90", "H200", 132)):
        row = toys.rows["wide", target]
        found = row["prediction"]
        assert found["chip"] == chip and found["blocks"] == row["blocks_per_sm"] == 16
        assert found["in_flight"] == 16 * 4096 and found["occupancy"] == 1
        assert found["needed"] * sms == pytest.approx(
            {"sm_80": 466 / 1.41 * 2039, "sm_90": 479 / 1.83 * 4800}[target], rel=1e-3
        )
        assert 0.5 < found["share_of_peak"] <= 1
        assert toys.rows["sound", target]["prediction"]["share_of_peak"] is None
        product = toys.rows["sound product", target]["prediction"]
        assert product["in_flight"] == product["blocks"] * 2 * (64 + 128) * 64 * 2  # two stages


def test_too_much_shared_memory_leaves_room_for_no_block(toys: Any) -> None:
    for target in ("sm_80", "sm_90"):
        row = toys.rows["sprawling", target]
        assert row["figures"]["dynamic_shared"] > TARGETS[target].shared_per_block
        assert row["blocks_per_sm"] == 0


def test_what_ptxas_refuses_is_a_row_without_figures(toys: Any) -> None:
    row = toys.rows["refused", "sm_90"]
    assert row["figures"] is None and row["blocks_per_sm"] is None
    assert row["faults"] == ["does not compile: error: Not a name of any known instruction: 'conjure'"]
    assert "Generated by LLVM" not in toys.said  # Triton prints the whole PTX when ptxas fails
