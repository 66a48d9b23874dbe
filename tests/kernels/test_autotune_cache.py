"""Tests of measured tilings: the fastest is stored and found again for the same GPU, shape and compiler only."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thresher.kernels import autotune_cache as winners
from thresher.kernels.autotune_cache import candidates, read_winners, record, tiling_for, wants_measuring, winners_path
from thresher.kernels.head_tiling import BFLOAT16, HOPPER, Tiling, choose_tiling

ROOT = Path(__file__).resolve().parents[2]
GPU = "NVIDIA H100 80GB HBM3"
OTHER = Tiling(rows=128, columns=64, width=32, num_warps=4, num_stages=4)


def fake_head(V: int, H: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the attributes that autotune_cache.py reads, for a head on a GPU that is not present."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(V, H), device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(winners.FOLDER, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(winners, "_measured", {})
    for cached in (winners.capability, read_winners):
        cached.cache_clear()
    yield
    for cached in (winners.capability, read_winners):
        cached.cache_clear()


def test_winners_are_stored_among_the_results_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(winners.FOLDER, raising=False)
    assert winners_path("NVIDIA A100") == ROOT / "bench" / "results" / "tiling-nvidia-a100.json"


def test_the_fastest_is_stored_and_found_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    head, other = fake_head(151_665, 1536), fake_head(151_665, 2048)
    assert tiling_for(head) == choose_tiling(head) == HOPPER
    times = {HOPPER: 3.0, BFLOAT16: 2.0, OTHER: math.inf}
    path = record(head, 1664, times)
    assert path.name == "tiling-nvidia-h100-80gb-hbm3.json" and tiling_for(head) == BFLOAT16
    (row,) = json.loads(path.read_text())
    names = ("gpu", "dtype", "vocab", "hidden", "rows", "milliseconds")
    assert [row[name] for name in names] == [GPU, "bfloat16", 151_665, 1536, 1664, 2.0]
    monkeypatch.setattr(winners, "_measured", {})
    assert tiling_for(head) == BFLOAT16 and tiling_for(other) == HOPPER
    record(other, 1664, times | {OTHER: 1.0})
    record(head, 1664, times | {HOPPER: 1.0})  # replaces the earlier one
    assert len(json.loads(path.read_text())) == 2
    monkeypatch.setattr(winners, "_measured", {})
    assert tiling_for(head) == HOPPER and tiling_for(other) == OTHER
    monkeypatch.setattr(winners, "_triton_version", lambda: "another")
    assert tiling_for(other) == HOPPER
    assert tiling_for(fake_head(151_665, 2048, torch.float32)).rows == 64


def test_processes_that_measure_at_the_same_time_lose_nothing() -> None:
    def measure(vocabulary: int) -> None:
        record(fake_head(vocabulary, 64), 128, {BFLOAT16: 1.0})

    with ThreadPoolExecutor(4) as pool:  # a lock of a file holds between threads, too
        list(pool.map(measure, range(100, 140)))
    stored = json.loads(winners_path(GPU).read_text())
    assert sorted(row["vocab"] for row in stored) == list(range(100, 140))


def test_a_file_that_is_something_else_is_named(tmp_path: Path) -> None:
    head = fake_head(151_665, 1536)
    path = winners_path(GPU)
    assert path.parent == tmp_path
    for text in ("{", "[1]", '[{"gpu": "x"}]', '{"gpu": 1}'):
        path.write_text(text)
        read_winners.cache_clear()
        with pytest.raises(ValueError, match="is not a list of tilings"):
            tiling_for(head)


def test_only_what_was_asked_for_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    head = fake_head(151_665, 1536)
    assert not wants_measuring(head)
    monkeypatch.setenv(winners.AUTOTUNE, "1")
    assert wants_measuring(head) and not wants_measuring(fake_head(151_665, 1536, torch.float32))
    assert not wants_measuring(torch.zeros(4, 4, dtype=torch.bfloat16))
    record(head, 128, {BFLOAT16: 1.0})
    assert not wants_measuring(head) and wants_measuring(fake_head(151_665, 896))


def test_a_tiling_of_the_persistent_kernel_of_earlier_versions_is_left_out() -> None:
    head = fake_head(151_665, 1536)
    path = record(head, 1664, {OTHER: 1.0})
    for persistent, expected in ((False, OTHER), (True, HOPPER)):
        (row,) = json.loads(path.read_text())
        path.write_text(json.dumps([row | {"tiling": row["tiling"] | {"persistent": persistent}}]))
        winners._measured.clear()
        read_winners.cache_clear()
        assert tiling_for(head) == expected


def test_candidates_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = replace(BFLOAT16, maxnreg=128)
    assert capped not in candidates(fake_head(151_665, 1536))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    winners.capability.cache_clear()
    assert capped in candidates(fake_head(151_665, 1536))


def test_measuring_times_every_candidate_with_the_calls_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    from thresher.kernels import head_triton as backend
    from thresher.kernels import logprob

    seen: list[tuple[int, Tiling]] = []

    def time(_: Any, rows: int, tiling: Tiling) -> float:
        seen.append((rows, tiling))
        return 1.0 if tiling == BFLOAT16 else 5.0

    monkeypatch.setattr(backend, "_time", time)
    monkeypatch.setenv(winners.AUTOTUNE, "1")
    head = fake_head(151_665, 1536)
    head.element_size = lambda: 2
    rows = logprob.chunk_size(None, 560 * 2**20, "triton", head, 8192)
    assert seen == [(1664, tiling) for tiling in candidates(head)]
    assert tiling_for(head) == BFLOAT16 and rows == 1664
    assert capsys.readouterr().out.count(" ms ") == len(seen)
    logprob.chunk_size(None, 560 * 2**20, "triton", head, 8192)
    assert len(seen) == len(candidates(head))  # once per shape


def test_a_folder_that_cannot_be_written_costs_the_file_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from thresher.kernels import head_triton as backend

    (tmp_path / "file").write_text("")
    monkeypatch.setenv(winners.FOLDER, str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(backend, "_time", lambda _, rows, tiling: 1.0 + (tiling != BFLOAT16))
    head = fake_head(151_665, 1536)
    backend.measure_tilings(head, 128)
    assert "for this process only" in capsys.readouterr().out and tiling_for(head) == BFLOAT16
