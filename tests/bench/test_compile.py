"""`thresher bench compile`: on our kernels, on kernels with one fault each, and the parts that need no compiler run."""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compiling import environment, said

from thresher.bench import compile as compiler
from thresher.bench.compile import TARGETS
from thresher.bench.harness import package_version
from thresher.bench.sass import Code, Region, merged
from thresher.cli import main as cli
from thresher.kernels.registry import Specialisation, specialisations_of, triton_modules

pytest.importorskip("triton")

HERE = Path(__file__).parent


# the command, run once on all our kernels and once on the toys, in processes of its own


class Run(NamedTuple):
    status: int
    said: str
    complaint: str
    rows: dict[tuple[str, str], Any]  # (kernel, target) -> row
    left_in_cache: list[Path]


def run(folder: Path, *arguments: str) -> Run:
    command = [sys.executable, "-P", "-W", "ignore", "-m", "thresher.cli", "bench", "compile"]
    done = subprocess.run(
        [*command, "--out", str(folder / "rows.jsonl"), *arguments],
        capture_output=True,
        text=True,
        env=environment(folder / "cache", HERE) | {"COLUMNS": "80"},
    )
    written = folder / "rows.jsonl"
    rows = [json.loads(line) for line in written.read_text("utf-8").splitlines()] if written.exists() else []
    left = list((folder / "cache").rglob("*.cubin"))
    return Run(done.returncode, done.stdout, done.stderr, {(r["kernel"], r["target"]): r for r in rows}, left)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command as it is, every module of kernels; a process for each target, for they take half a minute each."""
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
    """The command on toy_kernels.py."""
    return run(tmp_path_factory.mktemp("toys"), "--module", "toy_kernels")


def test_the_command_line_offers_every_target_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [word for name in TARGETS for word in ("--target", name)]
    assert cli.build_parser().parse_args(["bench", "compile", *chosen]).target == list(TARGETS)
    assert cli.run(["bench", "compile", "--target", "sm_70"]) == 2
    assert f"--target: expected {' or '.join(TARGETS)}, got sm_70" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "interpreted", "message"),
    [
        (["--module", "no.such"], None, "--module no.such: there is no such module"),
        (["--module", "thresher.kernels.none"], None, "--module thresher.kernels.none: there is no such module"),
        (["--module", "json"], None, "--module json: expected a module with a function specialisations()"),
        (["--triton", "{folder}"], None, "--triton {folder}: expected a folder into which a wheel"),
        (
            [],
            "1",
            "TRITON_INTERPRET is 1, under which Triton interprets kernels and cannot compile them: "
            "unset it and run again\n",
        ),
    ],
)
def test_the_command_refuses(
    arguments: list[str],
    interpreted: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpreted is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert cli.run(["bench", "compile", *(word.format(folder=tmp_path) for word in arguments)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"thresher: {message.format(folder=tmp_path)}") and complaint.count("\n") == 1


def test_without_triton_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert cli.run(["bench", "compile"]) == 2
    assert capsys.readouterr().err.startswith("thresher: Triton is not installed")


@pytest.mark.slow
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
        assert compiler.run_under(tmp_path / "other", ("sm_80", "sm_90"), ("toys",), "rows.jsonl") == 7
    assert seen["path"] == os.pathsep.join((str(tmp_path / "other"), "before"))
    assert seen["words"][3:] == [
        *("thresher.cli", "bench", "compile", "--target", "sm_80", "--target", "sm_90"),
        *("--module", "toys", "--out", "rows.jsonl"),
    ]


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


@pytest.mark.slow
def test_no_kernel_is_at_fault(ours: Any) -> None:
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


@pytest.mark.slow
def test_every_listed_specialisation_has_a_row_for_each_of_its_targets_and_is_in_the_table(ours: Any) -> None:
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


@pytest.mark.slow
def test_matrix_instructions_are_where_they_are_meant_to_be_and_nowhere_else(ours: Any) -> None:
    found = {key: row["figures"]["matrix"] for key, row in ours.rows.items()}
    expected = {key: compiler.expected_matrix(entry, TARGETS[key[1]]) for key, entry in listed().items()}
    assert found == {key: [] if matrix is None else [matrix] for key, matrix in expected.items()}
    assert any(found.values())


@pytest.mark.slow
def test_a_row_says_what_was_compiled_by_what(ours: Any) -> None:
    row = next(iter(ours.rows.values()))
    assert row["bench"] == "compile" and row["module"] == triton_modules()[0]
    assert row["triton"] == package_version("triton") and {"at", "commit", "machine", "torch"} <= row.keys()
    assert row["constants"] and row["num_warps"] and row["num_stages"]


VOCABULARY = 151_665  # the trainer's, an odd number

# Beside vectors: the block and slot of a row, an element of dw, and a program's part of it, written once.
SINGLE = {"rope": {"loads 4": 2}, "norm's dw": {"stores 2": 1}, "heads' norm's gradient": {"stores 4": 2}}


def of_modules(ours: Any, *modules: str) -> dict[tuple[str, str], Any]:
    return {key: row for key, row in ours.rows.items() if row["module"].rpartition(".")[2] in modules}


def accesses(row: Any, *kinds: str) -> Counter[str]:
    """ "loads 16" -> how many instructions of all the code load so many bytes, and so on."""
    found: Counter[str] = Counter()
    for part in ("prologue", "loop", "epilogue"):
        for kind in kinds:
            found.update({f"{kind} {width}": count for width, count in row["code"][part][kind].items()})
    return found


@pytest.mark.slow
def test_a_layers_kernels_load_and_store_16_bytes(ours: Any) -> None:
    rows = of_modules(ours, "gate_triton", "heads_triton", "norm_triton", "rope_triton")
    assert len(rows) > 40
    for (name, target), row in rows.items():
        found = accesses(row, "loads", "stores")
        vectors = {access: found.pop(access, 0) for access in ("loads 16", "stores 16")}
        kernel = name.partition(" bf16")[0].partition(" fp32")[0]
        assert found == ({} if name.endswith("no dw") else SINGLE.get(kernel, {})), (name, target)
        assert vectors["loads 16"] > 0 and (vectors["stores 16"] > 0 or kernel == "norm's dw"), (name, target)


@pytest.mark.slow
def test_exponentials_are_stored_in_whole_vectors(ours: Any) -> None:
    """At the trainer's vocabulary, whose rows are padded for it."""
    rows = of_modules(ours, "coefficients_triton", "head_triton", "persistent_triton")
    stores = {
        key: accesses(row, "stores")
        for key, row in rows.items()
        if key[0] == "entropy gradient"
        or (row["constants"].get("V") == VOCABULARY and row["constants"]["H"] == 1536 and " bf16 " in key[0])
    }
    kernels = (f"head bf16 V {VOCABULARY:,} H 1,536", f"again bf16 V {VOCABULARY:,} H 1,536", "entropy gradient")
    names = {(kernel, target) for kernel in kernels for target in ("sm_80", "sm_90")}
    assert stores.keys() == names | {(f"persistent {kernels[0]}", "sm_90")}
    for (name, target), found in stores.items():
        assert found.pop("stores 16") >= 4 and not found["stores 2"], (name, target)
        # m, s and u of a row, y of each half of a tile
        assert found.total() <= (5 if "head" in name else 0), (name, target, found)


