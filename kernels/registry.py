"""The Triton kernels: every file below kernels/ named *_triton.py, and what each compiles its kernels for.

A file lists its specialisations, one record for each that its launcher may ask for, in `specialisations()`. `thresher
bench compile` compiles them for GPUs that need not be there. A file is refused where a kernel of its own has none. A
`@triton.jit` function that another one calls is not a kernel. Files are read as text, so that listing needs no Triton.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramWork:
    """Work of one program of a launch, for a predicted share of peak.

    flops: multiplications and additions on tensor cores. bytes: read from and written to the GPU's memory; reads from a
    cache are left out. trips: of its main loop.
    """

    flops: float
    bytes: float
    trips: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialisation:
    """One kernel with the types and constants of one launch.

    signature: argument name -> Triton's type ("*bf16", "*fp32", "i32", "i64", "fp32"), without the constants.
    constants: `tl.constexpr` argument name -> value. aligned: arguments that launches find divisible by 16
    (pointers that torch allocated, strides padded to it), which the compiler turns into wide loads.
    capabilities: the GPUs that this tiling is launched on, 80 for sm_80 and later without wgmma, 90 for sm_90.
    maxnreg: registers that a thread may have, where the launch caps them. enable_fp_fusion: whether a product and a sum
    may become one operation with one rounding.
    tensor_cores: whether the code is expected to hold matrix instructions (mma on sm_80, wgmma on sm_90).
    wgmma: whether its tiles have the 64 rows that a wgmma takes; where not, sm_90 is expected to do with mma.
    wide: whether the bulk of loads and stores has to be of 16 bytes each; a few scalars may be narrower.
    tile_bytes: what one trip of the main loop loads; 0 leaves it to be read off the code. work: of one program, where a
    share of peak is to be predicted.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    enable_fp_fusion: bool = True
    tensor_cores: bool = False
    wgmma: bool = True
    capabilities: tuple[int, ...] = (80, 90)
    wide: bool = False
    tile_bytes: int = 0
    work: ProgramWork | None = None


def triton_modules() -> tuple[str, ...]:
    """Names of the modules that hold Triton kernels, in alphabetical order. Imports none of them."""
    files = sorted(path.relative_to(KERNELS).with_suffix("") for path in KERNELS.rglob("*_triton.py"))
    return tuple(".".join(("thresher.kernels", *path.parts)) for path in files)


def specialisations_of(module: str) -> tuple[Specialisation, ...]:
    """Return the specialisations that `module` lists. Raises ModuleNotFoundError where there is no such module,
    ValueError where it lists nothing or leaves one of its kernels out."""
    loaded = import_module(module)
    if not hasattr(loaded, "specialisations"):
        raise ValueError("expected a module with a function specialisations(), as kernels/head_triton.py")
    listed: tuple[Specialisation, ...] = loaded.specialisations()
    missing = kernels_in(inspect.getsource(loaded)) - {entry.kernel.fn.__name__ for entry in listed}
    if missing:
        raise ValueError(
            f"{', '.join(sorted(missing))}: expected a specialisation of every @triton.jit kernel, listed by "
            "specialisations(), as in kernels/head_triton.py"
        )
    return listed


def kernels_in(source: str) -> set[str]:
    """Names of the `@triton.jit` functions of a file that no other of them calls: the kernels."""
    jitted = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any(_is_jit(decorator) for decorator in node.decorator_list)
    ]
    called = {name for function in jitted for name in _called_names(function)}
    return {function.name for function in jitted} - called


def _is_jit(decorator: ast.expr) -> bool:
    """`@triton.jit`, `@jit`, and either with arguments."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)) == "jit"


def _called_names(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
