"""Folds: an episode continues in a new context. Sampled tokens stay in the context where they were sampled; kept text
is a prompt in the new one, and is trained once. Branches and calls are trained on request."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_invariance import needs_invariant_policy
from model_cases import make_config
from rollout_cases import Make, assert_logprobs_match, make_jobs, record, system_of

from thresher.common.errors import UserError
from thresher.engine.config.sections import GrpoSection
from thresher.engine.episode import (
    BranchPrompt,
    Fold,
    Generate,
    KeptSpan,
    Prompt,
    Retrieved,
    Search,
    SpawnBranches,
    SubCall,
    Turn,
)
from thresher.engine.packing import build_train_sequences
from thresher.engine.protocol.trajectory import check_trajectory, contexts, turns
from thresher.engine.rollout.contexts import branch_seed
from thresher.engine.scoring.score import check_all, score
from thresher.engine.systems import load_system
from thresher.engine.training.sft import encode_all
from thresher.policy.config import DeltaShape
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
QUESTION = Question("q", "Who?", ("Bel",))
PROMPT, POLICY, RETRIEVED = Source.PROMPT, Source.POLICY, Source.RETRIEVED
SEEN: list[Turn] = []


def folding(question: Question, config: Any) -> Any:
    """Search, keep only the query next to what was found, then answer."""
    yield Prompt("Begin: {question}\n", question.question)
    turn = yield Generate(("</search>",))
    SEEN.append(turn)
    yield Retrieved("something else", "<information>", "</information>")
    start = turn.text.index(b"<search>")
    yield Fold(BranchPrompt(Prompt("Go on: {question}\n", question.question), (KeptSpan(start, len(turn.text)),)))
    yield Retrieved("Bel did it", "<information>", "</information>")
    SEEN.append((yield Generate(("</answer>",))))
    yield SpawnBranches(
        {"why": BranchPrompt(Prompt("Why {question}", ""), (KeptSpan(0, 3), "<answer>"), ("</answer>",))}, trained=True
    )
    return "answered"


SYSTEM = system_of(folding, TAGS)
SAID = ["so <search>x</search>", "<answer>Bel</answer>"]


def texts(segments: Any, tokenizer: Tokenizer) -> list[tuple[Source, str]]:
    return [(segment.source, tokenizer.decode(segment.ids)) for segment in segments]


def test_a_fold_goes_on_in_a_new_context(
    tiny_rollout: Make, script: Callable[..., None], tiny_tokenizer: Tokenizer
) -> None:
    second = branch_seed(7, "fold")
    script({7: SAID[:1], second: SAID[1:], branch_seed(second, "why"): ["it was</answer>"]})
    SEEN.clear()
    run = tiny_rollout(SYSTEM)
    (trajectory,) = run.run([replace(make_jobs([QUESTION])[0], seed=7)], 1.0)
    assert trajectory.reason == "answered" and check_trajectory(trajectory, tiny_tokenizer, TAGS, 360) == []
    first, again = contexts(trajectory)
    assert texts(first, tiny_tokenizer) == [
        (PROMPT, "Begin: Who?\n"),
        (POLICY, SAID[0]),
        (RETRIEVED, "<information>something else</information>"),
    ]
    assert texts(again, tiny_tokenizer) == [
        (PROMPT, "Go on: Who?\n<search>x</search>"),
        (RETRIEVED, "<information>Bel did it</information>"),
        (POLICY, SAID[1]),
    ]
    # The recorded log-probs are those of a fresh forward over each context by itself.
    assert_logprobs_match(run, [trajectory], 1.0)
    # A turn's room is that of the context in which it was written.
    ends = [sum(len(s.ids) for s in first[:2]), sum(len(s.ids) for s in again)]
    assert [turn.room for turn in SEEN] == [360 - end for end in ends]
    # Each sampled token is trained once, in its own context; the branch is trained, its prompt is not.
    items = build_train_sequences([trajectory], [1.0], GrpoSection())
    trained = [[item.ids[at] for at in item.positions] for item in items]
    assert [tiny_tokenizer.decode(ids) for ids in trained] == [*SAID, "it was</answer>"]
    assert {item.weight for item in items} == {1 / sum(map(len, trained))}
    assert tiny_tokenizer.decode(items[2].ids) == "Why so <answer>it was</answer>"
    (scored,) = score([QUESTION], [trajectory], SYSTEM, tiny_tokenizer)
    check_all([scored], tiny_tokenizer, TAGS, 360)
    stored = scored.to_dict(tiny_tokenizer)
    assert stored["trained_branches"] == ["why"]
    # A stored trajectory as an SFT transcript: one transcript per context, with the same ids and positions.
    found = encode_all([("line 1", stored)], tiny_tokenizer, run.renderer, "{question}", None)
    assert [(one.ids, one.positions) for one in found] == [(item.ids, item.positions) for item in items[:2]]


def unscripted(question: Question, config: Any) -> Any:
    """End turns at letters that random weights soon write. Each fold keeps the last turn, and some contexts begin
    alike."""
    prompt = Prompt("{question}", question.question)
    yield prompt
    end = 0
    for number in range(4):
        turn = yield Generate(("e", "a"), 9)
        start, end = end, end + len(turn.text)
        yield Fold(BranchPrompt(prompt, (f"{number // 2}", KeptSpan(start, end))))
    turn = yield SubCall(BranchPrompt(prompt, (KeptSpan(0, end),), ("o",), 5), trained=True)
    yield Generate(("o",), 9)
    return "answered"


QUESTIONS = [Question(f"q{n}", "Who is that" + "?" * (n % 5), ("a",)) for n in range(6)]


def test_folds_are_batch_invariant(tiny_rollout: Make, tiny_policy: Policy) -> None:
    needs_invariant_policy(tiny_policy)
    jobs, system = make_jobs(QUESTIONS, 2), system_of(unscripted, ())
    together = tiny_rollout(system).run(jobs, 1.0)
    few = tiny_rollout(system, max_num_seqs=1)
    alone = [few.run([job], 1.0)[0] for job in jobs]
    assert [record(one) for one in together] == [record(one) for one in alone]
    assert all(len(contexts(one)) == 5 for one in together if one.reason == "answered")
    assert sum(one.reason == "answered" for one in together) > 6


@pytest.mark.parametrize("family", ["plain", "states"])
def test_recorded_log_probs_of_all_contexts_are_the_updates(
    family: str, tiny_rollout: Make, tiny_tokenizer: Tokenizer
) -> None:
    """This holds with few slots and blocks, so that contexts are preempted, and for layers with states (Qwen3.5)."""
    shape: dict[str, Any] = {"max_position_embeddings": 512, "vocab_size": tiny_tokenizer.vocab_size}
    if family == "states":
        types = ("linear_attention", "full_attention")
        shape |= {"model_type": "qwen3_5_text", "layer_types": types, "delta": DeltaShape(2, 4, 8, 6, 4)}
    policy = init_policy(make_config(**shape), 3)
    run = tiny_rollout(system_of(unscripted, ()), policy=policy, max_num_seqs=3, kv_tokens=400, kv_block_size=16)
    trajectories = run.run(make_jobs(QUESTIONS, 2), 1.0)
    assert any(one.branches["call 1"].trained for one in trajectories if one.branches)
    assert_logprobs_match(run, trajectories, 1.0)
    assert run.clock.shared_tokens > 0


def test_two_folds_into_equal_contexts_write_differently(tiny_rollout: Make) -> None:
    """Each context has its own noise; otherwise an episode that folds into an earlier context would repeat itself."""

    def circle(question: Question, config: Any) -> Any:
        yield Prompt("{question}", question.question)
        for _ in range(3):
            yield Generate((), 8)
            yield Fold(BranchPrompt(Prompt("{question}", question.question), ()))
        return "ended"

    (trajectory,) = tiny_rollout(system_of(circle, ())).run(make_jobs(QUESTIONS[:1]), 1.0)
    first, *others, last = contexts(trajectory)
    assert all(other[0].ids == first[0].ids for other in (*others, last)) and len(last) == 1
    assert len({tuple(turn.ids) for turn in turns(trajectory)}) == 3


def test_limits_of_a_fold(tiny_rollout: Make, script: Callable[..., None], tiny_tokenizer: Tokenizer) -> None:
    """Policy tokens count over all contexts; a context without room ends the trajectory; passages are cut."""

    def endless(question: Question, config: Any) -> Any:
        yield Prompt("{question}", question.question)
        while True:
            yield Generate((), 10)
            yield Fold(BranchPrompt(Prompt("{question}", question.question), ()))

    (trajectory,) = tiny_rollout(system_of(endless, ()), max_policy_tokens=25).run(make_jobs(QUESTIONS[:1]), 1.0)
    assert (trajectory.reason, trajectory.count(POLICY)) == ("tokens", 25)
    assert [len(context) for context in contexts(trajectory)] == [2, 2, 2]

    def wide(question: Question, config: Any) -> Any:
        yield Prompt("{question}", question.question)
        yield Fold(BranchPrompt(Prompt("{question}", "who " * 400), ()))
        raise AssertionError("there was no room for it")

    (trajectory,) = tiny_rollout(system_of(wide)).run(make_jobs(QUESTIONS[:1]), 1.0)
    assert (trajectory.reason, len(trajectory.segments)) == ("context", 1)

    many = tuple(Passage(str(n), "T", "word " * 30) for n in range(3))

    def long(question: Question, config: Any) -> Any:
        yield Prompt("{question}", question.question)
        yield Fold(BranchPrompt(Prompt("{passages} {question}", question.question, many), ()))
        yield Generate((), 2)
        return "ended"

    run = tiny_rollout(system_of(long), max_passage_tokens=60)
    (trajectory,) = run.run(make_jobs(QUESTIONS[:1]), 1.0)
    assert run.clock.cut_search_tokens > 0 and len(trajectory.segments[1].ids) < 90


def test_an_episode_folds_when_its_context_runs_full(tiny_rollout: Make) -> None:
    """With `Turn.room` and `EpisodeConfig.room_needed` no trajectory runs out of room, however many turns it has."""

    def resuming(question: Question, config: Any) -> Any:
        yield Prompt("{question}", question.question)
        end = 0
        for _ in range(8):
            turn = yield Generate((), 20)
            start, end = end, end + len(turn.text)
            if turn.room < config.room_needed:
                yield Fold(BranchPrompt(Prompt("{question}", question.question), (KeptSpan(start, end),)))
            yield Retrieved((yield Search("capital")), "<information>", "</information>")
        return "turns"

    run = tiny_rollout(system_of(resuming, ("<information>", "</information>")), max_context=150, max_policy_tokens=900)
    run.episode_config = replace(run.episode_config, room_needed=40 + 2 * 20 + 48)
    found = run.run(make_jobs(QUESTIONS), 1.0)
    assert {one.reason for one in found} == {"turns"} and all(len(contexts(one)) > 2 for one in found)
    run.episode_config = replace(run.episode_config, room_needed=0)
    assert "context" in {one.reason for one in run.run(make_jobs(QUESTIONS), 1.0)}


OWN = """
from dataclasses import dataclass
from thresher.engine.episode import BranchPrompt, Fold, Generate, Prompt, System
from thresher.rewards.reward import RewardResult

@dataclass(frozen=True, kw_only=True)
class Options:
    early: bool = False

def system(options):
    def episode(question, config):
        if not options.early:
            yield Prompt(config.template, question.question)
        yield Fold(BranchPrompt(Prompt("x", ""), ()) if options.early else "a text")
        return "ended"
    return System("own", (), episode, lambda attempt: RewardResult(0.0), "{question}", searches=False)
"""


@pytest.mark.parametrize(
    ("early", "why"),
    [
        (True, r"yielded first Fold\(.*; expected Prompt"),
        (False, r"yielded Fold\(context='a text'\); expected a Branch"),
    ],
)
def test_a_fold_that_cannot_be_is_refused(early: bool, why: str, tmp_path: Path, tiny_rollout: Make) -> None:
    (tmp_path / "own.py").write_text(OWN)
    system = load_system(str(tmp_path / "own.py"), {"early": early})
    with pytest.raises(UserError, match=why) as refused:
        tiny_rollout(system).run(make_jobs(QUESTIONS[:1]), 1.0)
    assert str(refused.value).startswith(f"{tmp_path}/own.py: episode(question, config) ")