@pytest.mark.slow
def test_keys_and_values_come_in_16_bytes(ours: Any) -> None:
    """Into shared memory, while others are computed with; what else a step loads are places of blocks."""
    rows = of_modules(ours, "decode_triton", "cascade_triton", "prefill_triton")
    reading = {key: row["code"]["loop"] for key, row in rows.items() if not key[0].startswith("merge")}
    assert len(reading) > 30
    for key, loop in reading.items():
        assert loop["copies"].keys() == {"16"}, key
        assert loop["loads"].keys() == {"4", "16"} and loop["loads"]["16"] == loop["copies"]["16"], key
        assert loop["stores"] == {}, key


@pytest.mark.slow
def test_nothing_is_left_in_the_cache(ours: Any, toys: Any) -> None:
    """Nor taken from it: a kernel that is found there leaves no log to read."""
    assert ours.left_in_cache == toys.left_in_cache == []


@pytest.mark.slow
def test_what_is_sound_passes(toys: Any) -> None:
    for target, instruction in (("sm_80", "mma"), ("sm_90", "wgmma")):
        row = toys.rows["sound product", target]
        assert row["faults"] == [] and row["figures"]["matrix"] == [instruction]
        assert row["figures"]["threads"] == 128 and row["figures"]["dynamic_shared"] >= (64 + 128) * 64 * 2
        few = toys.rows["few rows", target]  # a wgmma takes 64
        assert few["faults"] == [] and few["figures"]["matrix"] == ["mma"]
        assert few["maxnreg"] == 64 >= few["figures"]["registers"]
        assert toys.rows["sound", target]["faults"] == [] and toys.rows["sound", target]["figures"]["matrix"] == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_kernel_is_compiled_only_for_the_gpus_that_it_is_launched_on(toys: Any) -> None:
    assert ("elsewhere", "sm_90") in toys.rows and ("elsewhere", "sm_80") not in toys.rows


