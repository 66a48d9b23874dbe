"""`thresher bench compile`: compile every Triton kernel for GPUs that need not be present, and check the code.

Triton includes NVIDIA's assembler and disassembler. Registers, stack, spilled bytes, shared memory and serialised wgmma
are read from the assembler's log and the PTX; loops, widths and the places of spills from the machine code (sass.py).
Each compilation gets an empty cache, because a cached kernel leaves no log.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from thresher.bench.harness import append_rows, check_files, facts, package_version, print_files
from thresher.bench.sass import Code, disassemble, read_code
from thresher.common.console import answer, console, progress_line, shown
from thresher.common.errors import UserError
from thresher.engine.planning.time import Chip, fastest
from thresher.kernels.registry import Specialisation, specialisations_of, triton_modules

KERNEL_MODULES = triton_modules()
KIB = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU, by the technical specifications per compute capability in CUDA's programming guide. matrix: the
    PTX instruction of its tensor cores; shared memory in bytes."""

    name: str
    capability: int
    matrix: str
    shared_per_block: int
    shared_per_sm: int


TARGETS = {
    "sm_80": Target("sm_80", 80, "mma", 163 * KIB, 164 * KIB),  # A100, A800
    "sm_90": Target("sm_90", 90, "wgmma", 227 * KIB, 228 * KIB),  # H100, H200
}
# Limits of a multiprocessor, the same on both.
REGISTERS_PER_SM, THREADS_PER_SM, BLOCKS_PER_SM = 64 * KIB, 2048, 32
WARP, SCHEDULERS = 32, 4
REGISTER_UNIT, SHARED_UNIT = 256, 128  # allocation units: registers per warp, bytes per block
SHARED_RESERVED = KIB  # in every block, by the driver, in addition to the kernel's own


def blocks_per_sm(registers: int, threads: int, shared: int, target: Target) -> int:
    """Return the number of blocks that fit on one multiprocessor of `target` at a time; 0 if not even one fits.
    registers: per thread; threads and bytes of shared memory: per block."""
    if shared > target.shared_per_block:
        return 0
    warps = -(-threads // WARP)
    registers_per_warp = _up(registers * WARP, REGISTER_UNIT)
    # Each of the four schedulers has a quarter of the registers, and a warp uses only one of them.
    warps_that_fit = SCHEDULERS * (REGISTERS_PER_SM // SCHEDULERS // registers_per_warp)
    return min(
        warps_that_fit // warps,
        target.shared_per_sm // _up(shared + SHARED_RESERVED, SHARED_UNIT),
        THREADS_PER_SM // (warps * WARP),
        BLOCKS_PER_SM,
    )


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The resources of a kernel. Registers and bytes of stack and spills are per thread, shared memory is per block."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    dynamic_shared: int
    threads: int
    matrix: tuple[str, ...]
    wgmma_serialised: bool

    @property
    def shared(self) -> int:
        return self.static_shared + self.dynamic_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction for one multiprocessor. in_flight and needed in bytes; occupancy: share of its warps filled by
    blocks; share_of_peak: None if the kernel declares no work, or no block fits."""

    blocks: int
    occupancy: float
    in_flight: int
    needed: int
    chip: str
    share_of_peak: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One specialisation for one target; figures, code and prediction are None if it did not compile."""

    specialisation: Specialisation
    target: Target
    figures: Figures | None = None
    cubin: bytes = b""
    code: Code | None = None
    prediction: Prediction | None = None
    faults: tuple[str, ...] = ()


def compile_all(
    wanted: Sequence[tuple[Specialisation, Target]], assembled: Callable[[int, str], None] = lambda count, what: None
) -> list[Result]:
    """Compile each specialisation, read logs and code, and check them. Raises what Triton raises for invalid Triton.
    assembled: called after each compilation with their number so far and a name."""
    made: list[Result] = []
    for specialisation, target in wanted:
        made.append(_assemble(specialisation, target))
        assembled(len(made), f"{specialisation.name} for {target.name}")
    for target in dict.fromkeys(target for _, target in wanted):
        places = [place for place, one in enumerate(made) if one.target == target and one.figures is not None]
        if places:
            with tempfile.TemporaryDirectory() as folder:
                texts = disassemble([made[place].cubin for place in places], folder)
            for place, code in zip(places, map(read_code, texts), strict=True):
                one = made[place]
                assert one.figures is not None
                made[place] = replace(
                    one,
                    code=code,
                    prediction=predict(one.specialisation, one.figures, code, target),
                    faults=faults(one.figures, code, target, one.specialisation),
                )
    return made


def _assemble(specialisation: Specialisation, target: Target) -> Result:
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.errors import PTXASError

    kernel, constants = specialisation.kernel, specialisation.constants
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else specialisation.signature[name] for name in kernel.arg_names},
        constants,
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in specialisation.aligned},
    )
    names = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
    options = {name: getattr(specialisation, name) for name in names}
    with _assembler_log() as written:
        try:
            compiled = triton_compile(source, target=GPUTarget("cuda", target.capability, WARP), options=options)
        except PTXASError as error:
            fault = f"does not compile: {ptxas_complaint(str(error))}"
            return Result(specialisation=specialisation, target=target, faults=(fault,))
        except Exception as error:
            error.add_note(f"while compiling {specialisation.name} for {target.name}")
            raise
    figures = read_figures(written.getvalue(), compiled.asm["ptx"], compiled.metadata.shared)
    return Result(specialisation=specialisation, target=target, figures=figures, cubin=compiled.asm["cubin"])


