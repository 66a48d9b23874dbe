"""Test `bench delta`: a row of both sides, compared with float64; a missing peer; and a wrong result."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from thresher.bench import delta, harness
from thresher.bench.delta import DeltaBench, failure, run_delta_bench
from thresher.bench.harness import Rates, append_rows, hardware, read_rows
from thresher.common.errors import UserError

SMALL: dict[str, Any] = {"sequences": 2, "length": 70, "key_heads": 2, "value_heads": 4, "dim": 8, "rounds": 2}


def test_a_row_has_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    row = run_delta_bench(DeltaBench(peer="both", device="cpu", **SMALL), tmp_path / "rows.jsonl")
    alone, both = read_rows(tmp_path / "rows.jsonl")
    assert both == row and alone["sides"].keys() == {"ours"} and failure(row) is None
    assert row["sides"].keys() == {"ours", "transformers"} and row["failed"].keys() == {"fla"}
    for side in row["sides"].values():
        assert len(side["errors"]) == 7 and side["error"] < 1e-5
        assert side["forward_ms"]["p50"] > 0 and side["step_ms"]["p50"] > 0 and side["extra_mib"] > 0
    assert row["sides"]["ours"]["step_ratio"] == {"p20": 1, "p50": 1, "p80": 1}
    assert row["floor_ms"]["step"] == pytest.approx(3 * row["floor_ms"]["forward"])
    assert "fla is left out" in capsys.readouterr().out


def test_what_is_wrong_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    right = delta.gated_delta
    monkeypatch.setattr(delta, "gated_delta", lambda *given, **more: tuple(1.01 * x for x in right(*given, **more)))
    row = run_delta_bench(DeltaBench(peer="none", device="cpu", **SMALL))
    assert row["sides"]["ours"]["error"] == pytest.approx(0.01, rel=1e-3)
    assert "from float64, expected at most 0.0001" in (failure(row) or "")


def test_a_peer_that_fails_gets_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> Any:
        raise RuntimeError("no backward with this compiler")

    monkeypatch.setattr(delta, "_peer", lambda *given: failing)
    row = run_delta_bench(DeltaBench(peer="fla", device="cpu", **SMALL))
    assert row["sides"].keys() == {"ours"}
    assert row["failed"] == {"fla": "RuntimeError: no backward with this compiler"}


def test_key_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="--value-heads 3: expected a multiple of --key-heads, 2"):
        run_delta_bench(DeltaBench(peer="none", device="cpu", key_heads=2, value_heads=3))


@pytest.mark.parametrize("key_heads, repeats", [(4, 0), (2, 2)])
def test_the_peer_repeats_keys_only_where_it_must(
    key_heads: int, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    counted, right = [], torch.Tensor.repeat_interleave
    monkeypatch.setattr(
        torch.Tensor, "repeat_interleave", lambda x, *given, **more: (counted.append(x), right(x, *given, **more))[1]
    )
    bench = DeltaBench(device="cpu", **(SMALL | {"key_heads": key_heads}))
    tensors, _ = delta._drawn(bench, torch.device("cpu"), torch.float32)
    delta._peer("transformers", bench, torch.device("cpu"))(tensors)
    assert len(counted) == repeats


def test_the_floor_is_at_the_rate_of_the_rules_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def rates(device: torch.device, dtype: torch.dtype) -> Rates:
        asked.append(dtype)
        return Rates(1.0, 1e9)

    monkeypatch.setattr(delta, "measure_rates", rates)
    row = run_delta_bench(DeltaBench(peer="none", device="cpu", dtype="bfloat16", **SMALL))
    assert asked == [torch.bfloat16]
    assert row["floor_ms"]["forward"] == pytest.approx(1e3 * 140 * delta.delta_flops_of(4, 8, 8) / 1e9)


def test_rates_are_those_of_a_matmul_in_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    right = torch.mm

    def mm(left: torch.Tensor, right_: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        seen.update((left.dtype, right_.dtype, out.dtype))
        return right(left, right_, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(harness, "MATMUL", {"cpu": 16})
    monkeypatch.setattr(harness, "COPIED_BYTES", 2**12)
    assert harness.measure_rates(torch.device("cpu"), torch.bfloat16).flops_per_s > 0 and seen == {torch.bfloat16}


def test_rows_are_json(tmp_path: Path) -> None:
    append_rows(tmp_path / "rows.jsonl", {"error": math.nan, "ms": [math.inf, 1.0]})
    assert (tmp_path / "rows.jsonl").read_text() == '{"error": null, "ms": [null, 1.0]}\n'


def test_the_gpu_is_named_for_its_own_rows_alone() -> None:
    row = {"gpu": "NVIDIA H200", "machine": "2 x EPYC"}
    assert [hardware(row | {"device": name}) for name in ("cuda", "cpu")] == ["NVIDIA H200", "2 x EPYC"]
    assert hardware(row) == "NVIDIA H200", "older rows have no device"
    assert hardware(row | {"gpu": None}) == "2 x EPYC"
