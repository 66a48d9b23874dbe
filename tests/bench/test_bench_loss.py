"""Test the loss bench: each contender agrees with float64, rows are complete, and omissions are reported."""

import json
import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from thresher.bench import loss as bench_module
from thresher.bench import loss_cases as cases_module
from thresher.bench.harness import in_turn, peak_bytes, resolve_device
from thresher.bench.loss import (
    OURS,
    OURS_IN_TORCH,
    PEERS,
    Contender,
    LossBench,
    contenders,
    enter,
    failure,
    measure_case,
    read_peers,
    run_loss_bench,
)
from thresher.bench.loss_cases import (
    CLIP_HIGH,
    CLIP_LOW,
    MARGIN,
    LossCase,
    LossOutcome,
    LossShape,
    errors_of,
    make_case,
    objective,
    truth_of,
)
from thresher.bench.plots import draw_loss
from thresher.cli.main import run
from thresher.common.errors import UserError

CPU = torch.device("cpu")
SHAPE = LossShape(tokens=96, hidden=16, vocab=300, density=50)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the fewest rounds, because these tests do not check the figures."""
    monkeypatch.setitem(bench_module.CASE_SECONDS, "cpu", 0.0)


@pytest.fixture(scope="module")
def case() -> LossCase:
    return make_case(SHAPE, CPU, torch.float32)


def test_a_case_is_what_it_says(case: LossCase) -> None:
    assert int(case.mask_T.sum()) == SHAPE.active == 48
    assert SHAPE.sequences == 4 and case.advantages_B.unique().numel() == 4
    assert (case.sequences(case.advantages_T) == case.advantages_B[:, None]).all()
    assert (case.old_T[~case.mask_T] == 0).all() and (case.ref_T[~case.mask_T] == 0).all()
    torch.testing.assert_close(case.weights_T.sum(), torch.tensor(1.0))
    runs = (case.mask_T[1:] != case.mask_T[:-1]).sum()
    assert 1 <= runs <= 12  # about 48 if every row were drawn independently
    again = make_case(SHAPE, CPU, torch.float32)
    assert torch.equal(again.hidden_TH, case.hidden_TH) and torch.equal(again.old_T, case.old_T)


def test_no_ratio_stands_where_rounding_could_move_it_over_the_clip() -> None:
    case = make_case(LossShape(tokens=1024, hidden=16, vocab=300, density=100), CPU, torch.float32)
    log_ratios_R = truth_of(case).logprobs_R - case.old_T[case.index_R]
    for edge in (math.log(1 - CLIP_LOW), math.log(1 + CLIP_HIGH)):
        beyond_R = (log_ratios_R - edge).abs() - MARGIN
        near_R = beyond_R < 1e-3
        assert float(-beyond_R.min()) < 1e-4  # float32's log-probs of up to 10
        assert float(near_R.float().mean()) > 0.02  # and there are rows on the edge
    clipped = (log_ratios_R > math.log(1 + CLIP_HIGH)) | (log_ratios_R < math.log(1 - CLIP_LOW))
    assert 0.01 < float(clipped.float().mean()) < 0.5


@pytest.mark.parametrize(
    ("tokens", "sequences", "active"), [(8192, 8, 2048), (16384, 16, 4096), (90, 3, 22), (7, 1, 1), (1, 1, 1)]
)
def test_sequences_divide_the_tokens(tokens: int, sequences: int, active: int) -> None:
    shape = LossShape(tokens=tokens, hidden=4, vocab=9, density=25)
    assert (shape.sequences, shape.active) == (sequences, active)
    if tokens < 100:
        assert int(make_case(shape, CPU, torch.float32).mask_T.sum()) == active


def test_the_sampled_truth_is_that_of_autograd_through_everything(case: LossCase) -> None:
    hidden_TH, head_VH = (leaf.detach().double().requires_grad_() for leaf in (case.hidden_TH, case.head_VH))
    rows = case.mask_T
    logp_TV = torch.log_softmax(hidden_TH @ head_VH.t(), 1)
    logprobs_R = logp_TV[torch.arange(len(rows)), case.targets_T][rows]
    vectors = [values_T[rows].double() for values_T in (case.old_T, case.ref_T, case.advantages_T, case.weights_T)]
    loss = objective(logprobs_R, *vectors).sum()
    loss.backward()
    truth = truth_of(case)
    assert len(truth.rows_E) == 48 and len(truth.columns_F) > 64
    assert truth.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    torch.testing.assert_close(truth.hidden_grad_EH, hidden_TH.grad[truth.rows_E], rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(truth.head_grad_FH, head_VH.grad[truth.columns_F], rtol=1e-9, atol=1e-14)


CONTENDERS = [*OURS, OURS_IN_TORCH, *(peer for name, peer in PEERS.items() if name != "compiled")]


@pytest.mark.parametrize("head_rows", [300, 330], ids=["all columns exist", "head has more rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_every_contender_that_is_here_agrees_with_float64(
    contender: Contender, dtype: torch.dtype, head_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cases_module.HEAD_ROWS, 300, head_rows)
    reason = contender.unavailable(CPU, dtype)
    if reason is not None:
        pytest.skip(reason)
    case = make_case(SHAPE, CPU, dtype)
    assert len(case.whole_head) == head_rows and len(case.head_VH) == 300
    truth = truth_of(case)
    for chunk_rows in (None, 20):  # 48 active rows: the last chunk is a short one
        case.drop_gradients()
        outcome = contender.prepare(case, chunk_rows)()
        errors = errors_of(outcome, truth)
        limits = (bench_module.LIMITS if contender.ours else bench_module.PEER_LIMITS)[dtype]
        assert errors.worse_than(*limits) == []
        assert not outcome.hidden_grad_TH[~case.mask_T].any() and not outcome.head_grad_VH[300:].any()
        if contender.ours:  # in place: the head's gradient is in the buffer only
            assert (case.whole_head.grad is None) == (contender is OURS[1])


def _scaled(case: LossCase, chunk_rows: int | None) -> Any:
    """Prepare our loss with every gradient of the hidden states a fifth too large."""
    right = OURS[0].prepare(case, chunk_rows)

    def wrong() -> LossOutcome:
        outcome = right()
        return replace(outcome, hidden_grad_TH=1.2 * outcome.hidden_grad_TH)

    return wrong


def _broken(case: LossCase, chunk_rows: int | None) -> Any:
    raise RuntimeError("no kernel image\nand a second line")


def test_what_is_wrong_or_fails_is_not_timed(case: LossCase) -> None:
    truth = truth_of(case)
    wrong = enter(replace(OURS[0], prepare=_scaled), case, truth, None)
    assert isinstance(wrong, str) and "hidden_grad 2.0e-01" in wrong and "head_grad" not in wrong
    assert enter(replace(OURS[0], prepare=_broken), case, truth, None) == "RuntimeError: no kernel image."
    missing = replace(PEERS["trl"], package="a-package-that-is-not-there")
    assert missing.unavailable(CPU, torch.float32) == (
        "a-package-that-is-not-there is not installed; install it with pip install a-package-that-is-not-there."
    )
    chosen = [replace(OURS[0], prepare=_scaled), OURS[1], replace(PEERS["naive"], prepare=_broken)]
    row = measure_case(SHAPE, chosen, CPU, torch.float32)
    assert failure([row]) is not None and "ours at H 16, V 300, T 96, 50% active: It is off" in str(failure([row]))
    assert row["peers"]["naive"] == {"version": version("torch"), "left_out": "RuntimeError: no kernel image."}
    assert "ms" in row["ours"]["ours, in place"] and row["ratio"] == {"ours, in place": {}}


@pytest.mark.slow
def test_rows_hold_what_they_must(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden", "16", "8", "--vocab", "300", "--tokens", "64", "--density", "50"]
    command = ["bench", "loss", "--device", "cpu", *sizes, "--peers", "naive,chunked"]
    assert run([*command, "--out", str(tmp_path / "new" / "rows.jsonl"), "--plot", str(tmp_path / "p.png")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "new" / "rows.jsonl").read_text().splitlines()]
    assert [row["shape"]["hidden"] for row in rows] == [8, 16]
    for row in rows:
        assert {"commit", "machine", "gpu", "torch", "triton", "threads", "dtype", "matmul"} <= row.keys()
        assert row["floor_ms"]["nominal"] is None and row["floor_ms"]["measured"] > 0
        assert row["shape"]["active"] == 32 and row["rounds"] >= 5
        assert set(row["ours"]) == {"ours", "ours, in place"} and set(row["peers"]) == {"naive", "naive, chunked"}
        for found in (row["ours"] | row["peers"]).values():
            assert 0 < found["ms"]["p20"] <= found["ms"]["p50"] <= found["ms"]["p80"]
            share = row["floor_ms"]["measured"] / found["ms"]["p50"]
            assert found["share"] == {"nominal": None, "measured": pytest.approx(share)}
            assert 0 < found["workspace_mib"] < found["extra_mib"] and found["errors"]["logprob"] < 1e-4
        assert set(row["ratio"]["ours"]) == {"naive", "naive, chunked"}
        assert row["ratio"]["ours"]["naive"]["p20"] <= row["ratio"]["ours"]["naive"]["p80"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "16 x 300, 64, 50%" in capsys.readouterr().out


def test_a_spent_budget_leaves_out_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = LossBench(device="cpu", hidden=(8,), vocab=(30,), tokens=(16, 32), density=(100,), budget=0.0)
    assert run_loss_bench(small, tmp_path / "rows.jsonl", tmp_path / "p.png") == []
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [left["tokens"] for left in row["left_out"]] == [32, 16]  # the weightiest first
    said = " ".join(capsys.readouterr().out.split())
    assert "left out: H 8, V 30, T 32, 100% active; H 8, V 30, T 16, 100% active" in said
    assert not (tmp_path / "p.png").exists()
    row = measure_case(SHAPE, contenders(CPU, ["naive"]), CPU, torch.float32, deadline=0.0)
    assert row["ours"]["ours"]["left_out"] == "The budget was used up." and failure([row]) is None


def test_the_weightiest_cases_come_first() -> None:
    shapes = LossBench(device="cpu", hidden=(896, 3584), vocab=(9,), tokens=(16384, 8192), density=(25, 100)).shapes()
    first = [(896, 8192, 100), (3584, 8192, 100), (896, 16384, 100), (3584, 16384, 100)]
    assert [(shape.hidden, shape.tokens, shape.density) for shape in shapes[:4]] == first
    assert len(shapes) == 8 and [shape.tokens for shape in shapes[4:6]] == [8192, 8192]


BAD = ("--peers torch", "--hidden 0", "--density 0", "--density 101", "--budget -1", "--budget nan", "--dtype float8")


@pytest.mark.parametrize("flags", [*BAD, "--out {folder}/file/rows.jsonl", "--plot {folder}"])
def test_bad_flags_are_status_2(flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(["bench", "loss", "--device", "cpu", "--budget", "0", *flags.format(folder=tmp_path).split()]) == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_names_of_peers_and_of_the_device_are_checked() -> None:
    assert read_peers("all") == tuple(PEERS) and read_peers("none") == () and read_peers("trl,cce") == ("trl", "cce")
    with pytest.raises(UserError, match="'liger2' is not a peer; expected all, none"):
        read_peers("liger2")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cuda"):
            resolve_device("cuda")


def test_peak_memory_is_counted_and_calls_take_turns() -> None:
    def two_at_once() -> Tensor:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(1 << 19, dtype=torch.uint8)
        del first
        third = torch.empty(1 << 18, dtype=torch.uint8)
        return second + third[0]

    peak = peak_bytes(two_at_once, CPU)
    assert (1 << 20) + (1 << 19) <= peak < (1 << 20) + (1 << 19) + 4096
    order: list[str] = []
    times = in_turn([lambda: order.append("a"), lambda: order.append("b")], 2, CPU, between=lambda: order.append("-"))
    assert "".join(order) == "-a-b-b-a" and [len(taken) for taken in times] == [2, 2]


def test_a_picture_needs_only_one_measured_contender(tmp_path: Path, case: LossCase) -> None:
    row = measure_case(SHAPE, [OURS[0], OURS[1], PEERS["cce"]], CPU, torch.float32)
    head = {"gpu": None, "machine": "a machine", "threads": 1, "torch": "2", "commit": None}
    draw_loss([{**head, **row}], tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
