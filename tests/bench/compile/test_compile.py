"""`thresher bench compile`: our kernels neither spill nor outgrow a GPU, and a kernel that did would be caught.

Kernels are compiled by the command in processes of its own, since here they may be interpreted ones. Each is run once.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

from thresher.bench.compile import compiler, run_under
from thresher.bench.compile import run as command
from thresher.bench.compile.sass import Code, Region
from thresher.bench.compile.target import TARGETS, blocks_per_sm
from thresher.bench.machine import package_version
from thresher.cli import main as cli
from thresher.kernels.launch.registry import Specialisation, specialisations_of, triton_modules

TOYS = '''
"""Kernels of which each has one thing wrong with it, or none."""
import triton
import triton.language as tl

from thresher.kernels.launch.registry import ProgramWork, Specialisation


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2.0, mask=i < n)


@triton.jit
def centre(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, x - tl.sum(x, 0))


@triton.jit
def drift(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    for _ in range(0, n):
        x = x - tl.sum(x, 0)
    tl.store(x_ptr + i, x)


@triton.jit
def conjure(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    x = tl.inline_asm_elementwise("conjure.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(x_ptr + i, x)


@triton.jit
def multiply(x_ptr, w_ptr, y_ptr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr):
    row, column, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, 64)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, H, 64):
        x = tl.load(x_ptr + row[:, None] * H + depth[None, :] + start)
        w = tl.load(w_ptr + column[None, :] * H + depth[:, None] + start)
        y = tl.dot(x, w, y, input_precision="ieee" if EXACT else "tf32")
    tl.store(y_ptr + row[:, None] * COLUMNS + column[None, :], y)


def rows(name, kernel, block, **more):
    signature = {"x_ptr": "*fp32", "n": "i32"}
    return Specialisation(
        name=name, kernel=kernel, signature=signature, constants={"BLOCK": block}, aligned=("x_ptr",), **more
    )


def product(name, dtype, rows, columns, **more):
    pointers = ("x_ptr", "w_ptr", "y_ptr")
    return Specialisation(
        name=name, kernel=multiply, signature=dict.fromkeys(pointers, dtype) | {"y_ptr": "*fp32"}, aligned=pointers,
        constants={"H": 896, "ROWS": rows, "COLUMNS": columns, "EXACT": dtype == "*bf16"}, **more,
    )


def specialisations():
    return (
        rows("sound", double, 1024),
        product("sound product", "*bf16", 64, 128, tensor_cores=True),
        rows("spilling", drift, 32768),  # 256 values a thread, which has 255 registers
        rows("spilling once", centre, 32768),
        rows("wide", centre, 1024, wide=True, work=ProgramWork(flops=0, bytes=8192)),
        rows("narrow", double, 2048, wide=True),  # a mask of a count that nothing is known about
        product("few rows", "*bf16", 16, 128, tensor_cores=True, wgmma=False, maxnreg=64),
        product("sprawling", "*bf16", 64, 128, tensor_cores=True, num_stages=12),
        product("inexact", "*fp32", 64, 32),
        rows("elsewhere", double, 256, capabilities=(90,)),
        rows("plain", double, 512, tensor_cores=True),
        rows("refused", conjure, 128),
    )
'''


class Run(NamedTuple):
    status: int
    said: str
    complaint: str
    rows: dict[tuple[str, str], Any]  # (kernel, target) -> row
    left_in_cache: list[Path]


def run(folder: Path, *arguments: str) -> Run:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache"), "COLUMNS": "80"}
    command = [sys.executable, "-P", "-W", "ignore", "-m", "thresher.cli", "bench", "compile"]
    done = subprocess.run(
        [*command, "--out", str(folder / "rows.jsonl"), *arguments], capture_output=True, text=True, env=environment
    )
    written = folder / "rows.jsonl"
    rows = [json.loads(line) for line in written.read_text("utf-8").splitlines()] if written.exists() else []
    left = list((folder / "cache").rglob("*.cubin"))
    return Run(done.returncode, done.stdout, done.stderr, {(r["kernel"], r["target"]): r for r in rows}, left)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command as it is, every module of kernels; a process for each target, for they take a minute each."""
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda name: run(tmp_path_factory.mktemp(name), "--target", name), TARGETS))
    return Run(
        max(one.status for one in runs),
        "".join(one.said for one in runs),
        "".join(one.complaint for one in runs),
        {key: row for one in runs for key, row in one.rows.items()},
        [path for one in runs for path in one.left_in_cache],
    )


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("toys")
    (folder / "toys.py").write_text(TOYS)
    return run(folder, "--module", "toys")


