"""Proofs of every Triton kernel under interpreter/: any order of programs, no races, no read of uninitialised memory,
a GPU's exp and log.

A kernel is proved in small launches. The test of its file declares them (docs/add/kernel.md):

    def small_launches() -> dict[str, Callable[[], None]]:
        return {"a ragged length": lambda: ..}       # launches it, and compares the result with float64 itself

They are found by the name of the kernel's file. Each is run twice, with exact exponentials and with approximate ones,
and together the launches of a file must run all of its kernels. `make test` runs the last launch of a file.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from interpreter import (
    ProofError,
    approximate_functions,
    backwards,
    bfloat16_to_nearest,
    poisoned_memory,
    program_order,
    proved,
    shuffled,
    skip_unless_interpreted,
)
from loss_cases import brute, float32_budget, make_case, run
from torch import Tensor

from thresher.kernels.registry import specialisations_of, triton_modules

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes

KERNEL_TESTS = Path(__file__).parent
NAME = "small_launches"
Launches = dict[str, Callable[[], None]]


@pytest.fixture(autouse=True)
def interpreted() -> None:
    skip_unless_interpreted()


# The loss's two files; their tests are older than these proofs.


def _loss(T: int, **options: Any) -> None:
    """Compare one call of the loss with float64, with the Triton backend, two row tiles and two chunks."""
    case = make_case(T, H=20, V=100, seed=T)
    truth, budget = brute(case, **options), float32_budget(case, **options)
    found = run(case.to(torch.float32), backend="triton", chunk_rows=100, **options)
    for name in ("logprobs", "entropy", "hidden_grad", "head_grad"):
        assert (found[name].double() - truth[name]).norm() <= budget[name], name


def _wrong_guess() -> None:
    """Old log-probs are far off, so that tiles are recomputed."""
    case = make_case(140, H=24, V=130, seed=3)
    case = replace(case, advantages=torch.zeros(140), weights=case.weights + 0.1)
    truth, budget = brute(case, beta=0.5, kl_value="k2"), float32_budget(case, beta=0.5, kl_value="k2")
    wrong = replace(case, old=case.old + 200.0 * (torch.arange(140) % 70 == 30))
    found = run(wrong.to(torch.float32), backend="triton", beta=0.5, kl_value="k2")
    for name in ("logprobs", "entropy", "hidden_grad", "head_grad"):
        assert (found[name].double() - truth[name]).norm() <= budget[name], name


def _reduction() -> None:
    load(KERNEL_TESTS / "test_head_triton.py").check_reduction(rows=60, tiles=5, again_rows=64)


LOSS: dict[str, Launches] = {
    "thresher.kernels.head_triton": {"a wrong guess": _wrong_guess, "programs that set one flag": _reduction},
    "thresher.kernels.coefficients_triton": {
        "k3 and dual clip": lambda: _loss(140, beta=0.2, kl_value="k3", dual_clip=1.5),
        "entropy": lambda: _loss(70, entropy_coef=0.1, temperature=1.3),
    },
}


# Where the launches of a kernel's file are declared


def test_file(module: str) -> Path:
    *folder, name = module.removeprefix("thresher.kernels.").split(".")
    return KERNEL_TESTS.joinpath(*folder, f"test_{name}.py")


test_file.__test__ = False  # type: ignore[attr-defined]


def declares(path: Path) -> bool:
    """Return whether a test file declares launches, read from its text, so that collecting imports no other test."""
    body = ast.parse(path.read_text("utf-8")).body if path.is_file() else []
    return any(isinstance(node, ast.FunctionDef) and node.name == NAME for node in body)


@cache
def load(path: Path) -> ModuleType:
    name = f"small_launches_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def launches_of(module: str) -> Launches:
    path = test_file(module)
    found: Launches = getattr(load(path), NAME)() if declares(path) else {}
    return found or LOSS.get(module, {})


def prove(launches: Launches, approximate: bool) -> Counter[str]:
    """Run the launches in a proof; return how often each kernel was launched."""
    ran: Counter[str] = Counter()
    for name, launch in launches.items():
        with proved(approximate=approximate) as seen:
            try:
                launch()
            except AssertionError as error:
                error.add_note(f"in {name!r}{', with approximate functions' if approximate else ''}")
                raise
        assert seen.launches, f"{name!r} launches no kernel"
        ran += seen.launches
    return ran


# Kernels whose interpreted launch takes longer than all others together.
LONG = {f"thresher.kernels.{name}_triton" for name in ("delta.rule", "delta.layer", "delta.steps", "attention.forest")}


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.slow] * (module in LONG))
        for module in sorted({*triton_modules()} - {"thresher.kernels.head_triton"})
    ],
)
def test_a_kernel_is_proved_in_its_last_launch(module: str) -> None:
    """The loss launches the head's kernels together with those of the coefficients."""
    launches = launches_of(module)
    assert launches, f"expected def {NAME}() in {test_file(module)}, as docs/add/kernel.md has it"
    prove(dict(list(launches.items())[-1:]), approximate=False)