def expected_matrix(specialisation: Specialisation, target: Target) -> str | None:
    """Return the matrix instruction that the code is expected to have, None for none."""
    if not specialisation.tensor_cores:
        return None
    return target.matrix if specialisation.wgmma else "mma"


@contextlib.contextmanager
def _assembler_log() -> Iterator[io.StringIO]:
    """Collect the assembler's log while a kernel is compiled (Triton prints it, and much more if it fails)."""
    from triton import knobs

    written = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(written),
    ):
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        yield written


def ptxas_complaint(message: str) -> str:
    """Return the first thing that ptxas calls fatal or an error; else the message's first line."""
    said = re.search(r"^ptxas\S*\s.*?\b((?:fatal|error)\s*:.*)$", message, re.MULTILINE)
    return re.sub(r"\s+:", ":", said[1]).rstrip(". ") if said else message.strip().partition("\n")[0]


def read_figures(log: str, ptx: str, dynamic_shared: int) -> Figures:
    """Read the assembler's log and the code that it was given. A function that is not inlined has its own spills, which
    are added; it shares registers and stack with the kernel that calls it."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.search(r"Used (\d+) registers(.*)", log)
    threads = re.search(r"\.reqntid (\d+)", ptx)
    if not frames or used is None or threads is None:
        raise RuntimeError(f"no registers, stack or threads in what ptxas wrote; has its wording changed?\n{log}")
    static = re.search(r"(\d+) bytes smem", used[2])
    cumulative = re.search(r"(\d+) bytes cumulative stack size", used[2])
    stack, stores, loads = (sum(map(int, column)) for column in zip(*frames, strict=True))
    instructions = {"wgmma": r"\bwgmma\.mma_async\b", "mma": r"(?<!\w)mma\.sync\b"}
    return Figures(
        registers=int(used[1]),
        stack=max(stack, int(cumulative[1]) if cumulative else 0),
        spill_stores=stores,
        spill_loads=loads,
        static_shared=int(static[1]) if static else 0,
        dynamic_shared=dynamic_shared,
        threads=int(threads[1]),
        matrix=tuple(name for name, pattern in instructions.items() if re.search(pattern, ptx)),
        wgmma_serialised=bool(re.search(r"wgmma\S* instructions are serialized", log)),
    )


def faults(figures: Figures, code: Code, target: Target, specialisation: Specialisation) -> tuple[str, ...]:
    """Return the faults, each as the end of a sentence that starts with the kernel and the target.

    Spills inside a loop are a fault: at a few hundred cycles per visit they cost more than the larger tile gains. A
    spill outside of loops is paid once per program, and is only reported. Narrow loads and stores are a fault in
    kernels that are declared wide, and matrix instructions in kernels whose float32 products must be exact.
    """
    found = []
    matrix = expected_matrix(specialisation, target)
    if code.spills_in_loops:
        found.append(
            f"spills inside a loop ({code.loop.spill_stores:,} stores and {code.loop.spill_loads:,} loads of local "
            f"memory there; a thread keeps {figures.stack:,} bytes on the stack)"
        )
    if specialisation.wide:
        found += code.narrow()
    if figures.shared > target.shared_per_block:
        found.append(
            f"needs {figures.shared:,} bytes of shared memory per block, but there are {target.shared_per_block:,}"
        )
    if matrix is not None and matrix not in figures.matrix:
        found.append(f"has no {matrix} instruction, but should have one")
    if matrix is None and figures.matrix:
        found.append(f"has {' and '.join(figures.matrix)} instructions, but its products should be exact")
    if figures.wgmma_serialised:
        found.append("has its wgmma instructions serialised")
    return tuple(found)


def predict(specialisation: Specialisation, figures: Figures, code: Code, target: Target) -> Prediction:
    """Predict the share of peak on the chip of `target` with the fastest memory, to compare with the first measurement.

    One multiprocessor holds `blocks` programs, which keep these bytes in flight from memory:

        in flight = blocks x (stages - 1) x tile       with asynchronous copies (LDGSTS, TMA): one stage is in use
                  = blocks x threads x bytes loaded    otherwise: by a thread in one pass of the loops, or of all code

    tile: bytes copied by one trip of the main loop, declared as `tile_bytes`, else from the loops' text, else shared
    memory / buffers; the bytes in flight never exceed the shared memory. wgmma reads its operands in shared memory, so
    Triton gives it a buffer for every stage, and one fewer otherwise, where the stage in use is in registers. Little's
    law requires latency x bandwidth (engine/planning/time.py). With a program's declared work (flops, bytes of memory,
    trips), its times on one multiprocessor are

        t_flops = flops / (peak / SMs)         t_bytes = bytes / (bandwidth / SMs) / min(1, in flight / needed)
        t_loop, t_rest = warps x instructions / (4 a cycle)        of the loops x trips, and of prologue and epilogue
        predicted = max(t_flops, t_bytes, t_loop + t_rest) if another block's loop hides this block's rest,
                    max(t_flops, t_bytes, t_loop) + t_rest if a block is alone
        share of peak = max(t_flops, t_bytes with enough in flight) / predicted

    Flops count for kernels with matrix instructions; in others the instructions themselves are the limit. The L2 cache,
    waves of programs, launches, special functions (MUFU) and stalls are not modelled.
    """
    chip = fastest(target.capability)
    blocks = blocks_per_sm(figures.registers, figures.threads, figures.shared, target)
    in_flight = blocks * _in_flight(specialisation, figures, code)
    share = None
    if specialisation.work is not None and blocks:
        share = _share(specialisation, figures, code, chip, blocks, in_flight)
    return Prediction(
        blocks=blocks,
        occupancy=blocks * -(-figures.threads // WARP) * WARP / THREADS_PER_SM,
        in_flight=in_flight,
        needed=round(chip.bytes_in_flight_per_sm),
        chip=chip.name,
        share_of_peak=share,
    )


def _in_flight(specialisation: Specialisation, figures: Figures, code: Code) -> int:
    """Return the bytes that one program keeps in flight."""
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
    # The loop's text runs once per trip, divided by the trips that ptxas unrolled into one pass.
    tile = specialisation.tile_bytes
    unrolled = max(1, round(figures.threads * code.loop.loaded / tile)) if tile else 1
    in_loops = warp_instructions * code.loop.instructions * (work.trips / unrolled)
    around = warp_instructions * (code.prologue.instructions + code.epilogue.instructions)
    slowed = by_bytes / min(1.0, in_flight / chip.bytes_in_flight_per_sm) if in_flight else by_bytes
    hidden = blocks > 1
    predicted = max(by_flops, slowed, in_loops + around * hidden) + around * (not hidden)
    return max(by_flops, by_bytes) / predicted


def run_compile_bench(targets: Sequence[str], modules: Sequence[str], out: str | Path | None) -> str | None:
    """Compile all kernels of the `modules`, print a table, and append a JSON line per row to `out`. Return a sentence
    that names the faults, or None."""
    _require_compiler()
    check_files(out, None)
    wanted = [
        (name, entry, TARGETS[target])
        for name in modules
        for entry in _listed(name)
        for target in targets
        if TARGETS[target].capability in entry.capabilities
    ]
    compiler, gpus = f"Triton {package_version('triton')}", " and ".join(targets)
    console.print(f"{len(wanted)} compilations for {gpus} with {compiler}; no GPU is needed")
    with progress_line("compiled", len(wanted)) as line:
        results = compile_all([(specialisation, target) for _, specialisation, target in wanted], line.to)
    _show(results)
    head = facts(("triton",))
    rows = [_row(head, name, result) for (name, _, _), result in zip(wanted, results, strict=True)]
    answer({"rows": rows})
    append_rows(out, *rows)
    print_files(out)
    wrong = [f"{r.specialisation.name} for {r.target.name} {' and '.join(r.faults)}" for r in results if r.faults]
    return "; ".join(wrong) or None


def run_under(
    triton: str | Path, targets: Sequence[str], modules: Sequence[str], out: str | Path | None, as_json: bool = False
) -> int:
    """Run the command under another Triton in a subprocess, and return the exit status.

    triton: folder with the unpacked wheel (`pip download --no-deps triton==3.6.0` and `unzip`), which is first on the
    path. as_json: forward its answer, and print its tables to stderr.
    """
    folder = Path(triton).resolve()
    if not (folder / "triton" / "__init__.py").is_file():
        raise UserError(
            f"--triton {triton}: expected a folder into which a wheel of Triton was unpacked, with triton/ in it"
        )
    named = [("--target", name) for name in targets] + [("--module", name) for name in modules]
    words = [word for pair in named + ([] if out is None else [("--out", str(out))]) for word in pair]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "thresher.cli", "bench", "compile", *words]
    environment = os.environ | {"PYTHONPATH": path}
    if not as_json:
        return subprocess.run(command, env=environment, check=False).returncode
    done = subprocess.run([*command, "--json"], env=environment, check=False, stdout=subprocess.PIPE)
    answer(json.loads(done.stdout))
    return done.returncode


def _require_compiler() -> None:
    if find_spec("triton") is None:
        raise UserError("Triton is not installed, and `bench compile` runs Triton's compiler; pip install triton")
    from triton import knobs

    if knobs.runtime.interpret:
        raise UserError(
            f"TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET')}, with which Triton interprets kernels "
            "and cannot compile them; unset it and run again"
        )


def _listed(name: str) -> tuple[Specialisation, ...]:
    try:
        return specialisations_of(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"--module {name}: there is no such module; expected a dotted name to import") from None
    except ValueError as error:
        raise UserError(f"--module {name}: {error}") from None


def _row(head: dict[str, Any], module: str, result: Result) -> dict[str, Any]:
    chosen, prediction = result.specialisation, result.prediction
    parts = {"figures": result.figures, "code": result.code}
    return {
        "bench": "compile",
        **head,
        "module": module,
        "kernel": chosen.name,
        "target": result.target.name,
        "constants": {
            name: value if isinstance(value, int | float) else str(value) for name, value in chosen.constants.items()
        },
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        "maxnreg": chosen.maxnreg,
        **{name: None if part is None else asdict(part) for name, part in parts.items()},
        "blocks_per_sm": None if prediction is None else prediction.blocks,
        "prediction": None if prediction is None else asdict(prediction),
        "faults": list(result.faults),
    }


def _show(results: Sequence[Result]) -> None:
    """Print the table, in 80 characters: a kernel's name wraps, the numbers never do.

    regs: per thread; spills: instructions on local memory inside loops + outside; KiB of shared memory per block;
    blocks per multiprocessor; instructions of prologue, loops and epilogue; ld and st: bytes of the loads and stores
    that move most of the bulk; flight: KiB in flight on a multiprocessor / needed by Little's law; peak: predicted
    share.
    """

    def commonest(code: Code, what: str) -> int | None:
        widths = code.bulk_path(what)
        return max(widths, key=lambda width: width * widths[width], default=None)

    drawn = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("kernel", overflow="fold")
    for name in ("sm", "regs", "spills", "KiB", "blocks", "instructions", "ld", "st", "flight", "peak"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for result in results:
        figures, code, prediction = result.figures, result.code, result.prediction
        values: tuple[Any, ...] = (None,) * 9
        if figures is not None and code is not None and prediction is not None:
            share = prediction.share_of_peak
            values = (
                figures.registers,
                f"{code.spills_in_loops}+{code.spills_outside}",
                -(-figures.shared // KIB),
                prediction.blocks,
                f"{code.prologue.instructions} {code.loop.instructions} {code.epilogue.instructions}",
                commonest(code, "loads"),
                commonest(code, "stores"),
                f"{prediction.in_flight / KIB:.0f}/{prediction.needed / KIB:.0f}",
                None if share is None else f"{share:.0%}",
            )
        cells = (result.specialisation.name, result.target.capability, *values)
        drawn.add_row(*map(shown, cells), style="bold red" if result.faults else "")
    console.print("spills: inside loops + outside; instructions: prologue, loops, epilogue")
    console.print("ld, st: bytes a thread; flight: KiB on the way per SM / needed; peak: predicted share")
    console.print(drawn)
