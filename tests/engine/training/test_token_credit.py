"""Advantages finer than a trajectory's: from rewards of turns and spans to the tokens of an update, by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stored_cases import stored
from train_cases import Make

from thresher.common.errors import UserError
from thresher.engine.config.sections import GrpoSection
from thresher.engine.packing import build_train_sequences
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.reports.token_view import policy_counts
from thresher.engine.scoring.score import Scored
from thresher.engine.store.token_stats import read_token_stats
from thresher.engine.training import train as train_module
from thresher.engine.training.credit import token_advantages
from thresher.engine.training.train import train
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.advantages import group_advantages
from thresher.rewards.credit import anchor_advantages, tree_advantages, turn_advantages
from thresher.rewards.reward import RewardInput, RewardResult, Source

TURN = {"advantage": "turn", "baseline": "leave_one_out", "scale": "none"}


def attempt(tokenizer: Tokenizer, sample: int, parts: Sequence[str], result: RewardResult, group: int = 0) -> Scored:
    """Return a trajectory with a prompt, and then by turns policy text and shown text."""
    segments = [Segment(Source.PROMPT, tokenizer.encode("Who?"))]
    for number, text in enumerate(parts):
        ids = tokenizer.encode(text)
        mine = number % 2 == 0
        segments.append(Segment(Source.POLICY if mine else Source.RETRIEVED, ids, [-1.0] * len(ids) if mine else []))
    question = Question("q", "Who?", ("x",))
    return Scored(question, Trajectory("q", group, sample, segments), result, RewardInput(pieces=[], golds=("x",)))


def credit(scored: Sequence[Scored], tokenizer: Tokenizer, **grpo: Any) -> list[list[float]]:
    rewards = [entry.result.reward for entry in scored]
    advantages, branches = [0.25] * len(scored), [dict[str, float]()] * len(scored)
    return token_advantages(scored, rewards, advantages, branches, GrpoSection(**grpo), tokenizer, 0)


def by_turn(values: list[float], entry: Scored) -> list[float]:
    """Return the value of each turn, after checking that all of its tokens have it."""
    found, at = [], 0
    for segment in entry.trajectory.segments:
        if segment.source is Source.POLICY:
            (value,) = set(values[at : at + len(segment.ids)])
            found.append(value)
            at += len(segment.ids)
    assert at == len(values)
    return found


def test_a_turn_is_credited_with_what_came_from_it_on(tiny_tokenizer: Tokenizer) -> None:
    """Returns 1.5, 1.25 and 1 of three turns, against .5 of another's single turn, which counts as 0 after its end."""
    long = attempt(
        tiny_tokenizer, 0, ["a search", " found", "one more", " seen", "Eva"], RewardResult(1.0, turns=[0.25, 0.25, 0])
    )
    short = attempt(tiny_tokenizer, 1, ["at once"], RewardResult(0.5))
    found = credit([long, short], tiny_tokenizer, **TURN)
    assert by_turn(found[0], long) == pytest.approx([1.5 - 0.5, 1.25, 1.0])
    assert by_turn(found[1], short) == pytest.approx([0.5 - 1.5])
    discounted = credit([long, short], tiny_tokenizer, gamma=0.5, **TURN)
    assert by_turn(discounted[0], long) == pytest.approx([0.25 + 0.125 + 0.25 - 0.5, 0.75, 1.0])
    bare = credit([long, short], tiny_tokenizer, **TURN | {"baseline": "none"})
    assert by_turn(bare[0], long) == pytest.approx([1.5, 1.25, 1.0])
    alone = attempt(tiny_tokenizer, 0, ["alone"], RewardResult(3.0), group=1)
    assert credit([long, short, alone], tiny_tokenizer, **TURN)[2] == [0.0] * len(
        found[1][:0] or alone.trajectory.policy_positions()
    )


def test_an_anchor_is_a_state_that_several_turns_saw(tiny_tokenizer: Tokenizer) -> None:
    """Two samples with the same search and result have comparable second turns. A third saw something else and is
    compared with none. By observation all second turns that saw " b" are compared."""
    same = [
        attempt(tiny_tokenizer, 0, ["look", " b", "yes"], RewardResult(1.0)),
        attempt(tiny_tokenizer, 1, ["look", " b", "no"], RewardResult(0.0)),
        attempt(tiny_tokenizer, 2, ["peek", " b", "no"], RewardResult(0.5)),
    ]
    anchor = {"advantage": "anchor", "baseline": "group", "scale": "none", "omega": 2.0}
    found = [by_turn(values, one) for values, one in zip(credit(same, tiny_tokenizer, **anchor), same, strict=True)]
    whole = [0.5, -0.5, 0.0]
    first = [3 * value for value in whole]  # all saw the prompt, so the step group is the whole group
    assert found == [
        pytest.approx([first[0], whole[0] + 2 * 0.5]),
        pytest.approx([first[1], whole[1] - 2 * 0.5]),
        pytest.approx([first[2], whole[2]]),
    ]
    seen = credit(same, tiny_tokenizer, anchor="observation", **anchor)
    assert [by_turn(values, one)[1] for values, one in zip(seen, same, strict=True)] == pytest.approx([1.5, -1.5, 0.0])