@pytest.mark.slow
@pytest.mark.parametrize("module", triton_modules())
def test_every_kernel_is_proved(module: str) -> None:
    launches = launches_of(module)
    ran = prove(launches, approximate=False) + prove(launches, approximate=True)
    missing = {entry.kernel.fn.__name__ for entry in specialisations_of(module)} - set(ran)
    assert not missing, f"{', '.join(sorted(missing))}: expected a small launch of every kernel"


def test_launches_are_found_in_the_test_of_a_kernel_s_file(tmp_path: Path) -> None:
    assert test_file("thresher.kernels.a.b_triton") == KERNEL_TESTS / "a" / "test_b_triton.py"
    declared, silent = tmp_path / "test_declared.py", tmp_path / "test_silent.py"
    declared.write_text("def small_launches():\n    return {'one': lambda: None}\n")
    silent.write_text("def test_it():\n    small_launches()\n")
    assert declares(declared) and not declares(silent) and not declares(tmp_path / "test_absent.py")
    assert list(load(declared).small_launches()) == ["one"]


# Kernels that each detector must detect, or accept


@triton.jit
def _fine_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.exp(tl.load(x_ptr + i, mask=i < n)), mask=i < n)


@triton.jit
def _writers_kernel(y_ptr, FLAG: tl.constexpr):
    """Every program writes the same address: its own index, or one flag."""
    if FLAG:
        tl.store(y_ptr, 7)
    else:
        tl.store(y_ptr, tl.program_id(0))


