"""Shared by the tests of the decoder: sequences with turns that any decoder can play, comparisons of the results, and a
drafter that is often wrong.

Every sequence follows its own plan, independent of the others, so that results can be compared bit for bit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thresher.engine.decoding.decoder import DecodeClock, Decoder
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.engine.decoding.speculative import MOST, Drafter, Drafts
from thresher.kernels import sampling
from thresher.kernels.attention.varlen import Varlen
from thresher.kernels.noise import minus_gumbel_, uniform_noise
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

Record = list[tuple[list[int], list[str], str, str | None, bytes]]  # of a sequence, one entry per turn
SCORED = "scored"
GAP = 1e-4  # nats: float32 sums in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """A turn. appended: texts added before the turn, in order; pause: steps until it starts, during which they are
    added."""

    room: int
    stop: tuple[str, ...] = ()
    appended: tuple[tuple[int, ...], ...] = ()
    pause: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A sequence. prompt: a number; sequences with the same number share it. arrive: the step of its submission.
    scored: a text that is scored before each turn, in the sequence's context; it has its own entry in the record."""

    prompt: int
    seed: int
    turns: tuple[TurnPlan, ...]
    draw: SamplingParams = field(default_factory=SamplingParams)
    arrive: int = 0
    scored: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Playing:
    plan: Plan
    sequence: TokenSequence
    record: Record = field(default_factory=list)
    pause: int = 0
    left: list[tuple[int, ...]] = field(default_factory=list)  # texts of the next turn that are not yet appended

    @property
    def turn(self) -> TurnPlan:
        return self.plan.turns[len(turns_of(self.record))]


def turns_of(record: Record) -> Record:
    """Return a record without the scored texts."""
    return [entry for entry in record if entry[2] != SCORED]


def make_decoder(policy: Policy, tokenizer: Tokenizer, **changes: Any) -> Decoder:
    sizes = {"num_blocks": 400, "block_size": 16, "max_running": 64, **changes}
    return Decoder(policy, tokenizer, **sizes)


def longest(prompts: Sequence[Sequence[int]], plans: Iterable[Plan]) -> int:
    return max(
        len(prompts[plan.prompt])
        + sum(turn.room + sum(map(len, turn.appended)) for turn in plan.turns)
        + len(plan.scored)
        for plan in plans
    )


def play(decoder: Decoder, prompts: Sequence[Sequence[int]], plans: Sequence[Plan]) -> list[Record]:
    """Play all plans; return their turns, in the order of the plans."""
    decoder.begin(longest(prompts, plans), DecodeClock())
    shared = [SharedPrompt(list(ids)) for ids in prompts]
    playing = [_Playing(plan, TokenSequence(shared[plan.prompt], plan.seed, plan.draw)) for plan in plans]
    of = {one.sequence: one for one in playing}
    coming = sorted(playing, key=lambda one: -one.plan.arrive)
    pausing: list[_Playing] = []
    tick, steps = 0, 0
    while coming or pausing or not decoder.idle:
        while coming and coming[-1].plan.arrive <= tick:
            _begin(decoder, coming.pop(), of)
        pausing = [one for one in pausing if not _goes_on(decoder, one, of)]
        for sequence in decoder.step():
            one = of[sequence]
            hit = sequence.hit
            logprobs = [x.hex() for x in sequence.logprobs]
            if sequence.scored_from:
                decoder.release(sequence, keep=True)
                one.record.append((sequence.ids[sequence.scored_from :], logprobs, SCORED, None, b""))
                decoder.begin_turn(one.sequence, one.turn.stop, one.turn.room)
                continue
            ended = (sequence.turn_ids, logprobs, sequence.finish, hit and hit.tag, hit.trailing if hit else b"")
            one.record.append(ended)
            if len(turns_of(one.record)) == len(one.plan.turns):
                decoder.release(sequence, keep=one.plan.seed % 2 == 0)
            else:
                one.pause, one.left = one.turn.pause, list(one.turn.appended)
                pausing.append(one)
        tick += 1
        steps += 1
        assert steps < 500 + 200 * len(plans), "it goes on for ever"
    return [one.record for one in playing]


