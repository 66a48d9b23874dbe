"""Calls: turns in contexts of their own, in the middle of an episode. Their text is returned and shown as retrieved
text, and is not the policy's own; many concurrent calls neither deadlock nor affect each other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rollout_cases import Make, Written, system_of

from thresher.common.errors import UserError
from thresher.engine.config.sections import GrpoSection
from thresher.engine.episode import BranchPrompt, Feedback, Generate, KeptSpan, Prompt, Retrieved, SubCall, Turn
from thresher.engine.evaluation.metrics import measured, summary_of
from thresher.engine.packing import TrainSequence, build_train_sequences
from thresher.engine.protocol.trajectory import check_trajectory
from thresher.engine.rollout.rollout import Job
from thresher.engine.scoring.score import Judges, check_all, score
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.papers.search import search_r1_reward
from thresher.rewards.reward import RewardInput, Source

TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
QUESTION = Question("q", "Who?", ("Bel",))
PASSAGES = (Passage("a", "A", "Bel did."), Passage("b", "B", "Nobody."))
READ = "{passages}\nRead for: {question}\n"
TURNS: list[Turn] = []


def reading(question: Question, config: Any) -> Any:
    """Make a turn, then a call that reads and sees the turn; show what it wrote, then answer."""
    yield Prompt(config.template, question.question)
    turn = yield Generate(("</search>",), 10)
    kept = KeptSpan(0, len(turn.text))
    read = yield SubCall(
        BranchPrompt(Prompt(READ, question.question, PASSAGES), (kept, "<answer>"), ("</answer>",), 12)
    )
    TURNS.append(read)
    yield Retrieved(read.text.decode("utf-8", "replace"), "<information>", "</information>")
    yield Generate(("</answer>",), 10)
    return "answered"


def system(episode: Callable[..., Any] = reading) -> Any:
    def reward(attempt: RewardInput) -> Any:
        return search_r1_reward(attempt.pieces, attempt.golds)

    return replace(system_of(episode, TAGS), reward=reward)


def test_what_a_call_wrote_is_shown_and_not_the_policys(written: Written, tiny_tokenizer: Tokenizer) -> None:
    TURNS.clear()
    turns = ["<search>x</search>", "no</answer>"]
    run, trajectory = written(turns, system(), QUESTION, {"call 1": "<answer>Bel</answer>"}, max_passage_tokens=200)
    (read,) = TURNS
    assert read == Turn(b"<answer>Bel</answer>", "</answer>") and trajectory.reason == "answered"
    text = [(s.source, tiny_tokenizer.decode(s.ids)) for s in trajectory.segments]
    assert [source for source, _ in text[1:]] == [Source.POLICY, Source.RETRIEVED, Source.POLICY]
    shown = text[2][1]
    assert shown.startswith("<information>") and "Bel" in shown and "<answer>" not in shown  # escaped
    assert check_trajectory(trajectory, tiny_tokenizer, TAGS, run.limits.max_context) == []
    (branch,) = trajectory.branches.values()
    passages = 'Doc 1(Title: "A") Bel did.\nDoc 2(Title: "B") Nobody.'
    before = f"{passages}\nRead for: Who?\n<search>x</search><answer>"
    assert [(s.source, tiny_tokenizer.decode(s.ids)) for s in branch.segments] == [
        (Source.PROMPT, before),
        (Source.POLICY, "<answer>Bel</answer>"),
    ]
    # The reward sees no answer in it, it gives no row of the update, and its tokens are counted separately.
    (scored,) = score([QUESTION], [trajectory], system(), tiny_tokenizer, Judges())
    assert scored.result.reward == 0 and not scored.result.answer
    check_all([scored], tiny_tokenizer, TAGS, run.limits.max_context)
    (item,) = build_train_sequences([trajectory], [1.0], GrpoSection())
    policy = [token for text in turns for token in tiny_tokenizer.encode_template(text)]
    assert isinstance(item, TrainSequence) and [item.ids[row] for row in item.positions] == policy
    measures = summary_of(measured([scored], TAGS))
    assert measures["branch_tokens"] == branch.count(Source.POLICY) and measures["response_tokens"] == len(policy)


@pytest.mark.slow
def test_calls_of_many_episodes_share_a_small_cache(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    """More episodes make calls than there are slots and cache blocks: each result is the same as when run alone."""
    jobs = [Job(question, n, 0, n) for n, question in enumerate(tiny_questions[:6])]
    few = {"max_num_seqs": 2, "kv_tokens": 400, "max_passage_tokens": 200, "kv_block_size": 16}
    together = tiny_rollout(system(), **few).run(jobs, 1.0)
    for job, trajectory in zip(jobs, together, strict=True):
        (alone,) = tiny_rollout(system(), max_passage_tokens=200).run([job], 1.0)
        assert [s.ids for s in alone.segments] == [s.ids for s in trajectory.segments]
        (call,) = trajectory.branches.values()
        assert [s.ids for s in alone.branches["call 1"].segments] == [s.ids for s in call.segments]


def test_limits_of_a_call(written: Written) -> None:
    # max_tokens ends the turn without a tag, and the episode continues with the text so far.
    TURNS.clear()
    turns = ["<search>x</search>", "no</answer>"]
    _, trajectory = written(turns, system(), QUESTION, {"call 1": "y" * 12}, max_passage_tokens=200)
    assert TURNS[0].stop is None and TURNS[0].text.startswith(b"yyy") and trajectory.reason == "answered"

    def wide(question: Question, config: Any) -> Any:
        yield Prompt(config.template, question.question)
        yield SubCall(BranchPrompt(Prompt(READ, "who " * 400), (), ("</answer>",)))
        raise AssertionError("there was no room for it")

    _, trajectory = written([], system(wide), QUESTION)
    assert trajectory.reason == "context" and len(trajectory.segments) == 1 and not trajectory.branches

    # Passages over the budget are cut and counted.
    many = tuple(Passage(str(n), "T", "word " * 30) for n in range(3))

    def long(question: Question, config: Any) -> Any:
        yield Prompt(config.template, question.question)
        yield SubCall(BranchPrompt(Prompt(READ, question.question, many), (), ("</answer>",), 1))
        yield Feedback("done")
        return "ended"

    run, trajectory = written([], system(long), QUESTION, {"call 1": "y"}, max_passage_tokens=60)
    assert trajectory.reason == "ended" and run.clock.cut_search_tokens > 0
    assert trajectory.branches["call 1"].count(Source.POLICY) == 1
    with pytest.raises(UserError, match=r"fewer than retrieval\.passage_format takes"):
        written([], system(long), QUESTION, max_passage_tokens=6)
