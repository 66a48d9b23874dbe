"""`thresher bench decode` on a tiny model: whole batches, contexts as said, figures that fit each other."""

import json
from pathlib import Path

import pytest
import torch
from model_cases import make_config

from thresher.bench import decode
from thresher.bench.decode import DecodeBench, random_policy, run_decode_bench
from thresher.common.errors import UserError


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    monkeypatch.setattr(decode, "MODELS", {"tiny": config.replace(vocab_size=600, eos_token_ids=())})


def test_every_step_has_the_whole_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    bench = DecodeBench(models=["tiny"], batch=16, own=9, shared=70, steps=3, device="cpu")
    rows = run_decode_bench(bench, out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    alone, shared = rows
    assert alone["shape"] == {"batch": 16, "group": 1, "shared": 0, "own": 79}
    assert shared["shape"] == {"batch": 16, "group": 8, "shared": 70, "own": 9}
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(16 / row["mean_step_s"])
        assert 0 < row["host_s"] < row["mean_step_s"]  # bound: it is a part
        assert row["floor_share"] is None
    assert capsys.readouterr().out.startswith("decode steps")


def test_a_groups_prompt_is_prefilled_once() -> None:
    policy = random_policy(decode.MODELS["tiny"], torch.device("cpu"), torch.float32)
    (alone, shared) = DecodeBench(models=["tiny"], batch=16, own=10, shared=128).shapes()
    decoder, _ = decode._filled(policy, alone, 8)
    assert decoder.clock.prefilled_tokens == 16 * 138
    decoder, _ = decode._filled(policy, shared, 8)
    assert decoder.clock.prefilled_tokens == 2 * 128 + 16 * 10
    decoder.step()
    assert len(decoder.scheduler.running) == len(decoder.new_ids()) == 16


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UserError, match="--batch 12: expected a multiple of 8"):
        run_decode_bench(DecodeBench(models=["tiny"], batch=12))


def test_a_budget_leaves_shapes_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_decode_bench(DecodeBench(models=["tiny"], batch=8, own=4, shared=8, steps=1, device="cpu", budget=-1)) == []
    )
    assert capsys.readouterr().out.count("the budget was used up") == 2
