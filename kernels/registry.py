"""Registry of the Triton kernels: every file below kernels/ named *_triton.py, and its kernels' specialisations.

A file lists its specialisations, one record for each that its launcher may request, in `specialisations()`. `thresher
bench compile` compiles them; it needs no GPU. A file with a kernel that has no specialisation is refused. A
`@triton.jit` function that another one calls is not a kernel. Files are found and read as text; only their
specialisations need Triton.
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
    """Work of one program of a launch, from which a share of peak is predicted.

    flops: multiplications and additions on tensor cores. bytes: read from and written to the GPU's memory, without
    reads from a cache. trips: iterations of its main loop.
    """

    flops: float
    bytes: float
    trips: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialisation:
    """One kernel with the types and constants of one launch.

    signature: argument name -> Triton's type ("*bf16", "*fp32", "i32", "i64", "fp32"), without the constants.
    constants: `tl.constexpr` argument name -> value. aligned: arguments that are divisible by 16 in launches
    (pointers that torch allocated, strides padded to it), which the compiler turns into wide loads.
    capabilities: the GPUs that this tiling is launched on, 80 for sm_80 and later without wgmma, 90 for sm_90.
    maxnreg: registers that a thread may have, if the launch limits them. enable_fp_fusion: whether a product and a sum
    may become one operation with one rounding.
    tensor_cores: whether the code is expected to contain matrix instructions (mma on sm_80, wgmma on sm_90).
    wgmma: whether its tiles have the 64 rows that a wgmma needs; if not, sm_90 is expected to use mma.
    wide: whether most loads and stores have to be 16 bytes wide; a few scalars may be narrower.
    tile_bytes: bytes that one trip of the main loop loads; 0: derived from the code. work: of one program, if a share
    of peak is to be predicted.
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
    """Return the names of the modules with Triton kernels, in alphabetical order, without importing them."""
    files = sorted(path.relative_to(KERNELS).with_suffix("") for path in KERNELS.rglob("*_triton.py"))
    return tuple(".".join(("thresher.kernels", *path.parts)) for path in files)


def specialisations_of(module: str) -> tuple[Specialisation, ...]:
    """Return the specialisations that `module` lists.

    Raises ModuleNotFoundError if there is no such module, ValueError if it lists nothing or omits one of its kernels.
    """
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
    """Return the names of a file's kernels: its `@triton.jit` functions that no other of them calls."""
    jitted = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any(_is_jit(decorator) for decorator in node.decorator_list)
    ]
    called = {name for function in jitted for name in _called_names(function)}
    return {function.name for function in jitted} - called


def _is_jit(decorator: ast.expr) -> bool:
    """Return whether a decorator is `@triton.jit` or `@jit`, with or without arguments."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)) == "jit"


def _called_names(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