def _begin(decoder: Decoder, one: _Playing, of: dict[TokenSequence, _Playing]) -> None:
    if not one.plan.scored:
        decoder.begin_turn(one.sequence, one.turn.stop, one.turn.room)
        return
    decoder.release(one.sequence, keep=True)
    context = one.sequence.ids
    ids = [*context, *one.plan.scored]
    places = {"scored_from": len(context), "keep_at": len(context) - 1}
    scored = TokenSequence(SharedPrompt(ids), 0, one.plan.draw, most=len(ids), **places)
    of[scored] = one
    decoder.score(scored)


def _goes_on(decoder: Decoder, one: _Playing, of: dict[TokenSequence, _Playing]) -> bool:
    """Append one pending text per step; return whether the next turn has started."""
    while one.left:
        decoder.append(one.sequence, one.left.pop(0))
        if one.pause > 0:
            break
    one.pause -= 1
    if one.pause >= 0 or one.left:
        return False
    _begin(decoder, one, of)
    return True


# near(number of the sequence, turn, place in it, one token, another): whether rounding may decide between them
Near = Callable[[int, int, int, int, int], bool]


def agree(found: Sequence[Record], wanted: Sequence[Record], gap: float = GAP, near: Near | None = None) -> None:
    """Check equal tokens and ends, and log-probs within `gap`. After a token that rounding may decide by `near`, the
    rest of its sequence is not compared."""
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for turn, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            pairs = list(zip(one[0], other[0], strict=False))
            same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
            for a, b in zip(one[1][:same], other[1][:same], strict=True):
                assert abs(float.fromhex(a) - float.fromhex(b)) < gap
            if same < len(pairs) and near is not None and near(number, turn, same, *pairs[same]):
                break
            assert (one[0], *one[2:]) == (other[0], *other[2:])


def near_ties(
    policy: Policy, vocab: int, prompts: Sequence[Sequence[int]], plans: Sequence[Plan], wanted: Sequence[Record]
) -> Near:
    """Return a `Near` for tokens whose perturbed scores differ by less than GAP, or that are that close to a filter's
    cut. policy: on a CPU, in float32."""

    @torch.inference_mode()
    def near(number: int, turn: int, place: int, one: int, other: int) -> bool:
        plan, record = plans[number], wanted[number]
        ids = list(prompts[plan.prompt])
        for at in range(turn + 1):
            ids += [token for text in plan.turns[at].appended for token in text]
            ids += record[at][0] if at < turn else record[at][0][:place]
        layout, draw = Varlen([len(ids)]), plan.draw
        hidden_TH = policy.hidden(torch.tensor(ids), layout.positions_T, layout)
        z_BV = sampling.head_logits(hidden_TH[-1:], policy.head_VH[:vocab]) / (draw.temperature or 1.0)
        score_BV = z_BV
        if draw.temperature:
            u_BV = uniform_noise(torch.tensor([plan.seed]), torch.tensor([len(ids)]), vocab)
            score_BV = z_BV - minus_gumbel_(u_BV)
        score_V, z_V = score_BV[0].tolist(), z_BV[0].tolist()
        temperature_B, top_p_B, min_p_B = (torch.tensor([x]) for x in (draw.temperature, draw.top_p, draw.min_p))
        rules = sampling.SamplingTensors.of(temperature_B, torch.tensor([draw.top_k]), top_p_B, min_p_B)
        cut = float(sampling.cutoffs(z_BV, rules)) if rules.filtered else -torch.inf
        return abs(score_V[one] - score_V[other]) < GAP or any(abs(z_V[x] - cut) < GAP for x in (one, other))

    return near


def nobody_owns_a_block(decoder: Decoder) -> bool:
    return decoder.pool.num_free == decoder.pool.num_blocks - 1 and not decoder.pool.ref_count_P.any()


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is not torch.ops.aten.view.default:
            self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def ops(step: Callable[[], Any]) -> list[str]:
    """Return the operations that run, in order. (Views are left out: they compute nothing and depend on padding.)"""
    with _Ops() as mode:
        step()
    return mode.names


