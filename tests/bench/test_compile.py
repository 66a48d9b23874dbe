"""Test `thresher bench compile` on our kernels and on kernels with one fault each, and its parts without a compiler."""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compiling import environment, said

from thresher.bench import compile as compiler
from thresher.bench.compile import TARGETS
from thresher.bench.sass import Code, Region
from thresher.cli import main as cli
from thresher.kernels.registry import Specialisation, specialisations_of, triton_modules

pytest.importorskip("triton")

HERE = Path(__file__).parent


# the command, run once on all our kernels and once on the toys, in separate processes


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
    rows = list(map(json.loads, (folder / "rows.jsonl").read_text("utf-8").splitlines()))
    left = list((folder / "cache").rglob("*.cubin"))
    return Run(done.returncode, done.stdout, done.stderr, {(r["kernel"], r["target"]): r for r in rows}, left)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the command on every module of kernels, in a process per target, because each takes half a minute."""
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda name: run(tmp_path_factory.mktemp(name), "--target", name), TARGETS)
    return Run(
        max(first.status, second.status),
        first.said + second.said,
        first.complaint + second.complaint,
        first.rows | second.rows,
        first.left_in_cache + second.left_in_cache,
    )


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the command on toy_kernels.py."""
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
            "TRITON_INTERPRET is 1, with which Triton interprets kernels and cannot compile them; unset it and ",
        ),
        ([], "no Triton", "Triton is not installed"),
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
    if interpreted == "no Triton":
        monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    elif interpreted is not None:
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert cli.run(["bench", "compile", *(word.format(folder=tmp_path) for word in arguments)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"thresher: {message.format(folder=tmp_path)}") and complaint.count("\n") == 1


@pytest.mark.slow
def test_another_triton_is_found_by_its_folder(tmp_path: Path) -> None:
    """A stand-in for an unpacked Triton is imported instead of the installed one, in a separate process."""
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
    """Triton 3.9 compiles for sm_90 with another ptxas than for sm_80; 3.6 and 3.7 use one for both."""
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


def listed() -> dict[tuple[str, str], Specialisation]:
    """Return what the modules list, (kernel, target) -> specialisation; no two share a pair."""
    entries = [entry for module in triton_modules() for entry in specialisations_of(module)]
    pairs = [((e.name, t.name), e) for e in entries for t in TARGETS.values() if t.capability in e.capabilities]
    assert len(dict(pairs)) == len(pairs) > 4
    return dict(pairs)


@pytest.mark.slow
def test_every_specialisation_has_a_sound_row_for_each_of_its_targets_and_is_in_the_table(ours: Any) -> None:
    assert (ours.status, ours.complaint, ours.left_in_cache) == (0, "", [])
    first = next(iter(ours.rows.values()))
    assert (first["bench"], first["module"], first["triton"]) == ("compile", triton_modules()[0], version("triton"))
    assert {"at", "commit", "machine", "torch"} <= first.keys()
    assert first["constants"] and first["num_warps"] and first["num_stages"]
    entries = listed()
    assert set(ours.rows) == set(entries)
    table = [line.split() for line in ours.said.splitlines()]
    for key, row in ours.rows.items():
        code, target = row["code"], TARGETS[key[1]]
        assert row["faults"] == [] and code["loop"]["spill_loads"] == code["loop"]["spill_stores"] == 0, key
        matrix = compiler.expected_matrix(entries[key], target)
        assert row["figures"]["matrix"] == ([] if matrix is None else [matrix]), key
        spills = [code[part][f"spill_{what}"] for part in ("prologue", "epilogue") for what in ("loads", "stores")]
        shared = row["figures"]["static_shared"] + row["figures"]["dynamic_shared"]
        cells = [target.capability, row["figures"]["registers"], f"0+{sum(spills)}", -(-shared // 1024)]
        cells += [row["blocks_per_sm"], *(code[part]["instructions"] for part in ("prologue", "loop", "epilogue"))]
        assert any(line[at : at + 8] == [str(cell) for cell in cells] for line in table for at in range(len(line)))
    assert any(row["figures"]["matrix"] for row in ours.rows.values())


VOCABULARY = 151_665  # the trainer's, an odd number

# Accesses other than vectors: the block and slot of a row, an element of dw, and a program's part of it, written once.
SINGLE = {"rope": {"loads 4": 2}, "norm's dw": {"stores 2": 1}, "heads' norm's gradient": {"stores 4": 2}}


def of_modules(ours: Any, *modules: str) -> dict[tuple[str, str], Any]:
    return {key: row for key, row in ours.rows.items() if row["module"].rpartition(".")[2] in modules}


def accesses(row: Any, *kinds: str) -> Counter[str]:
    """Count the accesses in all the code: "loads 16" -> the number of instructions that load 16 bytes, and so on."""
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
        vectors_alone = name.endswith("no dw") or "for training" in name
        assert found == ({} if vectors_alone else SINGLE.get(kernel, {})), (name, target)
        assert vectors["loads 16"] > 0 and (vectors["stores 16"] > 0 or kernel == "norm's dw"), (name, target)


@pytest.mark.slow
def test_exponentials_are_stored_in_whole_vectors(ours: Any) -> None:
    """The vocabulary is the trainer's, whose rows are padded for whole vectors."""
    rows = of_modules(ours, "coefficients_triton", "head_triton")
    stores = {
        key: accesses(row, "stores")
        for key, row in rows.items()
        if key[0] == "entropy gradient"
        or (row["constants"].get("V") == VOCABULARY and row["constants"]["H"] == 1536 and " bf16 " in key[0])
    }
    kernels = (f"head bf16 V {VOCABULARY:,} H 1,536", f"again bf16 V {VOCABULARY:,} H 1,536", "entropy gradient")
    names = {(kernel, target) for kernel in kernels for target in ("sm_80", "sm_90")}
    assert stores.keys() == names
    for (name, target), found in stores.items():
        assert found.pop("stores 16") >= 4 and not found["stores 2"], (name, target)
        # m, s and u of a row, y of each half of a tile
        assert found.total() <= (5 if "head" in name else 0), (name, target, found)


@pytest.mark.slow
def test_keys_and_values_come_in_16_bytes(ours: Any) -> None:
    """They are copied into shared memory while others are in use; the other loads of a step are block indices."""
    rows = of_modules(ours, "decode_triton", "cascade_triton", "prefill_triton")
    reading = {key: row["code"]["loop"] for key, row in rows.items() if not key[0].startswith("merge")}
    assert len(reading) > 30
    for key, loop in reading.items():
        assert loop["copies"].keys() == {"16"}, key
        assert loop["loads"].keys() == {"4", "16"} and loop["loads"]["16"] == loop["copies"]["16"], key
        assert loop["stores"] == {}, key


FAULTS = {
    "spilling": "spills inside a loop (",
    "narrow": "has narrow loads (",
    "sprawling": " bytes of shared memory per block, but there are ",
    "inexact": "instructions, but its products should be exact",
    "plain": "instruction, but should have one",
}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "instruction"), [("sm_80", "mma"), ("sm_90", "wgmma")])
def test_each_fault_is_found_and_what_is_sound_passes(toys: Any, target: str, instruction: str) -> None:
    row = {kernel: found for (kernel, name), found in toys.rows.items() if name == target}
    for kernel, fault in FAULTS.items():
        assert fault in row[kernel]["faults"][0]
        assert f"{kernel} for {target} {row[kernel]['faults'][0]}" in toys.complaint
    for kernel in ("sound", "sound product", "few rows", "spilling once", "wide"):
        assert row[kernel]["faults"] == []
    assert row["sound"]["figures"]["matrix"] == [] and row["few rows"]["figures"]["matrix"] == ["mma"]  # wgmma: 64 rows
    assert row["few rows"]["maxnreg"] == 64 >= row["few rows"]["figures"]["registers"]
    product = row["sound product"]["figures"]
    assert product["matrix"] == [instruction] and product["threads"] == 128
    assert product["dynamic_shared"] >= (64 + 128) * 64 * 2
    for kernel in ("spilling", "spilling once"):
        found = row[kernel]["figures"]
        assert min(found["stack"], found["spill_stores"], found["spill_loads"]) > 0
    once, looping = row["spilling once"]["code"], row["spilling"]["code"]
    assert once["loops"] == [] and once["epilogue"]["spill_stores"] > 0 and len(looping["loops"]) == 1
    assert looping["loop"]["spill_stores"] + looping["loop"]["spill_loads"] > 0
    # 1,024 float32 over 128 threads: two vectors of four each, but scalars where a mask may cut off any of them
    wide, narrow = (row[kernel]["code"]["epilogue"] for kernel in ("wide", "narrow"))
    assert wide["loads"] == wide["stores"] == {"16": 2} and narrow["loads"] == narrow["stores"] == {"4": 16}
    sprawling = row["sprawling"]
    assert sprawling["figures"]["dynamic_shared"] > TARGETS[target].shared_per_block and not sprawling["blocks_per_sm"]


@pytest.mark.slow
def test_the_toys_end_in_one_line_and_leave_nothing_in_the_cache(toys: Any) -> None:
    """Nothing is read from the cache either, because a cached kernel leaves no log to read."""
    assert toys.status == 1 and toys.left_in_cache == []
    assert toys.complaint.startswith("thresher: ") and toys.complaint.count("\n") == 1
    assert "sound" not in toys.complaint
    assert ("elsewhere", "sm_90") in toys.rows and ("elsewhere", "sm_80") not in toys.rows
    refused = toys.rows["refused", "sm_90"]
    assert refused["figures"] is refused["blocks_per_sm"] is None
    assert refused["faults"] == ["does not compile: error: Not a name of any known instruction: 'conjure'"]
    assert "Generated by LLVM" not in toys.said  # Triton prints the whole PTX when ptxas fails


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "chip", "needed"),
    [("sm_80", "A100-80", 466 / 1.41 * 2039 / 108), ("sm_90", "H200", 479 / 1.83 * 4800 / 132)],
)
def test_bytes_in_flight_and_the_share_of_peak_of_a_kernel(toys: Any, target: str, chip: str, needed: float) -> None:
    row = toys.rows["wide", target]
    found = row["prediction"]
    assert found["chip"] == chip and found["blocks"] == row["blocks_per_sm"] == 16
    assert found["in_flight"] == 16 * 4096 and found["occupancy"] == 1
    assert found["needed"] == pytest.approx(needed, rel=1e-3) and 0.5 < found["share_of_peak"] <= 1
    assert toys.rows["sound", target]["prediction"]["share_of_peak"] is None
    product = toys.rows["sound product", target]["prediction"]
    assert product["in_flight"] == product["blocks"] * 2 * (64 + 128) * 64 * 2  # two stages


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

first = [one for one in sass.sections(kept[0]) if one.name.startswith(sass.CODE)]
again = [one for one in sass.sections(sass.merged(kept[:2])) if one.name.startswith(sass.CODE)]
print(json.dumps({
    "together": together,
    "alone": [alone(cubin) for cubin in kept],
    "names": [one.name for one in again],
    "same": again[0].data == first[0].data,
}))
"""


@pytest.mark.slow
def test_several_cubins_as_one_read_as_they_do_by_themselves(tmp_path: Path) -> None:
    """The kernels have products in loops, spills, or neither, and different numbers of instructions. Cubins are merged
    per GPU."""
    read = said(("-c", READ), tmp_path, HERE)
    assert read["together"] == read["alone"]
    assert len(read["alone"]) == 6 == len(set(read["alone"]))
    assert read["names"] == [".text.0.double", ".text.1.multiply"] and read["same"]