def test_no_kernel_is_at_fault(ours: Run) -> None:
    assert (ours.status, ours.complaint) == (0, "")
    assert [row["faults"] for row in ours.rows.values() if row["faults"]] == []
    loops = {key: row["code"]["loop"] for key, row in ours.rows.items()}
    assert {key for key, loop in loops.items() if loop["spill_loads"] or loop["spill_stores"]} == set()


def listed() -> dict[tuple[str, str], Specialisation]:
    """What the modules list: (kernel, target) -> specialisation; no two share a pair."""
    entries = [entry for module in triton_modules() for entry in specialisations_of(module)]
    pairs = [
        ((entry.name, target.name), entry)
        for entry in entries
        for target in TARGETS.values()
        if target.capability in entry.capabilities
    ]
    assert len(dict(pairs)) == len(pairs) > 4
    return dict(pairs)


def test_every_listed_specialisation_has_a_row_for_each_of_its_targets_and_is_in_the_table(ours: Run) -> None:
    assert set(ours.rows) == set(listed())
    table = [line.split() for line in ours.said.splitlines()]
    for (_, target), row in ours.rows.items():
        code = row["code"]
        spills = [
            sum(code[part][name] for name in ("spill_loads", "spill_stores")) for part in ("prologue", "epilogue")
        ]
        shared = row["figures"]["static_shared"] + row["figures"]["dynamic_shared"]
        cells = [target[3:], row["figures"]["registers"], f"0+{sum(spills)}", -(-shared // 1024), row["blocks_per_sm"]]
        cells += [code[part]["instructions"] for part in ("prologue", "loop", "epilogue")]
        assert any(line[at : at + 8] == [str(cell) for cell in cells] for line in table for at in range(len(line)))


def test_matrix_instructions_are_where_they_are_meant_to_be_and_nowhere_else(ours: Run) -> None:
    found = {key: row["figures"]["matrix"] for key, row in ours.rows.items()}
    expected = {key: compiler.expected_matrix(entry, TARGETS[key[1]]) for key, entry in listed().items()}
    assert found == {key: [] if matrix is None else [matrix] for key, matrix in expected.items()}
    assert any(found.values())


def test_a_row_says_what_was_compiled_by_what(ours: Run) -> None:
    row = next(iter(ours.rows.values()))
    assert row["bench"] == "compile" and row["module"] == triton_modules()[0]
    assert row["triton"] == package_version("triton") and {"at", "commit", "machine", "torch"} <= row.keys()
    assert row["constants"] and row["num_warps"] and row["num_stages"]


def test_nothing_is_left_in_the_cache(ours: Run, toys: Run) -> None:
    """Nor taken from it: a kernel that is found there leaves no log to read."""
    assert ours.left_in_cache == toys.left_in_cache == []


def test_what_is_sound_passes(toys: Run) -> None:
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
def test_what_is_wrong_is_found_and_named(toys: Run, kernel: str, fault: str, target: str) -> None:
    row = toys.rows[kernel, target]
    assert fault in row["faults"][0]
    assert f"{kernel} for {target} {row['faults'][0]}" in toys.complaint


def test_a_kernel_is_compiled_only_for_the_gpus_that_it_is_launched_on(toys: Run) -> None:
    assert ("elsewhere", "sm_90") in toys.rows and ("elsewhere", "sm_80") not in toys.rows


def test_a_fault_is_status_1_and_one_line(toys: Run) -> None:
    assert toys.status == 1
    assert toys.complaint.startswith("thresher: ") and toys.complaint.count("\n") == 1
    assert "sound" not in toys.complaint


def test_a_spill_is_counted(toys: Run) -> None:
    for target in ("sm_80", "sm_90"):
        for kernel in ("spilling", "spilling once"):
            found = toys.rows[kernel, target]["figures"]
            assert min(found["stack"], found["spill_stores"], found["spill_loads"]) > 0


def test_a_spill_outside_of_loops_is_reported_and_no_fault(toys: Run) -> None:
    for target in ("sm_80", "sm_90"):
        row = toys.rows["spilling once", target]
        code = row["code"]
        assert row["faults"] == [] and code["loops"] == [] and code["epilogue"]["spill_stores"] > 0
        looping = toys.rows["spilling", target]["code"]
        assert looping["loop"]["spill_stores"] + looping["loop"]["spill_loads"] > 0 and len(looping["loops"]) == 1


def test_the_widths_of_loads_and_stores_are_counted(toys: Run) -> None:
    """1,024 float32 by 128 threads: two vectors of four each; and by scalars, where a mask may cut any of them off."""
    for target in ("sm_80", "sm_90"):
        wide, narrow = toys.rows["wide", target], toys.rows["narrow", target]
        assert wide["faults"] == [] and wide["code"]["epilogue"]["loads"] == wide["code"]["epilogue"]["stores"] == {
            "16": 2
        }
        assert narrow["code"]["epilogue"]["loads"] == narrow["code"]["epilogue"]["stores"] == {"4": 16}
        assert toys.rows["sound", target]["faults"] == []  # as narrow, and not declared wide


def test_what_a_program_keeps_in_flight_and_its_share_of_peak(toys: Run) -> None:
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


def test_too_much_shared_memory_leaves_room_for_no_block(toys: Run) -> None:
    for target in ("sm_80", "sm_90"):
        row = toys.rows["sprawling", target]
        assert row["figures"]["dynamic_shared"] > TARGETS[target].shared_per_block
        assert row["blocks_per_sm"] == 0


def test_what_ptxas_refuses_is_a_row_without_figures(toys: Run) -> None:
    row = toys.rows["refused", "sm_90"]
    assert row["figures"] is None and row["blocks_per_sm"] is None
    assert row["faults"] == ["does not compile: error: Not a name of any known instruction: 'conjure'"]
    assert "Generated by LLVM" not in toys.said  # Triton prints the whole PTX when ptxas fails


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


@pytest.mark.parametrize(
    ("registers", "threads", "kib", "on_80", "on_90"),
    [
        (32, 256, 0, 8, 8),  # as many threads as there may be
        (16, 32, 0, 32, 32),  # as many blocks
        (128, 256, 0, 2, 2),
        (129, 256, 0, 1, 1),  # 136 are allocated
        (168, 128, 0, 3, 3),  # 12 warps, and not the 65,536 // 21,504 of a file without quarters
        (216, 32, 0, 8, 8),  # 2 a scheduler; 9 would fit an undivided file
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


def test_the_command_line_offers_every_target_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [word for name in TARGETS for word in ("--target", name)]
    assert cli.build_parser().parse_args(["bench", "compile", *chosen]).target == list(TARGETS)
    with pytest.raises(SystemExit):
        cli.run(["bench", "compile", "--target", "sm_70"])
    assert f"choose from {', '.join(map(repr, TARGETS))}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "no.such"], "--module no.such: there is no such module"),
        (["--module", "thresher.kernels.none"], "--module thresher.kernels.none: there is no such module"),
        (["--module", "json"], "--module json: expected a module with a function specialisations()"),
    ],
)
def test_a_module_that_cannot_be_meant_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.run(["bench", "compile", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"thresher: {message}") and complaint.count("\n") == 1


def test_under_the_interpreter_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.run(["bench", "compile"]) == 2
    assert capsys.readouterr().err == (
        "thresher: TRITON_INTERPRET is 1, under which Triton interprets kernels and cannot compile them: "
        "unset it and run again\n"
    )


def test_without_triton_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert cli.run(["bench", "compile"]) == 2
    assert capsys.readouterr().err.startswith("thresher: Triton is not installed")


def test_another_triton_is_found_by_its_folder(tmp_path: Path) -> None:
    """A stand-in for one that was unpacked: it is imported in place of the installed one, by a process of its own."""
    package = tmp_path / "other" / "triton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('the other Triton, from ' + __file__)\n")
    command = [sys.executable, "-P", "-m", "thresher.cli", "bench", "compile", "--target", "sm_80", "--module", "toys"]
    done = subprocess.run([*command, "--triton", str(tmp_path / "other")], capture_output=True, text=True, check=False)
    assert done.returncode not in (0, 2) and f"the other Triton, from {package}" in done.stderr
    seen = {}

    def note(words: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        seen.update(words=words, path=env["PYTHONPATH"])
        return subprocess.CompletedProcess(words, 7)

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", "before")
        patched.setattr(subprocess, "run", note)
        assert run_under(tmp_path / "other", ("sm_80", "sm_90"), ("toys",), "rows.jsonl") == 7
    assert seen["path"] == os.pathsep.join((str(tmp_path / "other"), "before"))
    assert seen["words"][3:] == [
        *("thresher.cli", "bench", "compile", "--target", "sm_80", "--target", "sm_90"),
        *("--module", "toys", "--out", "rows.jsonl"),
    ]


def test_a_folder_without_a_triton_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "compile", "--triton", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"thresher: --triton {tmp_path}: expected a folder into which a wheel")
    assert complaint.count("\n") == 1