def whole(prompts: Sequence[Sequence[int]], plan: Plan, record: Record) -> list[int]:
    """Return all ids of a sequence whose turns have been played."""
    ids = list(prompts[plan.prompt])
    for turn, (written, *_) in zip(plan.turns, record, strict=True):
        ids += [token for text in turn.appended for token in text] + written
    return ids


class Adversary(Drafter):
    """A drafter that proposes true tokens, those of other sequences, or random ones, any number up to `most`."""

    rng = Random(0)
    written: list[list[int]] = []  # noqa: RUF012  set by the test
    most = MOST

    def looks(self, sequences: int) -> bool:
        return self.rng.random() < 0.9

    def draft(self, tokens_BL: Any, known_B: Any, slot_N: Any, most_N: Any) -> Drafts | None:
        ids_NK, count_N = np.zeros((len(slot_N), MOST), np.int64), np.zeros(len(slot_N), np.int64)
        for row, (slot, most) in enumerate(zip(slot_N.tolist(), most_N.tolist(), strict=True)):
            own = tokens_BL[slot, : known_B[slot]].tolist()
            true = next((ids[len(own) :] for ids in self.written if ids[: len(own)] == own), [])
            guess = [*true[:MOST], *(self.rng.randrange(100) for _ in range(MOST))][:MOST]
            if self.rng.random() < 0.4:
                guess[self.rng.randrange(MOST)] = self.rng.randrange(100)
            ids_NK[row], count_N[row] = guess, min(self.rng.randrange(self.most + 1), most)
        return Drafts(ids_NK, count_N) if count_N.any() else None


def alone(
    policy: Policy, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], plans: Sequence[Plan]
) -> list[Record]:
    """Play one sequence at a time as the oracle: no reuse of others' KV cache, no shared products, no drafts."""
    decoder = make_decoder(
        policy, tokenizer, max_running=1, reuse=False, share_prefix=False, num_blocks=blocks(prompts, plans)
    )
    return play(decoder, prompts, plans)


def blocks(prompts: Sequence[Sequence[int]], plans: Sequence[Plan], spare: int = 0) -> int:
    """Return the smallest number of blocks that a decoder accepts, plus `spare`."""
    return 1 + -(-longest(prompts, plans) // 16) + spare


def random_world(rng: Random, vocab: int, count: int) -> tuple[list[list[int]], list[Plan]]:
    """Return prompts, many with equal beginnings, and `count` sequences of one to three turns."""
    trunk = [rng.randrange(vocab) for _ in range(100)]
    prompts = []
    for _ in range(rng.randint(1, max(count // 2, 1))):
        head = trunk[: rng.choice((0, rng.randrange(1, 100), 16, 32, 48))]
        tail = [rng.randrange(vocab) for _ in range(rng.choice((0, 1, rng.randrange(1, 40))))]
        prompts.append(head + tail or [rng.randrange(vocab)])
    return prompts, [_random_plan(rng, vocab, len(prompts)) for _ in range(count)]


def _random_plan(rng: Random, vocab: int, prompts: int) -> Plan:
    def text() -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(rng.choice((1, 2, 15, 16, rng.randrange(1, 30)))))

    turns = [
        TurnPlan(
            room=rng.choice((1, 2, 8, 30)),
            stop=rng.choice(((), (), ("e",), ("is", "the", "in"), ("</search>", "ea"))),
            appended=tuple(text() for _ in range(rng.choice((0, 1, 1, 2, 3)) if number else 0)),
            pause=rng.choice((0, 0, 0, 1, 2, 5)) if number else 0,
        )
        for number in range(rng.choice((1, 1, 2, 3)))
    ]
    draw = rng.choice(
        (
            SamplingParams(),
            SamplingParams(),
            SamplingParams(0.0),
            SamplingParams(0.7),
            SamplingParams(1.0, 5),
            SamplingParams(1.2, 0, 0.9, 0.05),
        )
    )
    arrive = rng.choice((0, 0, 0, rng.randrange(40)))
    return Plan(prompt=rng.randrange(prompts), seed=rng.randrange(2**62), turns=tuple(turns), draw=draw, arrive=arrive)
