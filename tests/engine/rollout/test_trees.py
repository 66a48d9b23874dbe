"""Rollouts that are trees: samples continue from the turns of others as if they had written them, whatever runs next to
them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_invariance import needs_invariant_policy
from model_cases import make_config
from rollout_cases import Make, assert_logprobs_match, record, system_of

from thresher.common.errors import UserError
from thresher.common.records import write_records
from thresher.engine.config.sections import GrpoSection, ToolSection
from thresher.engine.decoding.decoder import Decoder
from thresher.engine.episode import (
    BranchPrompt,
    Feedback,
    Fold,
    Generate,
    KeptSpan,
    Prompt,
    Retrieved,
    Score,
    Search,
    SubCall,
    Tool,
)
from thresher.engine.protocol.trajectory import (
    Trajectory,
    check_trajectory,
    inherited_tokens,
    inherited_trained_tokens,
    trained_contexts,
    turns,
)
from thresher.engine.rollout.rollout import Job
from thresher.engine.rollout.tools import HostedTool, Toolbox, load_tools
from thresher.engine.rollout.trees import TreeShape
from thresher.engine.scoring.score import Scored
from thresher.engine.training.credit import branch_advantages, branch_rewards, token_advantages
from thresher.policy.config import DeltaShape
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult, Source

NOTHING = RewardInput(pieces=[], golds=())
TAGS = ("<search>", "</search>", "<information>", "</information>")
MOST = 3  # turns


def walking(question: Question, config: Any) -> Any:
    """Make turns of at most eight tokens. Depending on its text, passages, a line, nothing or the end follow a turn."""
    yield Prompt(config.template, question.question)
    for _ in range(MOST):
        turn = yield Generate(("e", "a"), 8)
        choice = sum(turn.text) % 5
        if choice == 0:
            return "ended"
        if choice == 1:
            yield Retrieved((yield Search(question.question)), "<information>", "</information>")
        elif choice > 2:
            yield Feedback(f" {choice}")
    return "turns"


def folding(question: Question, config: Any) -> Any:
    """Score after each turn, then fold to it; after the first turn a call is trained."""
    yield Prompt(config.template, question.question)
    prompt, end = Prompt(config.template, question.question), 0
    for number in range(MOST):
        turn = yield Generate(("e", "a"), 8)
        start, end = end, end + len(turn.text)
        yield Score(" so", "Anna")
        if sum(turn.text) % 5 == 0:
            return "ended"
        if number == 0:
            yield SubCall(BranchPrompt(prompt, (), ("e",), 4), trained=True)
        yield Fold(BranchPrompt(prompt, (KeptSpan(start, end),)))
    return "turns"


def jobs_of(questions: Sequence[Question], size: int, base: int = 0) -> list[Job]:
    return [Job(q, base + g, n, 1000 * (base + g) + n) for g, q in enumerate(questions) for n in range(size)]


def inherited(trajectory: Trajectory, group: Sequence[Trajectory]) -> int:
    """Return the number of segments that a sample inherited. Each equals that of the sample from which it continued."""
    if trajectory.forked is None:
        return 1
    sample, count = trajectory.forked
    found, written = 0, 0
    for segment in trajectory.segments:
        written += segment.source == "policy"
        if written > count:
            break
        found += 1
    assert trajectory.segments[:found] == group[sample].segments[:found]
    assert len(list(turns(group[sample]))) > count or count == 0  # the end of a last turn is no node
    return found


def test_samples_go_on_from_the_nodes_of_their_own_tree(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    """Check two trees with two nodes in each of two rounds. Samples 0 and 1 begin, 2 and 3 continue in tree 0 and 4 and
    5 in tree 1, then 6 and 7, and 8 and 9. Log-probs are those of a forward over the whole sample."""
    run = tiny_rollout(system_of(walking, TAGS))
    jobs = jobs_of(tiny_questions[:5], 10)
    found = run.run(jobs, 1.0, shape=TreeShape(2, 2))
    assert [(one.group, one.sample) for one in found] == [(job.group, job.sample) for job in jobs]
    tree_of = [0, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    depths: Counter[int] = Counter()
    for group in range(5):
        own = found[group * 10 : (group + 1) * 10]
        assert [one.forked is None for one in own] == [True] * 2 + [False] * 8
        for one in own[2:]:
            assert one.forked is not None and tree_of[one.forked[0]] == tree_of[one.sample]
            assert one.sample >= 6 or one.forked[0] < 2  # the first round knows only the first samples
            depths[one.forked[1]] += 1
        for one in own:
            assert len(one.segments) > inherited(one, own) and one.reason in ("ended", "turns")
            assert check_trajectory(one, run.tokenizer, TAGS, run.limits.max_context) == []
    assert set(depths) == {0, 1, 2}
    assert_logprobs_match(run, found, 1.0)
    taken = sum(map(inherited_tokens, found))
    assert taken == sum(len(s.ids) for one in found for s in [*turns(one)][: (one.forked or (0, 0))[1]]) > 0
    assert run.clock.forks == 40
    written = sum(len(s.ids) for one in found for s in turns(one))
    assert run.clock.sampled_tokens == written - taken


def test_no_bit_depends_on_the_cache_or_on_other_questions(
    tiny_rollout: Make, tiny_questions: list[Question], tiny_policy: Policy
) -> None:
    """The oracle computes every sample's prefix anew. A small cache, other questions, their order and drafts change
    nothing."""
    needs_invariant_policy(tiny_policy)
    shape, jobs = TreeShape(2, 2), jobs_of(tiny_questions[:4], 10)
    fresh = tiny_rollout(system_of(walking, TAGS), reuse=False, share_prefix=False)
    expected = [(record(one), one.forked) for one in fresh.run(jobs, 1.0, shape=shape)]
    for settings in ({}, {"max_num_seqs": 3, "kv_tokens": 800}, {"num_draft_tokens": 3}):
        run = tiny_rollout(system_of(walking, TAGS), **settings)
        assert [(record(one), one.forked) for one in run.run(jobs, 1.0, shape=shape)] == expected
        assert run.clock.prefilled_tokens < fresh.clock.prefilled_tokens / 2
    for group in range(4):
        own = jobs[group * 10 : (group + 1) * 10]
        found = [(record(one), one.forked) for one in run.run(own, 1.0, shape=shape)]
        assert found == expected[group * 10 : (group + 1) * 10]
    other = run.run([job for group in (3, 1, 0, 2) for job in jobs[group * 10 : (group + 1) * 10]], 1.0, shape=shape)
    assert [(record(one), one.forked) for one in other[:10]] == expected[30:]


def test_samples_go_on_from_episodes_that_fold_score_and_call(
    tiny_rollout: Make, tiny_questions: list[Question], tiny_policy: Policy
) -> None:
    """They inherit the contexts, scores and calls of earlier turns; each sampled token is trained once."""
    needs_invariant_policy(tiny_policy)
    jobs, shape, found = jobs_of(tiny_questions[:4], 10), TreeShape(2, 2), {}
    for reuse in (False, True):
        run = tiny_rollout(system_of(folding, TAGS), reuse=reuse)
        found[reuse] = run.run(jobs, 1.0, shape=shape)
    assert [record(one) for one in found[True]] == [record(one) for one in found[False]]
    depths = Counter[int]()
    for number, one in enumerate(found[True]):
        assert check_trajectory(one, run.tokenizer, TAGS, run.limits.max_context) == []
        assert [score["turns"] for score in one.scores] == [n + 1 for n in range(len(list(turns(one))))]
        if one.forked is None:
            continue
        parent, taken = found[True][number // 10 * 10 + one.forked[0]], one.forked[1]
        depths[taken] += 1
        inherited(one, found[True][number // 10 * 10 :])
        assert one.scores[:taken] == parent.scores[:taken]
        if taken:
            assert one.branches["call 1"].segments == parent.branches["call 1"].segments
            assert not one.branches["call 1"].in_loss
    # Paths count tokens no matter which sample wrote them, so all samples of the first turn weigh its call equally.
    assert set(depths) == {0, 1, 2}
    for one in found[True]:
        calls_tokens = sum(branch.count(Source.POLICY) for branch in one.branches.values())
        own = sum(len(context.positions) for context in trained_contexts(one))
        assert own + inherited_trained_tokens(one) == one.count(Source.POLICY) + calls_tokens
    trained = [sum(len(context.positions) for context in trained_contexts(one)) for one in found[True]]
    assert sum(trained) == run.clock.sampled_tokens
    # A reward names the call in each sample that has it; the samples that inherited it do not train it.
    calls = [{name: float(n % 2) for name in one.branches} for n, one in enumerate(found[True])]
    results = [RewardResult(float(n % 3), branches=rewards) for n, rewards in enumerate(calls)]
    scored = [Scored(tiny_questions[0], one, result, NOTHING) for one, result in zip(found[True], results, strict=True)]
    grpo = GrpoSection(advantage="tree")
    rewards = [result.reward for result in results]
    branches = branch_advantages(branch_rewards(scored, False, 0), [0] * len(scored), grpo)
    assert list(map(len, token_advantages(scored, rewards, rewards, branches, grpo, run.tokenizer, 0))) == trained


def test_samples_of_a_model_with_states_go_on_from_where_they_were_kept(
    tiny_rollout: Make, tiny_questions: list[Question], tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are kept at the ends of turns; otherwise only those of the prompt would be."""
    types = ("linear_attention", "full_attention", "linear_attention")
    own: dict[str, Any] = {"model_type": "qwen3_5_text", "num_hidden_layers": 3, "layer_types": types, "head_dim": 16}
    own |= {"partial_rotary_factor": 0.25, "delta": DeltaShape(2, 4, 8, 8, 4), "eos_token_ids": ()}
    config = make_config(**own, vocab_size=tiny_tokenizer.vocab_size, max_position_embeddings=512)
    policy = init_policy(config, 1).requires_grad_(False)
    needs_invariant_policy(policy)
    jobs, shape = jobs_of(tiny_questions[:4], 6), TreeShape(2, 2)

    def played(**settings: Any) -> tuple[list[Any], int]:
        run = tiny_rollout(system_of(walking, TAGS), policy=policy, max_num_seqs=400, **settings)  # 100 snapshots
        found = run.run(jobs, 1.0, shape=shape)
        return [(record(one), one.forked) for one in found], run.clock.prefilled_tokens

    fresh, kept = played(reuse=False), played()
    monkeypatch.setattr(Decoder, "keep_states", lambda *_: None)
    prompts_alone = played()
    assert fresh[0] == kept[0] == prompts_alone[0]
    assert kept[1] < prompts_alone[1] < fresh[1]


