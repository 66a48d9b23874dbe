"""Kernels compiled for a target each, what the assembler wrote down, and what of it is a fault.

Triton brings NVIDIA's assembler and disassembler. Registers, stack frame, spilled bytes, shared memory, and whether
Hopper's matrix instructions had to be serialised, are read from the assembler's log and the PTX of the very
compilation. Loops, widths of loads and stores, and where spills lie are read from the machine code (sass.py). Each
compilation gets an empty cache of its own, since a kernel found in a cache leaves no log.

At fault is a kernel that
    does not compile,
    spills inside a loop: at a few hundred cycles a visit it costs more than the tile that caused it gains. A spill
        outside of loops is paid once a program, and is reported,
    moves its bulk by loads or stores of fewer than 16 bytes, where it is declared wide,
    needs more shared memory than a block can have,
    lacks the matrix instructions that it is meant to have, or has some where float32 products are meant to be exact,
    has its wgmma serialised.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thresher.bench.compile.sass import Code, disassemble, read_code
from thresher.bench.compile.target import WARP, Target
from thresher.kernels.registry import Specialisation


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
    """One specialisation for one target; figures and code are None where it did not compile."""

    specialisation: Specialisation
    target: Target
    figures: Figures | None
    code: Code | None
    faults: tuple[str, ...]


def compile_all(
    wanted: Sequence[tuple[Specialisation, Target]], assembled: Callable[[int, str], None] = lambda count, what: None
) -> list[Result]:
    """Compile each, read logs and code, check. `assembled` is called after each with their number so far and a name.
    Raises what Triton raises for a kernel that is no valid Triton."""
    made: list[_Assembled] = []
    for specialisation, target in wanted:
        made.append(_assemble(specialisation, target))
        assembled(len(made), f"{specialisation.name} for {target.name}")
    code: dict[int, Code] = {}
    for target in dict.fromkeys(target for _, target in wanted):
        places = [place for place, one in enumerate(made) if one.target == target and one.figures is not None]
        if places:
            with tempfile.TemporaryDirectory() as folder:
                texts = disassemble([made[place].cubin for place in places], folder)
            code |= dict(zip(places, map(read_code, texts), strict=True))
    return [_result(one, code.get(place)) for place, one in enumerate(made)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assembled:
    """What ptxas made, or why it made nothing."""

    specialisation: Specialisation
    target: Target
    figures: Figures | None
    cubin: bytes
    faults: tuple[str, ...]


def _assemble(specialisation: Specialisation, target: Target) -> _Assembled:
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
    options = {name: getattr(specialisation, name) for name in ("num_warps", "num_stages", "maxnreg")}
    with _assembler_log() as written:
        try:
            compiled = triton_compile(source, target=GPUTarget("cuda", target.capability, WARP), options=options)
        except PTXASError as error:
            fault = f"does not compile: {ptxas_complaint(str(error))}"
            return _Assembled(specialisation=specialisation, target=target, figures=None, cubin=b"", faults=(fault,))
        except Exception as error:
            error.add_note(f"while compiling {specialisation.name} for {target.name}")
            raise
    figures = read_figures(written.getvalue(), compiled.asm["ptx"], compiled.metadata.shared)
    return _Assembled(
        specialisation=specialisation, target=target, figures=figures, cubin=compiled.asm["cubin"], faults=()
    )


def _result(one: _Assembled, code: Code | None) -> Result:
    found = one.faults
    if one.figures is not None and code is not None:
        found += faults(one.figures, code, one.target, one.specialisation)
    return Result(specialisation=one.specialisation, target=one.target, figures=one.figures, code=code, faults=found)


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
    """What the assembler writes while a kernel is compiled (Triton prints it, and much more where it fails)."""
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


def faults(figures: Figures, code: Code, target: Target, specialisation: Specialisation) -> tuple[str, ...]:
    """What is wrong, each as the end of a sentence that starts with the kernel and the target."""
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
            f"needs {figures.shared:,} bytes of shared memory a block, and there are {target.shared_per_block:,}"
        )
    if matrix is not None and matrix not in figures.matrix:
        found.append(f"has no {matrix} instruction and is meant to")
    if matrix is None and figures.matrix:
        found.append(f"has {' and '.join(figures.matrix)} instructions where products are meant to be exact")
    if figures.wgmma_serialised:
        found.append("has its wgmma instructions serialised")
    return tuple(found)
