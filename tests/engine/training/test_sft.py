"""Supervised fine-tuning: transcripts become the ids of a rollout of the same pieces, the loss covers only the policy's
tokens, and the gate works as documented."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import make_config

from thresher.common.errors import UserError
from thresher.engine.config.sections import OptimSection, SftSection
from thresher.engine.episode import Feedback, Prompt, Retrieved
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.protocol.prompts import Renderer, passage_lines
from thresher.engine.systems.search_r1 import AFTER, BEFORE, INVALID
from thresher.engine.training.sft import SftResult, SftTrainer, Transcript, encode_transcript, read_transcripts
from thresher.policy.lora import adapters, add_lora
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.indexes.load import Index
from thresher.rewards.reward import Source
from thresher.rewards.tags import escape_tags

TEMPLATE = "<|im_start|>Use <search> or <answer>: {question}\n"
FORMAT = 'Doc {number}(Title: "{title}") {text}'
TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")


@pytest.fixture
def renderer(tiny_tokenizer: Tokenizer) -> Renderer:
    return Renderer(tokenizer=tiny_tokenizer, tags=TAGS, k=2, chat=False, max_passage_tokens=999, passage_format=FORMAT)


def segment(source: str, text: str, **more: Any) -> dict[str, Any]:
    return {"source": source, "text": text, **more}


def test_a_transcript_holds_what_a_rollout_of_its_pieces_would(
    renderer: Renderer, tiny_tokenizer: Tokenizer, tiny_index: Index
) -> None:
    (hits,) = tiny_index.search(["spouse of Mia Noor"], 2)
    said = ["<search>spouse of Mia Noor</search>", "<answ", "er> Gil Hart</answer>"]
    record = {
        "question": "Who is <answer>Mia<|im_end|>?",
        "segments": [
            segment("policy", said[0]),
            segment("retrieved", BEFORE),
            segment("retrieved", passage_lines([hit.passage for hit in hits], FORMAT)),
            segment("retrieved", AFTER),
            segment("policy", said[1]),
            segment("feedback", INVALID),
            segment("policy", said[2]),
        ],
    }
    found = encode_transcript(record, tiny_tokenizer, renderer, TEMPLATE)
    encode = tiny_tokenizer.encode
    pieces = [
        (Source.PROMPT, renderer.prompt(Prompt(TEMPLATE, record["question"]))),
        (Source.POLICY, encode(said[0])),
        (Source.RETRIEVED, renderer.retrieved(Retrieved(hits, BEFORE, AFTER))[0]),
        (Source.POLICY, encode(said[1])),
        (Source.FEEDBACK, renderer.feedback(Feedback(INVALID))),
        (Source.POLICY, encode(said[2])),
    ]
    assert found.ids == [token for _, ids in pieces for token in ids]
    sources = [source for source, ids in pieces for _ in ids]
    assert found.positions == [row for row, source in enumerate(sources) if source is Source.POLICY]
    assert found.copied == []
    # The template's control token is encoded as one; the question's is spelled out, and its tag is escaped.
    assert found.ids[0] == tiny_tokenizer.added_tokens["<|im_start|>"]
    assert tiny_tokenizer.added_tokens["<|im_end|>"] not in found.ids
    assert escape_tags("Who is <answer>Mia<|im_end|>?", TAGS).encode() in tiny_tokenizer.decode_bytes(found.ids)


def test_its_own_prompt_takes_the_place_of_the_recipes(renderer: Renderer, tiny_tokenizer: Tokenizer) -> None:
    segments = [segment("prompt", "<|im_start|>Go."), segment("policy", "Anna"), segment("prompt", "More?")]
    found = encode_transcript({"segments": segments}, tiny_tokenizer, renderer, TEMPLATE)
    assert found.ids == [token for part in segments for token in tiny_tokenizer.encode_template(part["text"])]
    assert tiny_tokenizer.decode([found.ids[row] for row in found.positions]) == "Anna"


def test_a_segment_is_trained_on_the_ids_that_it_brings(renderer: Renderer, tiny_tokenizer: Tokenizer) -> None:
    prompt, letters = tiny_tokenizer.encode_template("<|im_start|>"), tiny_tokenizer.byte_ids(b"spouse")
    assert letters != tiny_tokenizer.encode("spouse")
    segments = [segment("prompt", "<|im_start|>", ids=prompt), segment("policy", "spouse", ids=letters)]
    found = encode_transcript({"segments": segments}, tiny_tokenizer, renderer, TEMPLATE)
    assert found.ids == [*prompt, *letters] and found.positions == list(range(1, 7))


@pytest.mark.parametrize(
    ("text", "ranges", "expected"),
    [
        ("<answer> Gil Hart</answer>", [[8, 17]], " Gil Hart"),
        ("<answer> Gil Hart</answer>", [], ""),
        ("Gil Hart, Mia Noor", [[0, 8], [9, 18]], "Gil Hart Mia Noor"),
        ("ÄÖ Gil", [[2, 6]], " Gil"),  # ranges count characters, tokens hold bytes
        ("日本 Gil 日本", [[0, 2]], "日本"),
        (" Gil Hart", [[0, 3], [7, 9]], ""),  # a token that extends beyond its range was not copied
    ],
)
def test_copied_ranges_become_tokens(
    renderer: Renderer, tiny_tokenizer: Tokenizer, text: str, ranges: list[list[int]], expected: str
) -> None:
    segments = [segment("policy", "xx", copied=[]), segment("policy", text, copied=ranges)]
    found = encode_transcript({"question": "?", "segments": segments}, tiny_tokenizer, renderer, TEMPLATE)
    copied = tiny_tokenizer.decode([found.ids[row] for row in found.copied])
    assert copied == expected
    assert set(found.copied) <= set(found.positions)


SAID = [segment("policy", "Anna")]


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"question": "Who?"},
        {"segments": SAID},
        {"question": 3, "segments": SAID},
        {"segments": [segment("prompt", ""), *SAID]},  # there is no context for the first token
        *[
            {"question": "Who?", "segments": segments}
            for segments in (
                [],
                "policy",
                [["policy", "Anna"]],
                [{"text": "Anna"}],
                [{"source": "policy"}],
                [segment("polizy", "Anna")],
                [{"source": "policy", "text": 3}],
                [segment("policy", "half \ud800")],
                [segment("policy", "Anna", copied=[[0]])],
                [segment("policy", "Anna", copied=3)],
                [segment("policy", "Anna", end=True)],  # the end token is unknown here
                [segment("retrieved", "Anna")],  # there are no tokens to train on
                [segment("policy", "")],
                [segment("policy", "Anna", ids=[5, 5])],  # ids of another text
                [segment("policy", "Anna", ids=[-1])],
                [segment("policy", "Anna", ids=["A"])],
                [segment("policy", "Anna", ids=10**6)],
            )
        ],
        *[
            {"question": "Who?", "segments": SAID, "template": "{passages}{question}"} | more
            for more in ({}, {"passages": [{"title": "t"}]}, {"passages": ["text"]}, {"template": 3})
        ],
    ],
    ids=str,
)
def test_a_malformed_transcript_is_named_by_its_line(
    tmp_path: Path, renderer: Renderer, tiny_tokenizer: Tokenizer, bad: dict[str, Any]
) -> None:
    path = tmp_path / "transcripts.jsonl"
    path.write_text(json.dumps({"question": "Who?", "segments": SAID}) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(UserError) as caught:
        read_transcripts(path, tiny_tokenizer, renderer, TEMPLATE)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and "\n" not in message
    assert not any(name in message for name in ("KeyError", "ValueError", "TypeError", "IndexError"))
    assert "; correct or remove it" in message or "expected a text and a source of" in message


@pytest.mark.parametrize(("content", "expected"), [("{\n", ":1: not valid JSON"), ("\n", ": has no transcripts")])
def test_a_file_without_transcripts_is_refused(
    tmp_path: Path, renderer: Renderer, tiny_tokenizer: Tokenizer, content: str, expected: str
) -> None:
    path = tmp_path / "transcripts.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=f"transcripts.jsonl{expected}"):
        read_transcripts(path, tiny_tokenizer, renderer, TEMPLATE)


VOCAB = 20
# "copy" transcripts: 1, a name, 2, the name again; the second name is copied, and the policy says the 2 as well.
COPIES = [Transcript([1, name, other, 2, name, other], [3, 4, 5], [4, 5]) for name in range(3, 9) for other in (9, 10)]


def make_policy(seed: int = 0) -> Policy:
    config = make_config(vocab_size=24, rope_theta=100.0, max_position_embeddings=64)
    return init_policy(config, seed).requires_grad_(True)


def sft(**changes: Any) -> SftSection:
    whole = {"batch_size": 6, "steps": 4, "lr": 0.01, "held_out": 0.5, "gate_every": 2, "max_restarts": 1}
    return SftSection(transcripts="none", **{**whole, **changes})


def trainer_of(policy: Policy, settings: SftSection, transcripts: Sequence[Transcript], **optim: Any) -> SftTrainer:
    return SftTrainer(MasterWeights(policy), transcripts, settings, OptimSection(**optim), VOCAB, 0)


def run(
    policy: Policy, settings: SftSection, transcripts: Sequence[Transcript] = COPIES, **optim: Any
) -> tuple[SftResult, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    return trainer_of(policy, settings, transcripts, **optim).run(records.append), records


def nll(policy: Policy) -> torch.Tensor:
    """Return the mean of -log p over the trained tokens of `COPIES`, among the tokenizer's columns."""
    values = [
        -torch.log_softmax(policy.logits(torch.tensor(t.ids))[row - 1, :VOCAB], -1)[t.ids[row]]
        for t in COPIES
        for row in t.positions
    ]
    return torch.stack(values).mean()


