"""Test `thresher bench decode` on a tiny model: full batches, the given contexts, and consistent figures."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import make_config

from thresher.bench import decode, roofline
from thresher.bench.decode import DecodeBench, random_policy, run_decode_bench
from thresher.common.errors import UserError
from thresher.engine.decoding import decoder_cuda
from thresher.engine.decoding.decoder import DecodeClock, Decoder
from thresher.engine.decoding.decoder_cuda import BucketStep
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.decoding.scheduler import TokenSequence
from thresher.engine.planning.time import CHIPS, DecodeShape
from thresher.kernels.attention import paged_cuda
from thresher.policy.config import DeltaShape


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    monkeypatch.setattr(roofline, "MODELS", {"tiny": config.replace(vocab_size=600, eos_token_ids=())})


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


class LaunchesAhead:
    """A decoder whose device takes `STEP_S` for a step: `step` launches one and waits for the previous one."""

    STEP_S, HOST_S = 0.02, 0.0005

    def __init__(self) -> None:
        self.now = self.idle_at = 0.0
        self.clock = DecodeClock()

    def step(self) -> None:
        self.now += self.HOST_S
        self.clock.host += self.HOST_S
        previous, self.idle_at = self.idle_at, max(self.idle_at, self.now) + self.STEP_S
        self.now = max(self.now, previous)

    def wait(self, device: torch.device) -> None:
        self.now = max(self.now, self.idle_at)


@pytest.mark.parametrize("steps", [2, 32])
def test_steps_that_are_launched_ahead_are_timed_whole(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """As many calls as steps: a call that launches without a step to wait for would make the mean too small."""
    stub = LaunchesAhead()
    monkeypatch.setattr(decode, "_filled", lambda *arguments: (stub, "stub"))
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: stub.now))
    monkeypatch.setattr(decode, "wait", stub.wait, raising=False)
    policy = random_policy(roofline.MODELS["tiny"], torch.device("cpu"), torch.float32)
    found = decode.measure(policy, DecodeShape(batch=16), steps)
    assert found["mean_step_s"] == pytest.approx(stub.STEP_S, rel=0.005)
    assert found["step_s"]["p50"] == pytest.approx(stub.STEP_S, rel=0.005)
    assert found["tokens_per_s"] == pytest.approx(16 / stub.STEP_S, rel=0.005)
    assert found["host_s"] == pytest.approx(stub.HOST_S)


def prefilled(decoder: Decoder, room: int) -> None:
    """Compute the contexts of the waiting sequences, instead of `_fill_contexts`."""
    waiting, decoder.scheduler.waiting = decoder.scheduler.waiting, []
    for sequence in waiting:
        fresh = TokenSequence(sequence.prompt, sequence.seed, sequence.draw, sequence.ids[:-1])
        sequence.prompt.waiting -= 1
        decoder.begin_turn(fresh, (), 1)
    done: list[TokenSequence] = []
    while len(done) < len(waiting):
        done += decoder.step()
    for sequence in done:
        decoder.begin_turn(sequence, (), room)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("own, shared", [(10, 128), (9, 200), (70, 64)])
@pytest.mark.parametrize("kind", [0, 1])
def test_steps_are_those_behind_computed_contexts(
    monkeypatch: pytest.MonkeyPatch, own: int, shared: int, kind: int
) -> None:
    """The same rows read the same numbers of keys, in the same groups."""
    monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)
    monkeypatch.setattr(decode, "resolve_attention", lambda *arguments: "triton")
    # On a CPU, shared reads of a group's keys would never pay, so this makes them pay for every group.
    monkeypatch.setattr(decoder_cuda, "prefix_pays", lambda length, members: members > 1)
    policy = random_policy(roofline.MODELS["tiny"], torch.device("cpu"), torch.float32)
    shape = DecodeBench(models=["tiny"], batch=16, own=own, shared=shared).shapes()[kind]
    steps: list[list[Any]] = []
    plain = BucketStep.load

    def load(self: BucketStep, slot_N: Any, start_N: Any, table_NP: Any, prefix: Any, *drafts: Any) -> None:
        pairs = zip(table_NP, start_N, strict=True)
        numbers = [len(np.unique(table[: start // decode.PAGE + 1])) for table, start in pairs]
        in_common = len(np.unique(table_NP[:, : shared // decode.PAGE]))
        groups = prefix and [sorted(prefix.length_G), sorted(prefix.first_N), sorted((prefix.members_GM >= 0).sum(1))]
        steps.append([self.size, sorted(start_N), sorted(numbers), in_common, groups])
        plain(self, slot_N, start_N, table_NP, prefix, *drafts)

    monkeypatch.setattr(BucketStep, "load", load)
    decoder, _ = decode._filled(policy, shape, 8)
    assert decoder.clock.forwards == 0
    for _ in range(6):
        decoder.step()
        assert len(decoder.scheduler.running) == 16
    assert decoder.clock.sampled_tokens == 5 * 16, "the last step is not read yet"
    filled = steps[:6]
    assert filled[0][1] == [shape.context] * 16
    assert (filled[0][4] is not None) == (kind == 1)

    del steps[:]
    monkeypatch.setattr(decode, "_fill_contexts", lambda decoder: prefilled(decoder, 8))
    decoder, _ = decode._filled(policy, shape, 8)
    del steps[:]
    for _ in range(6):
        decoder.step()
    assert steps == filled


def test_a_shape_that_does_not_fit_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # In blocks, with one free per sequence, the first shape takes 16 x 3, the second 2 for its groups and 16 x 2.
    needed = PagedKV.bytes_needed(roofline.MODELS["tiny"], 40, decode.PAGE, 4)
    monkeypatch.setattr(decode, "free_memory", lambda device: needed / decode.KV_SHARE)
    bench = DecodeBench(
        models=["tiny"], batch=16, own=20, shared=80, steps=1, device="cpu", profile=str(tmp_path / "profile.txt")
    )
    (row,) = run_decode_bench(bench)
    assert row["shape"]["shared"] == 80
    assert "tiny, 100: left out, its keys and values take 0.0 GB, but only 0.0 GB are free for them" in (
        capsys.readouterr().out
    )
    title, first, *_ = (tmp_path / "profile.txt").read_text().splitlines()
    assert title == "2 layers, 80 shared by 8 + 20, 8 steps"
    assert " us " in first and " calls  " in first


def test_layers_with_states_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is a reduced Qwen3.5; a slot has its states wherever its context came from."""
    small = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 600, "delta": DeltaShape(1, 2, 8, 8, 4)}
    cut = roofline.config_of("Qwen3.5-0.8B").replace(**small)
    monkeypatch.setattr(roofline, "QWEN35", {"cut": cut})
    bench = DecodeBench(models=["cut"], batch=16, own=9, shared=96, steps=2, device="cpu")
    rows = run_decode_bench(bench)
    assert [row["shape"]["shared"] for row in rows] == [0, 96] and all(row["tokens_per_s"] > 0 for row in rows)
    # With the decoder for GPUs, a group holds the blocks of its shared prefix once.
    monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)
    monkeypatch.setattr(decode, "resolve_attention", lambda *arguments: "triton")
    decoder, _ = decode._filled(random_policy(cut, torch.device("cpu"), torch.float32), bench.shapes()[1], 8)
    assert len(decoder.scheduler.running) == 16
    assert len(np.unique(decoder.batch.table_BP[:16, : 96 // decode.PAGE])) == 2 * (96 // decode.PAGE)


def test_what_runs_out_of_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("..")

    monkeypatch.setattr(decode, "random_policy", full)
    assert run_decode_bench(DecodeBench(models=["tiny"], batch=8, device="cpu")) == []
    assert capsys.readouterr().out.count("left out, out of memory") == 2


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UserError, match="--batch 12: expected a multiple of 8"):
        run_decode_bench(DecodeBench(models=["tiny"], batch=12))


def test_a_budget_leaves_shapes_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_decode_bench(DecodeBench(models=["tiny"], batch=8, own=4, shared=8, steps=1, device="cpu", budget=-1)) == []
    )
    assert capsys.readouterr().out.count("the budget was used up") == 2


def test_a_share_of_bfloat16s_floor_is_bfloat16s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "this_chip", lambda device: CHIPS["H200"])
    bench = DecodeBench(models=["tiny"], batch=8, own=9, shared=0, steps=1, device="cpu")
    alone = replace(bench, dtype="bfloat16")
    monkeypatch.setattr(DecodeBench, "shapes", lambda self: (DecodeShape(batch=8, own=9),))
    (row,), (rounded,) = run_decode_bench(bench), run_decode_bench(alone)
    assert row["chip"] is row["floor_share"] is row["predicted_share"] is None
    assert rounded["chip"] == "H200" and rounded["floor_share"] > 0 and rounded["predicted_share"] > 0
