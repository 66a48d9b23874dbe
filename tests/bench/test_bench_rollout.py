"""Test `thresher bench rollout` at tiny sizes: both sides do equal work, a wrong log-prob stops it, a peer may fail."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from thresher.bench import rollout as run_module
from thresher.bench import rollout_sides as sides
from thresher.bench.rollout import (
    LARGEST_GAP,
    PEERS,
    RolloutBench,
    Rounds,
    bytes_moved,
    operations,
    prove,
    run_rollout_bench,
    stretches,
    take_turns,
)
from thresher.bench.rollout_sides import GeneratorSide, HuggingFace, HuggingFaceSide, RolloutSide, Work, play
from thresher.bench.settings import ROLLOUT_SHAPES, RolloutSetting, RolloutShape, Sizes, make_rollout_setting
from thresher.cli.commands import bench as command
from thresher.cli.main import run
from thresher.common.errors import UserError

SIZES = Sizes(num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=320)
LENGTHS = {
    "demo": {"group": 3, "question": 18, "turns": (5,)},
    "rag": {"group": 2, "question": 12, "passages": 25, "turns": (6,)},
    "search": {"group": 2, "question": 20, "turns": (4, 3, 5), "appended": 19},
    "branches": {"group": 2, "question": 17, "passages": 21, "turns": (7, 6, 3), "branches": True},
}
TINY = {name: RolloutShape(name=name, sizes=SIZES, questions=2, **lengths) for name, lengths in LENGTHS.items()}
NAMES = list(TINY)


@pytest.fixture(scope="module")
def settings() -> dict[str, RolloutSetting]:
    return {name: make_rollout_setting(shape) for name, shape in TINY.items()}


@pytest.fixture(scope="module")
def theirs(settings: dict[str, RolloutSetting]) -> HuggingFace:
    return HuggingFace(settings["rag"])  # all tiny shapes have one model


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in TINY.items():
        monkeypatch.setitem(ROLLOUT_SHAPES, name, (shape,))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast_cases(1)
def test_texts_have_the_lengths_of_the_shape(settings: dict[str, RolloutSetting], name: str) -> None:
    setting, shape = settings[name], TINY[name]
    assert setting.tokenizer.vocab_size == setting.policy.config.vocab_size == SIZES.vocab_size
    assert not setting.policy.config.eos_token_ids
    assert [len(ids) for ids in setting.question_ids()] == [shape.question] * shape.questions
    assert [len(ids) for ids in setting.prompts()] == [shape.prompt] * shape.questions
    assert len({tuple(ids) for ids in setting.prompts()}) == shape.questions
    shown = [len(setting.tokenizer.encode(text)) for texts in setting.appended for text in texts]
    assert shown == [shape.appended] * (len(shape.turns) - 1) * shape.questions


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_asks_for_what_the_shape_counts(settings: dict[str, RolloutSetting], name: str) -> None:
    shape, asked, sampled = TINY[name], [], 0

    def ask(contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
        nonlocal sampled
        asked.append(copies * sum(map(len, contexts)))
        sampled += len(contexts) * copies * tokens
        return [[9] * tokens for _ in contexts for _ in range(copies)]

    play(settings[name], ask)
    assert asked == [shape.samples * length for length in shape.contexts] and sum(asked) == shape.asked
    assert sampled == shape.tokens


def test_a_sample_of_another_length_is_refused(settings: dict[str, RolloutSetting]) -> None:
    with pytest.raises(RuntimeError, match=r"expected 4 samples of 6 tokens, got 4 of \[5\]"):
        play(settings["rag"], lambda contexts, copies, tokens: [[9] * (tokens - 1)] * copies * len(contexts))
    side = RolloutSide(settings["search"])
    side.rollout.limits = replace(side.rollout.limits, max_turn_tokens=4)
    with pytest.raises(RuntimeError, match="a sample's lengths are"):
        side.run()


@pytest.mark.parametrize("name", NAMES)
def test_the_rollout_writes_the_shape_and_agrees_with_both_models(
    settings: dict[str, RolloutSetting], theirs: HuggingFace, name: str
) -> None:
    setting, shape = settings[name], TINY[name]
    side = RolloutSide(setting)
    work, second = side.run(), side.run()
    assert {tuple(one.ids) for one in work.written}.isdisjoint(tuple(one.ids) for one in second.written)
    assert sum(len(one.positions) for one in work.written) == shape.tokens
    lengths = sorted({len(one.ids) for one in work.written})
    assert lengths == sorted({shape.longest, *(n + shape.turns[-1] for n in shape.contexts[2:] if shape.branches)})
    assert work.forwards and work.prefilled and 0 < work.prefilled <= shape.asked
    gaps = prove(setting, work.written, theirs.logits)
    assert gaps.keys() == {"recomputed", "peer"} and 0 < max(gaps.values()) <= LARGEST_GAP
    # the tokens to compute: for every question each prefix that is continued, once
    prefixes = {
        (tuple(one.ids[: shape.question]), tuple(one.ids[:end]))
        for one in work.written
        for end in range(1, len(one.ids))
    }
    assert sum(stretch.tokens * stretch.copies for stretch in stretches(shape)) == len(prefixes)


def test_nothing_is_timed_that_is_wrong(settings: dict[str, RolloutSetting], theirs: HuggingFace) -> None:
    setting = settings["rag"]
    work = RolloutSide(setting).run()
    with pytest.raises(RuntimeError, match="wrong results are not timed"):
        prove(setting, work.written, lambda ids: theirs.logits(ids) * 1.01)
    work.written[0].logprobs[1] -= 2 * LARGEST_GAP
    with pytest.raises(RuntimeError, match="wrong results are not timed"):
        prove(setting, work.written)


@pytest.mark.parametrize("call", ["generate", "generate_batch"])
@pytest.mark.parametrize("copies", [1, 2])
def test_each_of_their_calls_continues_each_context(
    settings: dict[str, RolloutSetting], theirs: HuggingFace, monkeypatch: pytest.MonkeyPatch, call: str, copies: int
) -> None:
    """Greedy samples are compared with our own model, which checks padding, mask and the order of the answers."""
    setting, sampling = settings["rag"], sides._sampling

    def greedy(tokens: int, **more: int) -> Any:
        config = sampling(tokens, **more)
        config.do_sample = False
        return config

    monkeypatch.setattr(sides, "_sampling", greedy)
    contexts = [setting.prompts()[0], setting.prompts()[1][5:], setting.prompts()[0][9:]]
    wanted = []
    for context in contexts:
        ids = list(context)
        for _ in range(4):
            ids.append(int(setting.policy.logits(torch.tensor(ids))[-1].argmax()))
        wanted += [ids[len(context) :]] * copies
    if (call, copies) == ("generate_batch", 2):
        pytest.skip("transformers refuses several greedy samples of one prompt")
    assert getattr(theirs, call)(contexts, copies, 4) == wanted


@pytest.mark.parametrize("call", ["generate", "generate_batch"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast_cases(1)
def test_their_sides_play_every_shape(
    settings: dict[str, RolloutSetting], theirs: HuggingFace, name: str, call: str
) -> None:
    shape = TINY[name]
    side = HuggingFaceSide(settings[name], theirs, call)
    work = side.run()  # `play` checks the lengths
    assert work.prefilled is not None and work.forwards is not None
    if call == "generate":
        assert work.prefilled == shape.asked  # contexts are resubmitted, once per sample
        side.samples_a_call = shape.group
        assert side.run().forwards == work.forwards * shape.questions
    else:
        assert shape.samples < work.prefilled < shape.asked  # a group's prompt is computed once


def test_the_number_of_samples_a_call_is_what_takes_the_least(
    settings: dict[str, RolloutSetting], theirs: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(settings["demo"], shape=replace(TINY["demo"], questions=8))
    side = HuggingFaceSide(setting, theirs, "generate")
    seconds = {3: 5.0, 6: 4.0, 12: 4.5}
    monkeypatch.setattr(side, "_cpu_seconds", lambda: seconds[side.samples_a_call])
    side.settle(float("inf"))
    assert side.samples_a_call == 6
    side.settle(0.0)  # no time to try more
    assert side.samples_a_call == 3


@pytest.mark.parametrize("name", ["demo", "rag", "branches"])
def test_the_generator_plays_a_shape(settings: dict[str, RolloutSetting], name: str) -> None:
    setting, shape = settings[name], TINY[name]
    side = GeneratorSide(setting)
    work = side.run()
    assert sum(len(one.positions) for one in work.written) == shape.tokens
    assert prove(setting, work.written)["recomputed"] <= LARGEST_GAP
    assert work.prefilled is not None and 0 < work.prefilled <= shape.asked
    assert work.forwards and work.host_share is not None and 0 < work.host_share < 1  # bound: a share
    assert 0 <= work.accepted <= work.drafted
    again = side.run()
    assert {tuple(one.ids) for one in again.written}.isdisjoint(tuple(one.ids) for one in work.written)


def test_the_generator_plays_single_turns_and_the_rollout_episodes(settings: dict[str, RolloutSetting]) -> None:
    made = {name: sides.make_ours(setting).name for name, setting in settings.items()}
    assert made == {"demo": "generator", "rag": "generator", "search": "rollout", "branches": "rollout"}


class Side:
    def __init__(self, name: str, order: list[str], fails_at: int = -1) -> None:
        self.name, self.order, self.left = name, order, fails_at

    def run(self) -> Work:
        self.order.append(self.name)
        self.left -= 1
        if self.left == -1:
            raise ValueError("no\n more")
        return Work(prefilled=1, forwards=1)


@pytest.mark.slow
def test_sides_take_turns_and_a_peer_may_leave() -> None:
    order: list[str] = []
    found = Rounds()
    ours, good, bad = Side("ours", order), Side("good", order), Side("bad", order, fails_at=1)
    take_turns(ours, [good, bad], 3, float("inf"), found)
    assert order == ["ours", "good", "bad", "good", "bad", "ours", "ours", "good"]
    assert len(found.ours) == len(found.peers["good"]) == 3
    assert found.failures == {"bad": "ValueError: no more"} and "bad" not in found.peers
    found = Rounds()
    take_turns(Side("ours", order), [], 3, 0.0, found)  # without time there is still one round
    assert len(found.ours) == 1


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


@pytest.mark.slow
def test_every_shape_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer fails in all shapes but one; the rows of the other, and our figures next to the failure, are present."""

    def broken(self: HuggingFace, contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
        if tokens == 5:
            raise NotImplementedError("not on this machine")
        return self.generate(contexts, copies, tokens)

    monkeypatch.setattr(HuggingFace, "generate_batch", broken)
    out, picture, threads = tmp_path / "new" / "rows.jsonl", tmp_path / "rows.png", torch.get_num_threads()
    words = ["--rounds", "2", "--threads", "1", "--out", str(out), "--plot", str(picture)]
    assert run(["bench", "rollout", "--shape", "rag", "demo", *words]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG" and torch.get_num_threads() == threads
    alone, first, second, ours, third, failed = rows_of(out)
    assert alone["peer"] is ours["peer"] is None and alone["ours_s"]["p50"] > 0, "written before the peers run"
    assert [(row["shape"], row["peer"]) for row in (first, second, third, failed)] == [
        (shape, peer) for shape in ("rag", "demo") for peer in PEERS["both"]
    ]
    assert failed["peer_failure"] == "NotImplementedError: not on this machine"
    assert failed["ratio"] is failed["ratio_rollout"] is None and failed["peer_tokens_per_s"] is None
    assert failed["ours_tokens_per_s"] == third["ours_tokens_per_s"]
    assert first.keys() == failed.keys() and first["peer_failure"] is None
    assert first["tokens"] == 6 and first["threads"] == 1 and first["rounds"] == 2 and first["ours"] == "generator"
    assert first["prefill_tokens"] == {"asked": 4 * 37, "ours": 2 * 37, "peer": 4 * 37}
    assert first["tokens_a_forward"] == {"ours": 4.0, "peer": 24 / (6 * 4 / first["peer_samples_a_call"])}
    seconds = first["peer_s"]["p50"]
    assert first["floor_share"]["peer"] == pytest.approx(first["floor"]["seconds"] / seconds) and seconds > 0
    assert 0 < first["host_share"]["p50"] < 1 and first["logprob_gap"]["peer"] <= LARGEST_GAP
    for name in ("ratio", "cpu_ratio", "ours_tokens_per_s", "peer_tokens_per_s", "ours_s", "ours_cpu_s", "peer_cpu_s"):
        assert 0 < first[name]["p20"] <= first[name]["p50"] <= first[name]["p80"], name


@pytest.mark.slow
def test_ours_alone_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "find_spec", lambda name: None)
    (row,) = run_rollout_bench(RolloutBench(shapes=("search",), peer="none", rounds=1), tmp_path / "rows.jsonl")
    assert row["peer"] is None and row["logprob_gap"].keys() == {"recomputed"} and row["ours_s"]["p50"] > 0
    with pytest.raises(UserError, match="transformers is not installed"):
        run_rollout_bench(RolloutBench(shapes=("search",), peer="hf"))


def test_a_file_that_cannot_be_written_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(get_args(command.RolloutShape)) == set(ROLLOUT_SHAPES) == {*TINY, "tail"}
    assert run(["bench", "rollout", "--shape", "demo", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"thresher: --out {tmp_path}: cannot be written") and said.count("\n") == 1


def test_the_floor_counts_by_hand() -> None:
    """One layer, no shared samples: three tokens are computed at positions 0, 1, 2, and two are sampled."""
    sizes = replace(SIZES, num_hidden_layers=1)
    shape = RolloutShape(name="one", sizes=sizes, questions=1, group=1, question=2, turns=(2,))
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k and v, o, MLP
    assert operations(shape) == 2 * layer * 3 + 4 * 32 * (1 + 2 + 3) + 2 * 32 * 320 * 2
    kv = 4 * 2 * 16
    assert bytes_moved(shape) == 4 * (layer + 32 * 320) * 2 + kv * 3 + kv * 3  # written, and read by the third
    two = replace(shape, group=2)  # own keys and values twice, the prompt's two positions once
    assert bytes_moved(two) == 4 * (layer + 32 * 320) * 2 + kv * (2 + 2) + kv * (2 * 1 + 2)