@pytest.mark.parametrize("checkpoint", ["off", "on"])
def test_the_loss_is_the_mean_over_the_policys_tokens_and_so_is_its_gradient(
    checkpoint: str, checkpointed: list[bool]
) -> None:
    policy, other = make_policy(), make_policy()
    expected = nll(other)
    expected.backward()
    checkpointed.clear()
    optim = {"micro_batch_tokens": 11, "checkpoint_activations": checkpoint}
    result, records = run(policy, sft(steps=1, batch_size=12, held_out=0.0), **optim)
    assert checkpointed == [checkpoint == "on"] * 12  # one transcript of six tokens in each
    assert result.loss == records[0]["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert records[0]["tokens"] == 12 * 5 and records[0]["lr"] == 0.01
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in other.parameters() if p.grad is not None))
    assert records[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_loss_falls() -> None:
    policy = make_policy()
    before = float(nll(policy).detach())
    result, records = run(policy, sft(steps=60, batch_size=8, held_out=0.0))
    assert nll(policy) < 0.25 * before
    assert records[-1]["loss"] < 0.25 * records[0]["loss"]
    assert result == SftResult(60, 0, records[-1]["loss"], None, True)  # without a gate none can be missed
    assert [record["step"] for record in records] == list(range(1, 61))


def test_every_training_transcript_comes_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def remember(self: SftTrainer, batch: list[Transcript]) -> tuple[float, int]:
        seen.extend(id(transcript) for transcript in batch)
        for parameter in self.policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return 0.0, 0

    monkeypatch.setattr(SftTrainer, "_backward", remember)
    run(make_policy(), sft(steps=4, batch_size=4, held_out=0.34))  # 4 of 12 are held out
    training = sorted(id(transcript) for transcript in COPIES[4:])
    assert sorted(seen[:8]) == sorted(seen[8:]) == training
    assert seen[:8] != seen[8:]


@pytest.mark.slow
def test_copying_counts_the_most_likely_tokens() -> None:
    policy = make_policy()
    trainer = trainer_of(policy, sft(steps=30, held_out=0.25), COPIES, micro_batch_tokens=12)
    assert trainer.held_out == COPIES[:3] and trainer.training == COPIES[3:]
    for _ in range(2):
        right = [
            int(policy.logits(torch.tensor(t.ids))[row - 1, :VOCAB].argmax()) == t.ids[row]
            for t in COPIES[:3]
            for row in t.copied
        ]
        assert trainer.copying() == sum(right) / 6
        trainer.run(lambda record: None)
    assert sum(right) > 0


def test_a_gate_that_opens_ends_the_training() -> None:
    result, records = run(make_policy(), sft(steps=200, stop_at_copy_accuracy=0.9, gate_every=5), [*COPIES, *COPIES])
    assert result.passed and result.restarts == 0 and result.copying is not None and result.copying >= 0.9
    assert result.steps == len(records) < 200 and result.steps % 5 == 0
    assert [record["step"] for record in records if "copying" in record] == list(range(5, result.steps + 1, 5))
    assert all(record["copying"] < 0.9 for record in records[:-1] if "copying" in record)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_a_gate_that_stays_shut_starts_over_from_the_same_weights(monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    measured = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    monkeypatch.setattr(SftTrainer, "copying", lambda self: next(measured))
    policy = make_policy()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    if lora:
        add_lora(policy, rank=8, alpha=16)
    settings = sft(steps=3, batch_size=6, stop_at_copy_accuracy=0.9, gate_every=2, max_restarts=2)
    result, records = run(policy, settings)
    assert [(r["restart"], r["step"]) for r in records] == [(n, step) for n in range(3) for step in (1, 2, 3)]
    # Measured at every second step and at the last one.
    assert [r.get("copying") for r in records] == [None, 0.1, 0.2, None, 0.3, 0.4, None, 0.5, 0.6]
    assert (result.passed, result.restarts, result.steps, result.copying) == (False, 2, 3, 0.6)
    # A batch holds all training transcripts, so equal weights have equal losses, up to the order of summation.
    first = [record["loss"] for record in records if record["step"] == 1]
    assert first == pytest.approx([first[0]] * 3, abs=1e-5) and records[2]["loss"] < first[0] - (0.01 if lora else 0.1)
    after = policy.state_dict()
    assert any(not torch.equal(after[name], value) for name, value in before.items()) is not lora
    assert all(adapter.b_OR.any() for _, adapter in adapters(policy)) and len(list(adapters(policy))) == 14 * lora


def test_another_attempt_sees_another_order_and_the_same_seed_the_same() -> None:
    def losses() -> list[float]:
        settings = sft(steps=4, batch_size=2, stop_at_copy_accuracy=1.0, gate_every=100, max_restarts=1, lr=1e-9)
        return [record["loss"] for record in run(make_policy(), settings)[1]]

    first = losses()
    assert first == losses()
    assert first[:4] != pytest.approx(first[4:], abs=1e-4)


@pytest.mark.parametrize(("lr", "optim"), [(1e38, {}), (1e18, {"max_grad_norm": float("inf")})])
def test_a_training_that_diverges_ends_in_a_sentence(lr: float, optim: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^sft: step \d: the policy is not finite; start again with a lower sft\.lr$"):
        run(make_policy(), sft(steps=6, lr=lr), **optim)


def test_a_last_update_that_diverges_is_not_written(tmp_path: Path) -> None:
    policy = make_policy()
    with pytest.MonkeyPatch.context() as patch:  # its step ends in infinity, as a float32 step may
        patch.setattr("torch.optim.AdamW.step", lambda self: policy.embed_VH.data.fill_(float("inf")))
        run(policy, sft(steps=1))
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight holds numbers that are not finite; train again"):
        policy.save(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_transcript_has_room_in_the_model() -> None:
    policy = make_policy()
    room = policy.config.max_position_embeddings
    trainer_of(policy, sft(held_out=0.0), [*COPIES, Transcript([0] * room, [1], [])])
    with pytest.raises(UserError, match=f"has {room + 1} tokens, but the model was made for {room} positions"):
        trainer_of(policy, sft(held_out=0.0), [*COPIES, Transcript([0] * (room + 1), [1], [])])


def test_some_are_held_out_whenever_any_share_is_but_not_all() -> None:
    shares = (0.0, 0.001, 0.25, 0.9)
    held = [len(trainer_of(make_policy(), sft(held_out=share), COPIES).held_out) for share in shares]
    assert held == [0, 1, 3, 11]
    gated = sft(held_out=None, stop_at_copy_accuracy=0.5)
    assert len(trainer_of(make_policy(), gated, COPIES).held_out) == 1
    assert not trainer_of(make_policy(), sft(held_out=None), COPIES).held_out
    bare = [Transcript(one.ids, one.positions, []) for one in COPIES]
    with pytest.raises(UserError, match=r"stop_at_copy_accuracy: expected held-out transcripts with copied names"):
        trainer_of(make_policy(), gated, bare)
    with pytest.raises(UserError, match=r"every transcript is held out; lower sft\.held_out"):
        trainer_of(make_policy(), sft(), COPIES[:1])
