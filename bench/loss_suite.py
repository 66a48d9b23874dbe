"""The cases of `thresher bench loss` as a pytest-benchmark suite: `pytest bench/loss_suite.py`.

One benchmark for each case and contender, proved right against float64 before it is timed. It runs on CUDA where there
is one. `-k "T8192 and liger"` picks lengths and peers. pytest-benchmark times one after the other, so that another
process's noise falls on one alone: `thresher bench loss` is the one to quote.
"""

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import pytest
import torch

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed; the extra [bench] brings it")

from thresher.bench.harness import resolve_device, resolve_dtype
from thresher.bench.loss import PEERS, Contender, LossBench, contenders, enter, forget_compilations
from thresher.bench.loss_cases import LossCase, LossShape, LossTruth, make_case, truth_of

SETTING = LossBench()
DEVICE = resolve_device(None)
DTYPE = resolve_dtype(None, DEVICE)


def _name(value: LossShape | Contender) -> str:
    if isinstance(value, Contender):
        return value.name.replace(", ", "-").replace(" ", "-").lower()
    return "T{}-H{}-V{}-D{}".format(*astuple(value))


@pytest.fixture(scope="module", params=SETTING.shapes(), ids=_name)
def proven(request: pytest.FixtureRequest) -> Iterator[tuple[LossCase, LossTruth]]:
    """One case at a time: its tensors and its truth."""
    forget_compilations()
    case = make_case(request.param, DEVICE, DTYPE)
    yield case, truth_of(case)
    case.drop_gradients()


@pytest.mark.parametrize("contender", contenders(DEVICE, list(PEERS)), ids=_name)
def test_loss(proven: tuple[LossCase, LossTruth], contender: Contender, benchmark: Any) -> None:
    case, truth = proven
    reason = contender.unavailable(DEVICE, DTYPE)
    if reason is not None:
        pytest.skip(reason)
    entrant = enter(contender, case, truth, None)
    if isinstance(entrant, str):
        if contender.ours:
            pytest.fail(entrant)
        pytest.skip(entrant)
    benchmark.group = str(case.shape)
    benchmark.extra_info.update(workspace=entrant.workspace, version=contender.version, matmul_flops=case.shape.flops)

    def call() -> None:
        entrant.run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(call, setup=case.drop_gradients, rounds=10, warmup_rounds=2)
