"""Test `thresher bench attention` on a small batch: contenders compute the same products, figures are consistent."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from thresher.bench import attention
from thresher.bench.attention import (
    OURS,
    UNSHARED,
    AttentionBench,
    Contender,
    error_of,
    failure,
    make_batch,
    once,
    run_attention_bench,
)
from thresher.bench.roofline import MODELS

CPU = torch.device("cpu")
BENCH = AttentionBench(models=["0.5B"], trees=2, group=3, shared=11, own=5, rounds=2, device="cpu")


def test_rows_have_ours_and_whole_trajectories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    (row,) = run_attention_bench(BENCH, out)
    assert json.loads(out.read_text()) == row
    assert (row["tokens"], row["unshared_tokens"]) == (2 * (11 + 3 * 5), 2 * 3 * 16)
    assert row["pairs"] == int((seen(2 * (11 + 3 * 5))).sum())
    assert set(row["ratio"]) == {UNSHARED}
    for name in (OURS, UNSHARED):
        assert row["sides"][name]["error"] <= 1e-5  # bound: of float32
    assert row["sides"]["flex"]["left_out"] == "It runs on CUDA only."
    assert failure([row]) is None
    assert "0.5B, parts: It runs on CUDA only." in capsys.readouterr().out


def seen(count: int) -> Tensor:
    batch = make_batch(BENCH, MODELS["0.5B"], CPU, torch.float32)
    end_T, place = batch.forest(None).end_T, torch.arange(count)
    return (place <= place[:, None]) & (place[:, None] < end_T)


def test_a_wrong_contender_has_a_reason_in_place_of_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(batch: attention.Batch) -> object:
        attend = attention._ours(batch)()
        return lambda: lambda *qkv: attend(*qkv) * 0.5

    def raising(batch: attention.Batch) -> object:
        raise RuntimeError("no such kernel")

    pair = [Contender(OURS, half), Contender("flex", raising)]  # type: ignore[arg-type]
    monkeypatch.setattr(attention, "contenders", lambda device: pair)
    (row,) = run_attention_bench(BENCH)
    assert row["device"] == "cpu"
    assert row["sides"][OURS]["left_out"].startswith("It is wrong by 5.0e-01")
    assert row["sides"]["flex"]["left_out"] == "RuntimeError: no such kernel"
    assert failure([row]) == "attention of 0.5B: It is wrong by 5.0e-01."


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
def test_the_mask_of_flex_attention_is_the_forest_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the forward is compared, because flex attention has no backward on a CPU."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    batch = make_batch(BENCH, MODELS["0.5B"], CPU, torch.float32)
    with torch.no_grad():
        assert error_of([attention._flex(batch)()(*batch.leaves)], [attention._ours(batch)()(*batch.leaves)]) <= 1e-5


def test_whole_trajectories_repeat_their_prompt() -> None:
    batch = make_batch(BENCH, MODELS["0.5B"], CPU, torch.float32)
    own = attention.whole_trajectories(batch)
    assert torch.equal(own.leaves[0][16:27], batch.leaves[0][:11])  # the second sample's prompt
    assert torch.equal(own.grad_TND[-5:], batch.grad_TND[-5:])
    ours, alone = once(attention._ours(batch)(), batch), once(attention._unshared(own)(), own)
    assert error_of(alone[:1], [ours[0][batch.paths_t()]]) <= 1e-5  # bound: of float32
    dq = torch.zeros_like(batch.grad_TND).index_add_(0, batch.paths_t(), alone[1])
    owned = torch.cat([torch.arange(start + 11, start + 26) for start in (0, 26)])
    assert error_of([dq[owned]], [ours[1][owned]]) <= 1e-5


def test_whole_trajectories_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(batch: attention.Batch) -> attention.Batch:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(attention, "whole_trajectories", full)
    (row,) = run_attention_bench(BENCH)
    assert row["sides"][UNSHARED]["left_out"] == "OutOfMemoryError: none left"
    assert row["sides"][OURS]["left_out"] is None
