"""What the assembler wrote is read, whichever it was, and a list that does not match its kernel is refused."""

from typing import Any

import pytest

pytest.importorskip("triton")

from thresher.bench.compile import compiler
from thresher.bench.compile.sass import Code, Region
from thresher.bench.compile.target import TARGETS
from thresher.kernels.registry import Specialisation


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            "PTXAS error: failed\n`ptxas` stderr:\nptxas fatal   : (C7602) Insufficient registers (64).\nmore",
            "fatal: (C7602) Insufficient registers (64)",
        ),
        ("PTXAS error: x\nptxas-blackwell a.ptx, line 8; error   : Not a name", "error: Not a name"),
        ("`ptxas` raised SIGSEGV\nRepro command: ptxas", "`ptxas` raised SIGSEGV"),
    ],
)
def test_the_complaint_is_what_ptxas_says_first(message: str, complaint: str) -> None:
    assert compiler.ptxas_complaint(message) == complaint


OLD = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_80'
ptxas info    : Function properties for f
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 64 bytes smem, 400 bytes cmem[0]
"""
NEW = """ptxas-blackwell info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due \
to insufficient register resources for the wgmma pipeline in the function 'f' in line 683
ptxas-blackwell info    : Function properties for f
    1032 bytes stack frame, 2080 bytes spill stores, 1776 bytes spill loads
ptxas-blackwell info    : Function properties for callee
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas-blackwell info    : Used 255 registers, used 1 barriers, 1040 bytes cumulative stack size
"""


def test_the_logs_of_both_assemblers_are_read() -> None:
    """Triton 3.9 compiles for sm_90 with another ptxas than for sm_80, 3.6 and 3.7 with one for both."""
    plain = compiler.read_figures(OLD, ".reqntid 256\n mma.sync.aligned.m16n8k16", 65536)
    assert (plain.registers, plain.stack, plain.threads, plain.matrix) == (128, 0, 256, ("mma",))
    assert (plain.static_shared, plain.dynamic_shared, plain.shared) == (64, 65536, 65600)
    assert not plain.wgmma_serialised
    spilled = compiler.read_figures(NEW, ".reqntid 256\n wgmma.mma_async.sync.aligned.m64n256k16", 0)
    assert (spilled.spill_stores, spilled.spill_loads, spilled.stack) == (2084, 1780, 1040)
    assert spilled.matrix == ("wgmma",) and spilled.wgmma_serialised
    entry = Specialisation(name="toy", kernel=None, signature={}, constants={}, tensor_cores=True)
    said = "spills inside a loop (0 stores and 2 loads of local memory there; a thread keeps 1,040 bytes on the stack)"
    for loads, faults in ((2, (said,)), (0, ())):
        region = Region(instructions=9, loads={}, copies={}, stores={}, bulk=0, spill_loads=loads, spill_stores=0)
        code = Code(prologue=region, loop=region, epilogue=region, loops=(9,))
        found = compiler.faults(spilled, code, TARGETS["sm_90"], entry)
        assert found == (*faults, "has its wgmma instructions serialised")
    with pytest.raises(RuntimeError, match="has its wording changed"):
        compiler.read_figures("ptxas info: all is well", ".reqntid 32", 0)


class Kernel:
    """As much of a jitted function as `check` looks at."""

    arg_names = ("x_ptr", "n", "BLOCK")


@pytest.mark.parametrize(
    ("signature", "constants", "aligned", "wrong"),
    [
        ({"x_ptr": "*fp32"}, {"BLOCK": 4}, (), "n"),
        ({"x_ptr": "*fp32", "n": "i32", "m": "i32"}, {"BLOCK": 4}, (), "m"),
        ({"x_ptr": "*fp32", "n": "i32"}, {"BLOCK": 4, "n": 1}, (), "n"),
        ({"x_ptr": "*fp32", "n": "i32"}, {"BLOCK": 4}, ("y_ptr",), "y_ptr"),
    ],
)
def test_a_list_that_does_not_match_its_kernel_is_named(
    signature: dict[str, str], constants: dict[str, Any], aligned: tuple[str, ...], wrong: str
) -> None:
    entry = Specialisation(name="toy", kernel=Kernel(), signature=signature, constants=constants, aligned=aligned)
    with pytest.raises(ValueError, match=f"^specialisation toy: {wrong}: expected every argument of the kernel "):
        compiler.check(entry)
