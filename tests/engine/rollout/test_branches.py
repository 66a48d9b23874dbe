"""Branches: hidden text is absent from a newly assembled context, tokens are kept whole, and nothing written in a
branch reaches the trajectory's own ids."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from batch_invariance import needs_invariant_policy
from hypothesis import given
from hypothesis import strategies as st
from rollout_cases import EOS, Make, Written, assert_logprobs_match, record, system_of

from thresher.common.errors import UserError
from thresher.engine.baselines import load_baseline
from thresher.engine.config.sections import GrpoSection
from thresher.engine.episode import BranchPrompt, Feedback, Generate, KeptSpan, Prompt, SpawnBranches, System, Turn
from thresher.engine.packing import TrainSequence, build_train_sequences
from thresher.engine.protocol.prompts import PromptBatch, truncate_passages, with_passages
from thresher.engine.protocol.trajectory import Segment, Trajectory, check_trajectory
from thresher.engine.rollout.contexts import branch_seed, kept_ids
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.engine.scoring.score import Judges, check_all, score
from thresher.engine.systems import load_system
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer, train_bpe
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardResult, Source
from thresher.rewards.tags import escape_tags, final_answer

TEMPLATE = "{passages}\nQuestion: {question}\n"
TAGS = ("<reason>", "</reason>", "<extract>", "</extract>", "<answer>", "</answer>")
QUESTION = Question("q", "Who?", ("Bel",), passages=(Passage("a", "A", "Bel did."), Passage("b", "B", "Nobody.")))


def episode(question: Question, config: Any) -> Any:
    yield Prompt(TEMPLATE, question.question, question.passages)
    turn = yield Generate(("</extract>",))
    if turn.stop is None:
        return "ended"
    cut = turn.text.index(b"</reason>") + len(b"</reason>")
    end = turn.text.index(b"</extract>") + len(b"</extract>")
    whole, bare = Prompt(TEMPLATE, question.question, question.passages), Prompt(TEMPLATE, question.question)
    yield SpawnBranches(
        {
            "rationale": BranchPrompt(whole, (KeptSpan(0, cut), "<answer>"), ("</answer>",)),
            "evidence": BranchPrompt(bare, (KeptSpan(cut, end), "<answer>"), ("</answer>",)),
        }
    )
    yield Generate(("</answer>",))
    return "answered"


SYSTEM = System("test", TAGS, episode, lambda attempt: RewardResult(0.0, {}, None), TEMPLATE, given_passages=True)


TRUNK = ["<reason>Bel it is</reason><extract>Bel did.</extract>", "<answer>Bel</answer>"]


def texts(trajectory: Trajectory, tokenizer: Tokenizer) -> list[tuple[Source, str]]:
    return [(segment.source, tokenizer.decode(segment.ids)) for segment in trajectory.segments]


def test_what_is_masked_is_absent(written: Written, tiny_tokenizer: Tokenizer) -> None:
    branches = {"rationale": "Bel</answer>", "evidence": "Nobody</answer>"}
    run, trajectory = written(TRUNK, SYSTEM, QUESTION, branches, max_passage_tokens=200)
    passages = 'Doc 1(Title: "A") Bel did.\nDoc 2(Title: "B") Nobody.'
    for name, before in (
        ("rationale", f"{passages}\nQuestion: Who?\n<reason>Bel it is</reason><answer>"),
        ("evidence", "\nQuestion: Who?\n<extract>Bel did.</extract><answer>"),
    ):
        found = texts(trajectory.branches[name], tiny_tokenizer)
        assert found == [(Source.PROMPT, before), (Source.POLICY, branches[name])]
    # Its log-probs are those of a fresh forward over its own ids, which never contained the hidden text.
    assert_logprobs_match(run, [trajectory, *trajectory.branches.values()], 1.0)
    assert [segment.source for segment in trajectory.segments] == [Source.PROMPT, Source.POLICY, Source.POLICY]
    assert trajectory.reason == "answered" and run.clock.branches == 2
    # Tokens of branches are not trained: the update's rows are the trunk's tokens, each with its own log-prob.
    (item,) = build_train_sequences([trajectory], [1.0], GrpoSection())
    assert isinstance(item, TrainSequence) and [item.ids[row] for row in item.positions] == [
        token for text in TRUNK for token in tiny_tokenizer.encode_template(text)
    ]
    (scored,) = score([QUESTION], [trajectory], SYSTEM, tiny_tokenizer, Judges())
    check_all([scored], tiny_tokenizer, TAGS, run.limits.max_context)
    pieces = scored.attempt.branches["evidence"]
    assert [piece.text for piece in pieces if piece.source is Source.POLICY] == [b"Nobody</answer>"]
    stored = scored.to_dict(tiny_tokenizer)["branches"]["rationale"]
    assert [segment["source"] for segment in stored] == ["prompt", "policy"]


@pytest.mark.slow
def test_hidden_tokens_change_no_bit_of_a_branch(
    tiny_rollout: Make, tiny_policy: Policy, script: Callable[..., None]
) -> None:
    """Every token that a branch hides is replaced; blocks that it shares with its trajectory and others stay in use."""
    needs_invariant_policy(tiny_policy)
    other = replace(QUESTION, passages=(Passage("c", "C", "Carl was it."), Passage("d", "D", "All of them.")))
    long = "Bel it is, said all who were there and saw it"
    cases = {
        "rationale": (QUESTION, long, ("Bel did.", "Nobody and nothing else")),
        "evidence": (other, "Somebody else thought of it", ("Bel did.", "Bel did.")),
    }
    for name, (question, reason, evidences) in cases.items():
        found = []
        for asked, thought, evidence in ((QUESTION, long, evidences[0]), (question, reason, evidences[1])):
            trunk = [f"<reason>{thought}</reason><extract>{evidence}</extract>", f"<answer>{evidence}</answer>"]
            script(
                {seed: list(trunk) for seed in (7, 8)}
                | {branch_seed(seed, x): ["Bel</answer>"] for x in cases for seed in (7, 8)}
            )
            run = tiny_rollout(SYSTEM, max_passage_tokens=200, kv_block_size=16, max_turn_tokens=150, max_context=480)
            trajectories = run.run([Job(asked, 0, sample, 7 + sample) for sample in range(2)], 1.0)
            assert run.clock.shared_tokens > 0
            found.append([record(t.branches[name])[3] for t in trajectories])
        assert found[0] == found[1], name


def test_branches_are_batch_invariant(tiny_rollout: Make, tiny_policy: Policy) -> None:
    """Turns end at letters that random weights soon write, so branches are reached without a script."""
    needs_invariant_policy(tiny_policy)

    def soon(question: Question, config: Any) -> Any:
        yield Prompt("{question}", question.question)
        turn = yield Generate(("e", "a"))
        half = len(turn.text) // 2
        again = Prompt("{question}", question.question)
        yield SpawnBranches({name: BranchPrompt(again, (KeptSpan(0, half), name), ("o", "e")) for name in ("x", "y")})
        yield Generate(("o",))
        return "answered"

    system = system_of(soon, ())
    questions = [Question(f"q{n}", "Who is that" + "?" * (n % 5), ("a",)) for n in range(12)]
    jobs = [Job(question, group, n, 100 * group + n) for group, question in enumerate(questions) for n in range(2)]

    def branches(trajectories: Sequence[Any]) -> list[Any]:
        return [(name, record(branch)) for one in trajectories for name, branch in one.branches.items()]

    batch = branches(tiny_rollout(system).run(jobs, 1.0))
    single = tiny_rollout(system, max_num_seqs=1)
    assert len(batch) >= 8 and len({len(segments[1][1]) for _, (*_, segments) in batch}) > 2
    assert branches([single.run([job], 1.0)[0] for job in jobs]) == batch


def test_a_branch_without_room_is_counted_and_left_out(
    tiny_rollout: Make, tiny_tokenizer: Tokenizer, written: Written
) -> None:
    trunk = ["<reason>x</reason><extract>y</extract>", "<answer>Bel</answer>"]
    prompt = len(tiny_rollout(SYSTEM, max_passage_tokens=200).prompt(QUESTION))
    total = prompt + sum(len(tiny_tokenizer.encode(text)) for text in trunk)

    def long(question: Question, config: Any) -> Any:
        yield Prompt(TEMPLATE, question.question, question.passages)
        yield Generate(("</extract>",))
        again = Prompt(TEMPLATE, "Who?", question.passages)
        yield SpawnBranches({"x": BranchPrompt(again, (KeptSpan(0, 10**6), "<answer>" * 20), ("</answer>",))})
        yield Generate(("</answer>",))
        return "answered"

    system = replace(SYSTEM, episode=long)
    run, trajectory = written(trunk, system, QUESTION, max_passage_tokens=200, max_context=total + 2)
    assert trajectory.reason == "answered" and not trajectory.branches and run.clock.branches_without_room == 1


WORDS = ["<search>", "</answer>", "Anna Bell", " has", "rival", "é", "東", "?"]


@given(
    text=st.lists(st.sampled_from(WORDS), max_size=8).map("".join), start=st.integers(0, 60), size=st.integers(0, 60)
)
def test_kept_bytes_are_exact_and_whole_tokens_stay(
    text: str, start: int, size: int, tiny_tokenizer: Tokenizer
) -> None:
    written, length = tiny_tokenizer.encode(text), lambda token: len(tiny_tokenizer.token_bytes(token))
    kept = kept_ids(KeptSpan(start, start + size), written, tiny_tokenizer)
    expected = tiny_tokenizer.decode_bytes(written)[start : start + size]
    assert tiny_tokenizer.decode_bytes(kept) == expected
    # Whole tokens inside the span are kept as sampled, in order; each byte of the others becomes a token.
    ends = list(accumulate(map(length, written)))
    inside = [x for x, end in zip(written, ends, strict=True) if start <= end - length(x) and end <= start + size]
    found = iter(kept)
    assert all(token in found for token in inside)
    assert len(kept) - len(inside) == len(expected) - sum(map(length, inside))


def fitted(question: Question, run: Rollout) -> PromptBatch:
    return truncate_passages([question], run.system, run.episode_config, run.renderer)


@pytest.mark.parametrize("budget", [75, 90, 120, 150, 400])
def test_what_a_question_holds_is_what_its_prompt_shows(
    budget: int, tiny_rollout: Make, tiny_tokenizer: Tokenizer
) -> None:
    given = (
        Passage("s", "T", "Short."),
        *(Passage(str(n), f"T{n}", "Köln 東京 word </answer> " * 4) for n in range(2)),
    )
    long = Question("q", "Who?", ("B",), passages=given)
    run = tiny_rollout(SYSTEM, max_passage_tokens=budget)
    shown = fitted(long, run)
    (kept,) = shown.questions
    ids = run.prompt(kept)
    assert len(run.renderer.passages(kept.passages)) <= budget
    assert (shown.cut_questions, shown.cut_passages) == ((0, 0) if kept is long else (1, 2))
    assert (kept is long) == (len(run.renderer.passages(given)) <= budget)
    text = tiny_tokenizer.decode(ids)
    lines = text.splitlines()[:3]
    for number, (line, passage, before) in enumerate(zip(lines, kept.passages, given, strict=True), start=1):
        whole = escape_tags(f'Doc {number}(Title: "{passage.title}") {passage.text}', TAGS)
        assert line == whole and before.text.startswith(passage.text) and passage.title == before.title
    assert kept.passages[0] is given[0]  # the longest passages are cut first
    if kept is not long:
        with pytest.raises(UserError, match=f"take [0-9]+ tokens, more than rollout.max_passage_tokens = {budget}"):
            run.prompt(long)
        # Both cut passages end within a token of the same share, and the budget is not left unused.
        first, second = (run.renderer.line_tokens(n, kept.passages[n - 1]) for n in (2, 3))
        assert abs(first - second) <= 12 and len(run.renderer.passages(kept.passages)) > budget - 26
        (stored,) = score([kept], [Trajectory("q", 0, 0, [Segment(Source.PROMPT, ids)])], SYSTEM, tiny_tokenizer)
        assert stored.to_dict(tiny_tokenizer)["passages"][1] == {"title": "T0", "text": kept.passages[1].text}
        assert stored.attempt.passages == [(passage.title, passage.text) for passage in kept.passages]
        assert (
            shown.warning() == f"1 of 1 questions had passages cut to {budget} tokens; raise rollout.max_passage_tokens"
        )
    else:
        assert shown.warning() is None
    assert fitted(kept, run).questions == [kept]


def test_titles_give_way_last_and_a_budget_below_the_form_is_refused(tiny_rollout: Make) -> None:
    run = tiny_rollout(SYSTEM, max_passage_tokens=60)
    entitled = Question("q", "Who?", ("B",), passages=(Passage("a", "wide " * 40, "Bel."), Passage("b", "B", "Bo.")))
    (kept,) = fitted(entitled, run).questions
    assert kept.passages[0].text == "" and kept.passages[0].title.startswith("wide ") and kept.passages[1].text == "Bo."
    many = Question("q", "Who?", ("B",), passages=tuple(Passage(str(n), f"T{n}", "word " * 6) for n in range(30)))
    with pytest.raises(
        UserError, match=r"question q: rollout\.max_passage_tokens = 60 leaves .* of 30 passages, fewer"
    ):
        fitted(many, run)


def test_gold_indices_do_not_outlive_the_passages_that_they_number(tiny_index: Index) -> None:
    bare = Question("bare", "What is the spouse of Mia Noor?", ("Bel",), gold_indices=(1,))
    found, given = with_passages([bare, replace(QUESTION, gold_indices=(1,))], tiny_index, 2)
    assert (len(found.passages), found.gold_indices, given.gold_indices) == (2, None, (1,))


def test_what_no_prompt_shows_is_not_cut(tiny_rollout: Make) -> None:
    system = load_baseline("naive_rag", {"k": 1})
    run = tiny_rollout(system, template=system.template, max_passage_tokens=40, max_context=900)
    long = Question("q", "Who?", ("B",), passages=tuple(Passage(str(n), "", "word " * 40) for n in range(3)))
    (kept,) = fitted(*with_passages([long], None, 1, system.most_given), run).questions
    assert len(kept.passages) == 1 and 20 < len(kept.passages[0].text) < 200
    search = tiny_rollout("search_r1")
    assert fitted(long, search).questions == [long]


GLUED = "</extract><"  # Qwen's tokenizer splits it into `</`, `extract`, `><`


def with_glued_tokens(policy: Policy) -> dict[str, Any]:
    """Return a tokenizer with such a token, a policy for it, and room for its many tokens."""
    tokenizer = train_bpe(["><" * 9, "<answer>Bel</answer>"], 300, [EOS])
    assert any(tokenizer.token_bytes(token) == b"><" for token in tokenizer.encode("t><a"))
    config = policy.config.replace(
        vocab_size=tokenizer.vocab_size + 4, eos_token_ids=tuple(tokenizer.encode_template(EOS))
    )
    policy = init_policy(config, 0)
    return {"tokenizer": tokenizer, "policy": policy, "max_turn_tokens": 90, "max_passage_tokens": 200}


@pytest.mark.parametrize("between", [False, True])
def test_bytes_behind_a_stop_open_the_next_turn(between: bool, tiny_policy: Policy, written: Written) -> None:
    """The episode then reads the same text as the reward, unless something was appended in between."""
    heard: list[Turn] = []

    def listening(question: Question, config: Any) -> Any:
        yield Prompt("{question}", question.question)
        for stops in (("</extract>",), ("</answer>", "<answer>Bel</answer>"), ("</answer>",)):
            heard.append((yield Generate(stops)))
            if between:
                yield Feedback("Go on.")
        return "answered"

    glued = with_glued_tokens(tiny_policy)
    told = [f"<extract>e{GLUED}answer>Bel</answer> more{EOS}"]
    _, trajectory = written(told, replace(SYSTEM, episode=listening, given_passages=False), QUESTION, **glued)
    assert check_trajectory(trajectory, glued["tokenizer"], TAGS, 999) == []
    first, second, third = heard
    assert first == Turn(f"<extract>e{GLUED}".encode(), "</extract>") and third == Turn(f" more{EOS}".encode(), None)
    assert second.text == (b"" if between else b"<") + b"answer>Bel</answer>"
    assert second.stop == ("</answer>" if between else "<answer>Bel</answer>")  # the stop began before its turn
    answer = None if between else "Bel"
    assert second.inside("answer") == answer == final_answer(trajectory.pieces(glued["tokenizer"]))


def test_eviomnis_answer_right_behind_its_evidence_is_one(tiny_policy: Policy, written: Written) -> None:
    glued, system = with_glued_tokens(tiny_policy), load_system("eviomni", {})
    told, branches = f"<reason>r</reason><extract>e{GLUED}answer>Bel</answer>", ("rationale", "evidence")
    _, trajectory = written(
        [told], system, QUESTION, dict.fromkeys(branches, "Bel</answer>"), template=TEMPLATE, **glued
    )
    (scored,) = score([QUESTION], [trajectory], system, glued["tokenizer"])
    assert trajectory.reason == "answered" and scored.result.answer == "Bel" and scored.result.parts["format"] == 1