class Counting:
    """A tool that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.__name__ = "count"

    def __call__(self, arguments: dict[str, Any]) -> str:
        self.calls.append(arguments["text"])
        return f"seen {len(arguments['text'])}"


def asking(question: Question, config: Any) -> Any:
    """Make every kind of request before each of three turns."""
    yield Prompt(config.template, question.question)
    text = ""
    for number in range(3):
        result = yield Tool("count", {"text": text})
        yield Retrieved(result.text, "<information>", "</information>")
        read = yield SubCall(BranchPrompt(Prompt("{question} in short:", question.question), (), (), 3))
        hits = yield Search(question.question)
        hits.reverse()  # the episode may change a result that it received
        yield Retrieved(hits, "<information>", "</information>")
        yield Feedback(f" {len(read.text)} {number}")
        turn = yield Generate((), 4)
        text += turn.text.decode("utf-8", "replace")
    return "ended"


def test_nothing_is_asked_again(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    count = Counting()
    box = Toolbox({"count": HostedTool(name="count", function=count)})
    run = tiny_rollout(system_of(asking, TAGS), tools=box, max_context=700)
    jobs = jobs_of(tiny_questions[:4], 6)
    found = run.run(jobs, 1.0, shape=TreeShape(2, 2))
    # Before its next turn the other sample had made one more request; a sample from the prompt makes all requests.
    taken = sum(one.forked[1] + 1 for one in found if one.forked and one.forked[1])
    assert taken > 0 and len(count.calls) == run.clock.search_queries == 3 * len(found) - taken
    for one in found:
        assert len(one.tools) == len(one.searches) == len(one.branches) == 3 and list(one.branches) == [
            "call 1",
            "call 2",
            "call 3",
        ]
    assert {one.forked[1] for one in found if one.forked} == {0, 1, 2}


def test_a_tree_repeats_from_its_tools_record(
    tiny_rollout: Make, tiny_questions: list[Question], tmp_path: Path
) -> None:
    """An inherited result is in the sample's own record too, so its next call is found after it."""
    count = Counting()
    jobs, shape = jobs_of(tiny_questions[:3], 6), TreeShape(2, 2)
    system = system_of(asking, TAGS)
    tool = HostedTool(name="count", function=lambda arguments: f"{count(arguments)}, call {len(count.calls)}")
    first = tiny_rollout(system, tools=Toolbox({"count": tool}), max_context=700)
    found, called = first.run(jobs, 1.0, shape=shape), len(count.calls)
    write_records(tmp_path / "first.jsonl", [one.to_dict(first.tokenizer) for one in found])
    box = load_tools({"count": ToolSection(function="gone.py:f")}, str(tmp_path / "first.jsonl"), lambda _: None)
    again = tiny_rollout(system, tools=box, max_context=700).run(jobs, 1.0, shape=shape)
    assert [(one.tools, one.forked, one.ids()) for one in again] == [(o.tools, o.forked, o.ids()) for o in found]
    assert len(count.calls) == called and any(one.forked and one.forked[1] for one in found)


def test_an_episode_that_is_no_function_of_what_it_is_sent_is_refused(
    tiny_rollout: Make, tiny_questions: list[Question]
) -> None:
    made = []

    def moody(question: Question, config: Any) -> Any:
        made.append(question)
        number = len(made)
        yield Prompt(config.template, question.question)
        for _ in range(3):
            yield Generate((), 4)
            yield Feedback(f" {number}")
        return "ended"

    def short(question: Question, config: Any) -> Any:
        made.append(question)
        yield Prompt(config.template, question.question)
        for _ in range(4 - len(made)):
            yield Generate((), 4)
            yield Feedback(" on")
        return "ended"

    for episode in (moody, short):
        made.clear()
        run = tiny_rollout(system_of(episode, TAGS))
        with pytest.raises(UserError, match=r"test: the episode requested something else .* or set rollout.trees = 0"):
            for seed in range(9):  # the prompt may be drawn
                made.clear()
                run.run(
                    [replace(job, seed=job.seed + seed) for job in jobs_of(tiny_questions[:1], 3)],
                    1.0,
                    shape=TreeShape(1, 2),
                )