@triton.jit
def _neighbour_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """In place, each program reads what the next one overwrites."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i + 1, mask=i + 1 < n), mask=i + 1 < n)


@triton.jit
def _lanes_kernel(y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i // 2, i)


@triton.jit
def _sum_kernel(x_ptr, y_ptr):
    """Atomic additions of floats: no race, but the last bits depend on the order."""
    tl.atomic_add(y_ptr, tl.load(x_ptr + tl.program_id(0)))


@triton.jit
def _counter_kernel(x_ptr, y_ptr):
    """A plain read of an address that other programs add to."""
    tl.atomic_add(y_ptr, 1)
    tl.store(x_ptr + tl.program_id(0), tl.load(y_ptr))


@triton.jit
def _functions_kernel(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.exp(x))
    tl.store(y_ptr + stride + i, tl.exp2(x))
    tl.store(y_ptr + 2 * stride + i, tl.log(x))
    tl.store(y_ptr + 3 * stride + i, tl.log2(x))
    tl.store(y_ptr + 4 * stride + i, 1.0 / x)
    tl.store(y_ptr + 5 * stride + i, tl.sqrt(x))
    tl.store(y_ptr + 6 * stride + i, tl.rsqrt(x))


def test_a_sound_kernel_passes_and_is_counted() -> None:
    x = torch.linspace(-3, 3, 100)
    with proved() as seen:
        y = torch.empty(100)
        _fine_kernel[(4,)](x, y, 100, BLOCK=32)
        _fine_kernel[(7,)](x, y, 100, BLOCK=16)
    assert seen.launches == {"_fine_kernel": 2}
    torch.testing.assert_close(y, x.exp())


def test_programs_that_write_different_values_to_one_place_are_detected() -> None:
    with proved(), pytest.raises(ProofError, match=r"^_writers_kernel: 1 bytes written by several programs"):
        _writers_kernel[(3,)](torch.zeros(1, dtype=torch.int32), FLAG=False)
    with proved():  # a flag that several programs set is no race
        _writers_kernel[(3,)](torch.zeros(1, dtype=torch.int32), FLAG=True)
    with proved():  # nor one program by itself
        _writers_kernel[(1,)](torch.zeros(1, dtype=torch.int32), FLAG=False)


def test_a_byte_that_one_program_reads_and_another_writes_is_detected() -> None:
    x = torch.arange(64.0)
    with proved(), pytest.raises(ProofError, match="12 bytes written by one program and read by another"):
        _neighbour_kernel[(4,)](x, x, 64, BLOCK=16)
    with proved():
        _neighbour_kernel[(4,)](x, torch.empty(64), 64, BLOCK=16)


def test_lanes_of_one_store_that_collide_are_detected() -> None:
    with proved(), pytest.raises(ProofError, match="one store writes a byte twice"):
        _lanes_kernel[(1,)](torch.zeros(16, dtype=torch.int32), BLOCK=16)


def test_a_result_that_depends_on_the_order_of_programs_is_detected() -> None:
    x = torch.tensor([1e8, 1.0, -1e8, 1.0])
    with proved(), pytest.raises(ProofError, match=r"_sum_kernel: other bytes with its programs (backwards|shuffled)"):
        _sum_kernel[(4,)](x, torch.zeros(1))
    y = torch.zeros(1)
    with proved():
        _sum_kernel[(4,)](torch.ones(4), y)
    assert y.item() == 4  # once, not three times


def test_a_plain_read_beside_atomic_writes_is_detected() -> None:
    with proved(), pytest.raises(ProofError, match="changed atomically by one program and read by another"):
        _counter_kernel[(4,)](torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("beyond", ["read", "write"])
def test_an_access_outside_of_the_tensors_is_stopped(beyond: str) -> None:
    x, y = torch.ones(64 if beyond == "read" else 128), torch.ones(128 if beyond == "read" else 64)
    with proved(), pytest.raises(ProofError, match=f"^_fine_kernel: a {beyond} outside of every tensor"):
        _fine_kernel[(4,)](x, y, 128, BLOCK=32)


def test_what_nobody_wrote_is_noticed() -> None:
    def sums_fresh_memory() -> Tensor:
        x, y = torch.ones(4).new_empty(32), torch.empty_like(torch.ones(32))
        x[:31] = 0.0
        _fine_kernel[(1,)](x, y, 32, BLOCK=32)
        return y

    with proved():
        y = sums_fresh_memory()
    assert y[:31].isfinite().all() and y[31].isnan()
    with poisoned_memory():
        assert torch.empty(3, dtype=torch.int64).min() == torch.iinfo(torch.int64).max
        assert torch.empty_strided((2, 2), (1, 2), dtype=torch.bfloat16).isnan().all()
        assert torch.zeros(3).sum() == 0 and torch.full((2,), 5).sum() == 10
    assert not torch.zeros(2).isnan().any()


def test_an_order_is_an_order_of_all_programs() -> None:
    for order in (backwards, shuffled):
        assert sorted(order(12)) == list(range(12)) and list(order(12)) != list(range(12))

    @triton.jit
    def _turn_kernel(turn_ptr, seen_ptr):
        number = (tl.program_id(0) * 3 + tl.program_id(1)) * 2 + tl.program_id(2)
        tl.store(seen_ptr + number, tl.load(turn_ptr))
        tl.store(turn_ptr, tl.load(turn_ptr) + 1)

    seen = torch.full((12,), -1, dtype=torch.int32)
    with program_order(shuffled):
        _turn_kernel[(2, 3, 2)](torch.zeros(1, dtype=torch.int32), seen)
    assert seen.argsort().tolist() == list(shuffled(12))


def test_approximate_functions_are_off_by_what_a_gpu_s_may_be() -> None:
    x = torch.linspace(0.1, 20, 256)
    exact = x.double()
    truths = [exact.exp(), exact.exp2(), exact.log(), exact.log2(), 1 / exact, exact.sqrt(), exact.rsqrt()]
    y = torch.zeros(7, 256)
    with approximate_functions():
        _functions_kernel[(1,)](x, y, 256, BLOCK=256)
    plain = torch.zeros(7, 256)
    _functions_kernel[(1,)](x, plain, 256, BLOCK=256)
    unit = 2.0**-24
    # exp: the rounding of x log2 e adds |x| units to it; logarithms: absolute near 1
    scale = [(1 + exact) * truths[0], truths[1], exact.log().abs() + 1, exact.log2().abs() + 1, *truths[4:]]
    for row, (truth, by) in enumerate(zip(truths, scale, strict=True)):
        worst, before = (((found[row].double() - truth).abs() / by).max() / unit for found in (y, plain))
        assert before <= 2 and 1.5 < worst < 6 and before < worst, (row, before, worst)  # bound: 4 units, a rounding


@triton.jit
def _round_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.bfloat16))


def test_bfloat16_is_rounded_to_nearest() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)) * 1e3
    x[:8] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 3.4e38, float("inf"), 0.0, -0.0, 1e-40])
    y, cut = (torch.empty(256, dtype=torch.bfloat16) for _ in range(2))
    with bfloat16_to_nearest():
        _round_kernel[(1,)](x, y, BLOCK=256)
    _round_kernel[(1,)](x, cut, BLOCK=256)
    assert torch.equal(y.view(torch.int16), x.bfloat16().view(torch.int16)) and not torch.equal(cut, y)
    with bfloat16_to_nearest():
        _round_kernel[(1,)](torch.full((1,), float("nan")), y, BLOCK=1)
    assert y[0].isnan()


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    from triton.runtime import interpreter

    def state() -> list[dict[str, Any]]:
        return [dict(vars(of)) for of in (interpreter.InterpreterBuilder, interpreter.GridExecutor)]

    before, convert = state(), interpreter._convert_float
    yield
    assert state() == before and interpreter._convert_float is convert
