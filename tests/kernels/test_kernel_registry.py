"""Tests that Triton files are found by their name, and that each declares what its kernels are compiled for."""

import subprocess
import sys
from pathlib import Path

import pytest

from thresher.kernels.registry import KERNELS as FOLDER
from thresher.kernels.registry import kernels_in, specialisations_of, triton_modules

HEAD = "import triton\nimport triton.language as tl\n\nfrom thresher.kernels.registry import Specialisation\n\n"
KERNELS = """
@triton.jit
def _twice(x):
    return x + x


@triton.jit(do_not_specialize=["count"])
def _double_kernel(x_ptr, count, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(x_ptr + row, _twice(tl.load(x_ptr + row, mask=row < count)), mask=row < count)


@triton.jit
def _halve_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * 0.5)
"""
LISTS = """

def specialisations():
    return tuple(
        Specialisation(name=kernel.fn.__name__, kernel=kernel, signature={{}}, constants={{}}) for kernel in ({kernels})
    )
"""


def test_every_triton_file_is_in_the_registry_and_nothing_else_is() -> None:
    """A file that jits a kernel under another name would be neither compiled nor tested."""
    holding = {path.stem for path in FOLDER.rglob("*.py") if kernels_in(path.read_text("utf-8"))}
    assert {module.rpartition(".")[2] for module in triton_modules()} == holding >= {"head_triton"}


def test_the_names_are_known_without_triton() -> None:
    check = (
        "import sys, thresher.kernels.registry as registry; names = registry.triton_modules(); "
        "sys.exit(len(names) < 2 or bool({'triton', *names} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-P", "-c", check], check=True)


@pytest.mark.parametrize("module", triton_modules())
def test_every_triton_file_lists_all_its_kernels(module: str) -> None:
    pytest.importorskip("triton")
    assert {entry.kernel.fn.__module__ for entry in specialisations_of(module)} == {module}


@pytest.mark.parametrize("module", triton_modules())
def test_every_triton_file_has_its_test(module: str) -> None:
    *folder, name = module.removeprefix("thresher.kernels.").split(".")
    test = Path(__file__).parent.joinpath(*folder, f"test_{name}.py")
    assert test.is_file(), f"expected {test}"


def test_a_kernel_is_what_no_other_one_calls() -> None:
    assert kernels_in(HEAD + KERNELS) == {"_double_kernel", "_halve_kernel"}
    assert kernels_in("from triton import jit\n\n\n@jit\ndef k(x):\n    pass\n") == {"k"}
    assert kernels_in("@functools.cache\ndef f(x):\n    return g(x)\n") == set()


@pytest.mark.parametrize(
    ("name", "rest", "complaint"),
    [
        ("unlisted_triton", "", r"expected a module with a function specialisations\(\), as kernels/head_triton"),
        ("empty_triton", LISTS.format(kernels=""), "^_double_kernel, _halve_kernel: expected a specialisation"),
        ("partly_triton", LISTS.format(kernels="_double_kernel,"), "^_halve_kernel: expected a specialisation"),
    ],
)
def test_a_file_that_leaves_a_kernel_out_is_refused(
    name: str, rest: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    (tmp_path / f"{name}.py").write_text(HEAD + KERNELS + rest)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        specialisations_of(name)
    (tmp_path / f"all_{name}.py").write_text(HEAD + KERNELS + LISTS.format(kernels="_double_kernel, _halve_kernel"))
    assert len(specialisations_of(f"all_{name}")) == 2