def test_a_context_is_a_state_and_what_is_trained_elsewhere_has_no_advantage(tiny_tokenizer: Tokenizer) -> None:
    """Two samples search differently and fold into the same context, where their second turns are compared. A third
    inherited the first one's first turn, whose tokens are trained there; its trained branch has its advantage."""
    anchor = {"advantage": "anchor", "baseline": "group", "scale": "none", "omega": 2.0}
    folded = [
        attempt(tiny_tokenizer, n, [said, " b", word], RewardResult(reward))
        for n, (said, word, reward) in enumerate((("look", "yes", 1.0), ("peek", "no", 0.0), ("look", "no", 0.5)))
    ]
    for entry in folded:
        entry.trajectory.segments[2].source = Source.PROMPT
    first, second = credit(folded[:2], tiny_tokenizer, **anchor)
    assert by_turn(first, folded[0]) == pytest.approx([1.5, 1.5])
    assert by_turn(second, folded[1]) == pytest.approx([-1.5, -1.5])
    branch = [Segment(Source.PROMPT, [1]), Segment(Source.POLICY, [2, 3, 4], [-1.0] * 3)]
    folded[2].trajectory.forked = (0, 1)
    folded[2].trajectory.branches = {"a": Trajectory("q", 0, 2, branch, trained=True)}
    for grpo in (anchor, {"advantage": "token"}):
        last = len(folded[2].trajectory.segments[3].ids)
        (*_, values) = credit(folded, tiny_tokenizer, **grpo)
        assert len(values) == last + 3 and values[last:] == [0.25] * 3
        assert len(build_train_sequences([folded[2].trajectory], [values], GrpoSection())) == 2


def test_spans_reach_the_tokens_that_have_bytes_in_them(tiny_tokenizer: Tokenizer) -> None:
    text = "one two three"
    entry = attempt(
        tiny_tokenizer, 0, [text, " shown", "four"], RewardResult(1.0, tokens=[(4, 7, -1.0), (13, 17, 2.0)])
    )
    (values,) = credit([entry], tiny_tokenizer, advantage="token")
    at, wanted = 0, []
    for token in tiny_tokenizer.encode(text) + tiny_tokenizer.encode("four"):
        end = at + len(tiny_tokenizer.decode_bytes([token]))
        wanted.append(0.25 + (-1.0 if at < 7 and end > 4 else 0.0) + (2.0 if end > 13 else 0.0))
        at = end
    assert values == pytest.approx(wanted) and len(set(values)) == 3
    sequences = build_train_sequences([entry.trajectory], [values], GrpoSection())
    assert sequences[0].advantage == values


def test_a_reward_that_does_not_fit_its_trajectory_is_refused(tiny_tokenizer: Tokenizer) -> None:
    for result, grpo, why in (
        (RewardResult(1.0, turns=[1.0]), TURN, r"has turns = \[1.0\]; expected a finite number for each .* 2 turns"),
        (RewardResult(1.0, turns=[1.0, float("nan")]), TURN, "expected a finite number for each"),
        (RewardResult(1.0, tokens=[(0, 99, 1.0)]), {"advantage": "token"}, r"has the span \[0, 99, 1.0\]; expected"),
        (
            RewardResult(1.0, tokens=[(2, 2, 1.0)]),
            {"advantage": "token"},
            "expected .start, end, value. with 0 <= start",
        ),
        (RewardResult(1.0, tokens=[(0, 2, float("inf"))]), {"advantage": "token"}, "and a finite value"),
    ):
        with pytest.raises(UserError, match=why):
            credit([attempt(tiny_tokenizer, 0, ["one", " b", "two"], result)], tiny_tokenizer, **grpo)
    for keys, why in (
        ({"advantage": "turn"}, 'baseline: expected leave_one_out or none with advantage = "turn", got group'),
        ({"advantage": "turn", "baseline": "none"}, 'scale: expected none with advantage = "turn", got group'),
        ({"advantage": "anchor", "baseline": "batch"}, "baseline: expected group or leave_one_out"),
        ({"advantage": "anchor", "baseline": "leave_one_out"}, 'scale: expected none with advantage = "anchor"'),
    ):
        with pytest.raises(Exception, match=why):
            GrpoSection(**keys)  # type: ignore[arg-type]