@pytest.mark.slow
def test_a_fault_is_status_1_and_one_line(toys: Any) -> None:
    assert toys.status == 1
    assert toys.complaint.startswith("thresher: ") and toys.complaint.count("\n") == 1
    assert "sound" not in toys.complaint


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_spills_are_counted_and_those_outside_of_loops_are_no_fault(toys: Any, target: str) -> None:
    for kernel in ("spilling", "spilling once"):
        found = toys.rows[kernel, target]["figures"]
        assert min(found["stack"], found["spill_stores"], found["spill_loads"]) > 0
    row = toys.rows["spilling once", target]
    code = row["code"]
    assert row["faults"] == [] and code["loops"] == [] and code["epilogue"]["spill_stores"] > 0
    looping = toys.rows["spilling", target]["code"]
    assert looping["loop"]["spill_stores"] + looping["loop"]["spill_loads"] > 0 and len(looping["loops"]) == 1


@pytest.mark.slow
def test_the_widths_of_loads_and_stores_are_counted(toys: Any) -> None:
    """1,024 float32 by 128 threads: two vectors of four each; and by scalars, where a mask may cut any of them off."""
    for target in ("sm_80", "sm_90"):
        wide, narrow = toys.rows["wide", target], toys.rows["narrow", target]
        assert wide["faults"] == [] and wide["code"]["epilogue"]["loads"] == wide["code"]["epilogue"]["stores"] == {
            "16": 2
        }
        assert narrow["code"]["epilogue"]["loads"] == narrow["code"]["epilogue"]["stores"] == {"4": 16}
        assert toys.rows["sound", target]["faults"] == []  # as narrow, and not declared wide


@pytest.mark.slow
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


@pytest.mark.slow
def test_too_much_shared_memory_leaves_room_for_no_block(toys: Any) -> None:
    for target in ("sm_80", "sm_90"):
        row = toys.rows["sprawling", target]
        assert row["figures"]["dynamic_shared"] > TARGETS[target].shared_per_block
        assert row["blocks_per_sm"] == 0


@pytest.mark.slow
def test_what_ptxas_refuses_is_a_row_without_figures(toys: Any) -> None:
    row = toys.rows["refused", "sm_90"]
    assert row["figures"] is None and row["blocks_per_sm"] is None
    assert row["faults"] == ["does not compile: error: Not a name of any known instruction: 'conjure'"]
    assert "Generated by LLVM" not in toys.said  # Triton prints the whole PTX when ptxas fails


READ = """
import contextlib, io, json, subprocess, sys, tempfile
from triton import knobs
from thresher.bench import compile as compiler, sass
from thresher.bench.compile import TARGETS
from thresher.kernels.registry import specialisations_of

chosen = [one for one in specialisations_of("toy_kernels") if one.name in ("sound", "sound product", "spilling")]
pairs = [(one, TARGETS[name]) for name in ("sm_80", "sm_90") for one in chosen]
kept = []
whole = sass.disassemble

def keep(cubins, folder):
    kept.extend(cubins)
    return whole(cubins, folder)

compiler.disassemble = keep
with contextlib.redirect_stdout(io.StringIO()):
    together = [str(result.code) for result in compiler.compile_all(pairs)]

def alone(cubin):  # as the disassembler reads the file that ptxas wrote
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return str(sass.read_code(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

try:
    sass.merged(kept)
    refused = ""
except ValueError as error:
    refused = str(error)
first = [one for one in sass.sections(kept[0]) if one.name.startswith(sass.CODE)]
again = [one for one in sass.sections(sass.merged(kept[:2])) if one.name.startswith(sass.CODE)]
print(json.dumps({
    "together": together,
    "alone": [alone(cubin) for cubin in kept],
    "refused": refused,
    "names": [one.name for one in again],
    "same": again[0].data == first[0].data,
}))
"""


@pytest.mark.slow
def test_several_cubins_as_one_read_as_they_do_by_themselves(tmp_path: Path) -> None:
    """Products in loops, spills, and neither; each with its own number of instructions. All for one GPU."""
    read = said(("-c", READ), tmp_path, HERE)
    assert read["together"] == read["alone"]
    assert len(read["alone"]) == 6 == len(set(read["alone"]))
    assert read["names"] == [".text.0.double", ".text.1.multiply"] and read["same"]
    assert read["refused"] == "expected cubins for one GPU"
    with pytest.raises(ValueError, match="expected cubins for one GPU"):
        merged([])
