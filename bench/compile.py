"""`thresher bench compile`: every Triton kernel there is, compiled for GPUs that need not be there, and checked.

Triton brings NVIDIA's assembler, which writes down what it did: registers, stack frame, spills, shared memory, and
whether it had to serialise Hopper's matrix instructions. Everything in the table is read from that log and from
the PTX of the very compilation; a count that a disassembly would give (STL, LDL) says the same. Each compilation gets
an empty cache of its own, since a kernel found in a cache leaves no log.

A row is at fault, and the command with it (exit status 1), where a kernel
    does not compile,
    keeps anything on the stack: at a few hundred cycles a visit, a spill costs more than the tile that caused it gains,
    needs more shared memory than a block can have,
    lacks the matrix instructions that it is meant to have, or has some where float32 products are meant to be exact,
    has its wgmma serialised.

The last column is how many blocks a multiprocessor holds at once, by registers, shared memory and threads. The JSON
lines say more than the table: stack, stages, static and dynamic shared memory, constants, versions.

Deliberately absent: speed (it takes a GPU), a second process (starting one costs what it saves of ten seconds),
clusters of blocks (no kernel here asks for them).
"""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from thresher.bench.machine import facts, package_version
from thresher.engine.console import console, progress_line, shown
from thresher.kernels.launch.registry import Specialisation, specialisations_of, triton_modules
from thresher.rewards.errors import UserError

KERNEL_MODULES = triton_modules()
KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of GPU. matrix: the PTX instruction of its tensor cores; shared memory in bytes."""

    name: str
    capability: int
    gpus: str
    matrix: str
    shared_per_block: int
    shared_per_sm: int


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="sm_80",
            capability=80,
            gpus="A100, A800",
            matrix="mma",
            shared_per_block=163 * KIB,
            shared_per_sm=164 * KIB,
        ),
        Target(
            name="sm_90",
            capability=90,
            gpus="H100, H200",
            matrix="wgmma",
            shared_per_block=227 * KIB,
            shared_per_sm=228 * KIB,
        ),
    )
}
# Of a multiprocessor, the same on both: CUDA's table of technical specifications per compute capability.
REGISTERS_PER_SM, THREADS_PER_SM, BLOCKS_PER_SM = 64 * KIB, 2048, 32
WARP, SCHEDULERS = 32, 4
REGISTER_UNIT, SHARED_UNIT = 256, 128  # allocated in multiples: registers a warp, bytes a block
SHARED_RESERVED = KIB  # of every block, by the driver; on top of what the kernel asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a kernel takes. Registers and bytes of stack and spills are a thread's, shared memory is a block's."""

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
class Result:
    """One specialisation for one target; figures is None where it did not compile."""

    specialisation: Specialisation
    target: Target
    figures: Figures | None
    faults: tuple[str, ...]


def compile_one(specialisation: Specialisation, target: Target) -> Result:
    """Compile, read the log, check. Raises what Triton raises for a kernel that is no valid Triton."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.errors import PTXASError

    kernel, constants = specialisation.kernel, specialisation.constants
    check(specialisation)
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else specialisation.signature[name] for name in kernel.arg_names},
        constants,
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in specialisation.aligned},
    )
    options = {"num_warps": specialisation.num_warps, "num_stages": specialisation.num_stages}
    with _assembler_log() as written:
        try:
            compiled = triton_compile(source, target=GPUTarget("cuda", target.capability, WARP), options=options)
        except PTXASError as error:
            fault = f"does not compile: {ptxas_complaint(str(error))}"
            return Result(specialisation=specialisation, target=target, figures=None, faults=(fault,))
        except Exception as error:
            error.add_note(f"while compiling {specialisation.name} for {target.name}")
            raise
    figures = read_figures(written.getvalue(), compiled.asm["ptx"], compiled.metadata.shared)
    found = faults(figures, target, expected_matrix(specialisation, target))
    return Result(specialisation=specialisation, target=target, figures=figures, faults=found)


def expected_matrix(specialisation: Specialisation, target: Target) -> str | None:
    """The matrix instruction that the code is meant to have, None for none."""
    if not specialisation.tensor_cores:
        return None
    return target.matrix if specialisation.wgmma else "mma"


def check(specialisation: Specialisation) -> None:
    """Raises ValueError where types and constants do not cover the kernel's arguments, each once."""
    wanted = set(specialisation.kernel.arg_names)
    typed, constant = set(specialisation.signature), set(specialisation.constants)
    wrong = (wanted ^ (typed | constant)) | (typed & constant) | (set(specialisation.aligned) - typed)
    if wrong:
        raise ValueError(
            f"specialisation {specialisation.name}: {', '.join(sorted(wrong))}: expected every argument of the kernel "
            "in signature or in constants, not in both, and those of aligned in signature"
        )


@contextlib.contextmanager
def _assembler_log() -> Iterator[io.StringIO]:
    """What the assembler writes while kernels are compiled; Triton prints it, and much more where it fails."""
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
    """The first thing that ptxas calls fatal or an error; the message's first line where there is no such thing."""
    said = re.search(r"^ptxas\S*\s.*?\b((?:fatal|error)\s*:.*)$", message, re.MULTILINE)
    return re.sub(r"\s+:", ":", said[1]).rstrip(". ") if said else message.strip().partition("\n")[0]