def test_the_control_shuffles_rewards_of_turns_too(tiny_tokenizer: Tokenizer) -> None:
    scored = [
        attempt(tiny_tokenizer, n, ["look", " b", "yes"], RewardResult(0.0, turns=[float(n), 10.0 + n]))
        for n in range(3)
    ]
    plain, mixed = (
        credit(scored, tiny_tokenizer, **TURN | {"baseline": "none"}, shuffle_rewards=shuffle)
        for shuffle in (False, True)
    )

    def rewards(found: list[list[float]]) -> list[float]:
        turns = [by_turn(values, one) for values, one in zip(found, scored, strict=True)]
        return sorted(value for first, last in turns for value in (first - last, last))

    assert rewards(plain) == pytest.approx([0, 1, 2, 10, 11, 12]) and plain != mixed
    assert rewards(mixed) == pytest.approx([0, 1, 2, 10, 11, 12])


@pytest.mark.parametrize("advantage", ["turn", "anchor", "token"])
def test_a_run_trains_by_it_and_stores_each_tokens(
    advantage: str, make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last turn of every trajectory is worth 2 more by its turn reward, or its first byte by a span."""
    real = train_module.load_run_context

    def with_turns(*given: Any, **more: Any) -> Any:
        context = real(*given, **more)
        reward = context.system.reward

        def finer(attempt: RewardInput) -> RewardResult:
            found = reward(attempt)
            count = sum(piece.source is Source.POLICY for piece in attempt.pieces)
            turns = [0.0] * (count - 1) + [2.0 * attempt.chance] if count else []
            written = any(piece.text for piece in attempt.pieces if piece.source is Source.POLICY)
            return RewardResult(found.reward, found.parts, found.answer, turns, [(0, 1, 0.5)] if written else None)

        object.__setattr__(context.system, "reward", finer)
        return context

    monkeypatch.setattr(train_module, "load_run_context", with_turns)
    keys = {
        "turn": TURN,
        "anchor": {"advantage": "anchor"},
        "token": {"advantage": "token"},
    }[advantage]
    train(make_recipe(grpo=keys, run={"steps": 1, "eval_every": None}), tmp_path / "run")
    records = stored(tmp_path / "run" / "trajectories" / "step_000001.jsonl")
    assert all(len(record["turns"]) >= 1 for record in records)
    path = tmp_path / "run" / "trajectories" / "step_000001.safetensors"
    stats = read_token_stats(path, *policy_counts(records))
    assert stats is not None
    differing = 0
    for record, entry in zip(records, stats, strict=True):
        values = entry.values["advantage"].tolist()
        assert record["advantage"] == pytest.approx(sum(values) / len(values), abs=1e-6)
        differing += len(set(values)) > 1
    assert differing > 0


def test_the_control_shuffles_the_values_of_spans_within_a_group(tiny_tokenizer: Tokenizer) -> None:
    scored = [
        attempt(tiny_tokenizer, n, ["abc"], RewardResult(0.0, tokens=[(0, 3, float(n))]), group=n // 6)
        for n in range(12)
    ]
    plain = credit(scored, tiny_tokenizer, advantage="token")
    shuffled = credit(scored, tiny_tokenizer, advantage="token", shuffle_rewards=True)
    for group in (slice(0, 6), slice(6, 12)):
        assert shuffled[group] != plain[group] and sorted(shuffled[group]) == sorted(plain[group])


@pytest.mark.parametrize("rule", ["turn", "anchor", "tree"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_equal_rewards_have_no_advantage_to_the_bit(rule: str, baseline: str) -> None:
    """The rounded mean of seven .1 is not .1; neither is the mean of three, by the group's rule."""
    for reward, count in ((0.1, 4), (0.1, 7), (0.49, 6), (0.9, 10), (0.7, 13)):
        if rule == "turn":
            found = turn_advantages([[reward]] * count, baseline="leave_one_out")
        elif rule == "anchor":
            found = anchor_advantages([[reward]] * count, [["s"]] * count, baseline=baseline)  # type: ignore[arg-type]
        else:
            made = tree_advantages([-1, *[0] * count], [None, *[reward] * count], baseline=baseline)  # type: ignore[arg-type]
            found = [made.advantages]
        assert not any(map(any, found)), (reward, count)
    for rewards in ([0.0, 0.1, 0.2], [0.1, 0.2, 0.3]):
        assert group_advantages(rewards)[1] == 0.0