def read_figures(log: str, ptx: str, dynamic_shared: int) -> Figures:
    """From the assembler's log and the code that it was given. A function that is not inlined has spills of its
    own, which are added; it shares registers and stack with the kernel that calls it."""
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


def faults(figures: Figures, target: Target, matrix: str | None) -> tuple[str, ...]:
    """What is wrong, each as the end of a sentence that starts with the kernel and the target. matrix: the instruction
    that is meant to be there."""
    found = []
    if figures.stack or figures.spill_stores or figures.spill_loads:
        found.append(
            f"spills (a thread stores {figures.spill_stores:,} bytes, loads {figures.spill_loads:,}, "
            f"keeps {figures.stack:,} on the stack)"
        )
    if figures.shared > target.shared_per_block:
        found.append(
            f"needs {figures.shared:,} bytes of shared memory a block, and there are {target.shared_per_block:,}"
        )
    if matrix is not None and matrix not in figures.matrix:
        found.append(f"has no {matrix} instruction and is meant to")
    if matrix is None and figures.matrix:
        found.append(f"has {' and '.join(figures.matrix)} instructions where products are meant to be exact")
    if figures.wgmma_serialised:
        found.append("has its wgmma instructions serialised")
    return tuple(found)


def blocks_per_sm(figures: Figures, target: Target) -> int:
    """How many blocks of a kernel one multiprocessor of `target` holds at a time; 0 where not even one fits."""
    if figures.shared > target.shared_per_block:
        return 0
    warps = -(-figures.threads // WARP)
    registers_per_warp = _up(figures.registers * WARP, REGISTER_UNIT)
    # Each of the four schedulers has a quarter of the registers, and no warp straddles two of them.
    warps_that_fit = SCHEDULERS * (REGISTERS_PER_SM // SCHEDULERS // registers_per_warp)
    return min(
        warps_that_fit // warps,
        target.shared_per_sm // _up(figures.shared + SHARED_RESERVED, SHARED_UNIT),
        THREADS_PER_SM // (warps * WARP),
        BLOCKS_PER_SM,
    )


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def run_compile_bench(targets: Sequence[str], modules: Sequence[str], out: str | Path | None) -> str | None:
    """Compile all that the `modules` list, print a table, append a JSON line a row to `out`; returns a sentence that
    names what is at fault, None where nothing is."""
    _require_compiler()
    wanted = [
        (name, entry, TARGETS[target])
        for name in modules
        for entry in _listed(name)
        for target in targets
        if TARGETS[target].capability in entry.capabilities
    ]
    compiler, gpus = f"Triton {package_version('triton')}", " and ".join(targets)
    console.print(f"{len(wanted)} compilations for {gpus} with {compiler}; no GPU is asked for")
    results = []
    with progress_line("compiled", len(wanted)) as line:
        for _, specialisation, target in wanted:
            results.append(compile_one(specialisation, target))
            line.to(len(results), f"{specialisation.name} for {target.name}")
    _show(results)
    if out is not None:
        head = facts(("triton",))
        rows = [_row(head, name, result) for (name, _, _), result in zip(wanted, results, strict=True)]
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        with Path(out).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        console.print(f"appended to {out}")
    wrong = [f"{r.specialisation.name} for {r.target.name} {' and '.join(r.faults)}" for r in results if r.faults]
    return "; ".join(wrong) or None


def _require_compiler() -> None:
    if find_spec("triton") is None:
        raise UserError("Triton is not installed, and `bench compile` is Triton's compiler at work: pip install triton")
    from triton import knobs

    if knobs.runtime.interpret:
        raise UserError(
            f"TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET')}, under which Triton interprets kernels "
            "and cannot compile them: unset it and run again"
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
    chosen, figures = result.specialisation, result.figures
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
        "figures": None if figures is None else asdict(figures),
        "blocks_per_sm": None if figures is None else blocks_per_sm(figures, result.target),
        "faults": list(result.faults),
    }


def _show(results: Sequence[Result]) -> None:
    """A row of a kernel with a name of 25 letters fits 80 characters; a longer name wraps, and never the numbers."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    drawn.add_column("kernel", overflow="fold")
    for name in ("target", "warps", "regs", "spills", "shared", "matrix", "blocks"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for result in results:
        figures = result.figures
        values: tuple[Any, ...] = (None,) * 5
        if figures is not None:
            matrix = " ".join(figures.matrix) or None
            spills = figures.spill_stores + figures.spill_loads
            values = (figures.registers, spills, figures.shared, matrix, blocks_per_sm(figures, result.target))
        cells = (result.specialisation.name, result.target.name, result.specialisation.num_warps, *values)
        drawn.add_row(*map(shown, cells), style="bold red" if result.faults else "")
    console.print("spills: bytes stored and loaded a thread; shared: bytes a block; blocks: per SM")
    console.print(drawn)
