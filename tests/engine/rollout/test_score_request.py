"""Score: log-probs of a given text, from an episode to its reward and its files, never in the loss."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from batch_invariance import needs_invariant_policy
from logprob_cases import Written as Fresh
from logprob_cases import assert_logprobs_are_fresh
from rollout_cases import EOS, Make, Written, make_jobs, record, system_of

from thresher.common.errors import UserError
from thresher.engine.config.sections import GrpoSection
from thresher.engine.decoding.decoder import Decoder
from thresher.engine.decoding.scheduler import TokenSequence
from thresher.engine.episode import BranchPrompt, Episode, EpisodeConfig, Feedback, Generate, KeptSpan, Prompt, Score
from thresher.engine.evaluation.api_rollout import chat_rollout
from thresher.engine.evaluation.run import Generated, read_generated, write_generated
from thresher.engine.packing import build_train_sequences
from thresher.engine.protocol.trajectory import Trajectory, check_trajectory
from thresher.engine.scoring.score import Judges, check_all, score
from thresher.engine.scoring.transcripts import read_reward_input
from thresher.engine.store.run_folder import TRAJECTORY, check_shape
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult

OWN = "Say who: {question}\n"
FOUND: list[list[float]] = []


def scoring(question: Question, config: EpisodeConfig, ask: bool = True) -> Episode:
    """Score a text, make a turn, a line, score two texts, and make a turn."""
    gold = question.golds[0]

    def asked(context: BranchPrompt | str) -> Any:
        if ask:
            FOUND.append((yield Score(context, gold)))

    yield Prompt(config.template, question.question)
    yield from asked("\n<answer> ")
    turn = yield Generate(("</search>",), 12)
    yield Feedback("Go on.\n")
    yield from asked("")
    yield from asked(BranchPrompt(Prompt(OWN, question.question), (KeptSpan(0, len(turn.text)), "\n<answer>"), ()))
    yield Generate(("</answer>",), 12)
    return "answered"


def reward(attempt: RewardInput) -> RewardResult:
    return RewardResult(sum(sum(one["logprobs"]) for one in attempt.scores), {"scores": len(attempt.scores)})


SYSTEM = replace(system_of(scoring), reward=reward)
SILENT = system_of(lambda question, config: scoring(question, config, ask=False))


def contexts(run: Any, question: Question, trajectory: Trajectory) -> list[list[int]]:
    """Return the context of each of the three texts."""
    segments, encode = trajectory.segments, run.tokenizer.encode_template
    prompt, turn, line = (segment.ids for segment in segments[:3])
    own = encode(OWN.replace("{question}", question.question))
    return [prompt + encode("\n<answer> "), prompt + turn + line, own + turn + encode("\n<answer>")]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_it_is_a_fresh_forward_s_and_changes_no_sample(
    temperature: float, tiny_rollout: Make, tiny_questions: list[Question]
) -> None:
    jobs, few = make_jobs(tiny_questions[:4], 2), {"max_num_seqs": 3, "kv_tokens": 400, "kv_block_size": 16}
    plain = tiny_rollout(SILENT, **few).run(jobs, temperature)
    run = tiny_rollout(SYSTEM, **few)
    needs_invariant_policy(run.policy)
    FOUND.clear()
    trajectories = run.run(jobs, temperature)
    assert [record(one) for one in trajectories] == [record(one) for one in plain]
    fresh = list[Fresh]()
    for job, one in zip(jobs, trajectories, strict=True):
        (gold,) = job.question.golds
        text_ids = run.tokenizer.encode(gold)
        assert [(s["context"], s["text"], s["turns"]) for s in one.scores] == [
            ("\n<answer> ", gold, 0),
            ("", gold, 1),
            (None, gold, 1),
        ]
        for before, found in zip(contexts(run, job.question, one), one.scores, strict=True):
            places = range(len(before), len(before) + len(text_ids))
            fresh.append(([*before, *text_ids], places, found["logprobs"], temperature or 1.0))
        assert check_trajectory(one, run.tokenizer, SYSTEM.tags, run.limits.max_context) == []
    assert_logprobs_are_fresh(run.policy, run.tokenizer.vocab_size, fresh)
    # The episode received what is recorded.
    assert sorted(FOUND) == sorted(found["logprobs"] for one in trajectories for found in one.scores)
    # It gives no row of the update.
    sequences, without = (build_train_sequences(x, [1.0] * len(jobs), GrpoSection()) for x in (trajectories, plain))
    assert sequences == without


def test_the_next_turn_s_context_is_what_is_kept(
    tiny_rollout: Make, tiny_questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but its last token is kept, which the turn feeds; of a context that no turn continues, nothing is kept."""
    asked: list[tuple[list[int], int]] = []
    begin = Decoder.score

    def beginning(decoder: Decoder, sequence: TokenSequence) -> None:
        asked.append((sequence.ids, sequence.keep_at))
        begin(decoder, sequence)

    monkeypatch.setattr(Decoder, "score", beginning)
    (job,) = make_jobs(tiny_questions[:1], 1)
    (trajectory,) = tiny_rollout(SYSTEM).run([job], 1.0)
    prompt, turn, line = (segment.ids for segment in trajectory.segments[:3])
    goes_on = [ids[: keep_at + 1] for ids, keep_at in asked if keep_at]
    assert goes_on == [prompt, prompt + turn + line] and [keep_at for _, keep_at in asked][2] == 0


def test_it_is_stored_and_read_back(written: Written, tiny_tokenizer: Tokenizer) -> None:
    question = Question("q", "Who?", ("Bel",))
    run, trajectory = written(["<search>x</search>", "no" + EOS], SYSTEM, question)
    (scored,) = score([question], [trajectory], SYSTEM, tiny_tokenizer, Judges())
    check_all([scored], tiny_tokenizer, SYSTEM.tags, run.limits.max_context)
    assert scored.result.parts["scores"] == 3 and scored.result.reward < 0
    line = json.loads(json.dumps(scored.to_dict(tiny_tokenizer)))
    check_shape(line, TRAJECTORY, "t.jsonl:1")
    for tokenizer in (tiny_tokenizer, None):
        attempt = read_reward_input(line, "t.jsonl:1", tokenizer)
        assert reward(attempt) == scored.result  # the very float
    entry = Generated(trajectory, 1.0, [])
    assert read_generated(json.loads(json.dumps(write_generated(entry))), "t.jsonl:1") == entry
    for broken in (
        [{"text": "Bel"}],
        "Bel",
        [{**line["scores"][0], "logprobs": ["-1"]}],
        [{**line["scores"][0], "turns": True}],
    ):
        with pytest.raises(UserError, match=r"^t\.jsonl:1: scores: expected a list of objects with context, text, "):
            read_reward_input({**line, "scores": broken}, "t.jsonl:1")
        with pytest.raises(UserError, match=r"^t\.jsonl:1: expected a trajectory as it was written"):
            stored = write_generated(entry)
            stored["trajectory"]["scores"] = broken
            read_generated(stored, "t.jsonl:1")
    trajectory.scores[0]["logprobs"].append(-1.0)
    assert len(check_trajectory(trajectory, tiny_tokenizer, SYSTEM.tags, run.limits.max_context)) == 1


def asking(context: Any, text: Any) -> Callable[..., Episode]:
    def episode(question: Question, config: EpisodeConfig) -> Episode:
        yield Prompt(config.template, question.question)
        yield Score(context, text)
        return "ended"

    return episode


@pytest.mark.parametrize(
    ("context", "text", "said"),
    [
        ("", "", r"^question q: test requests a Score of ''; expected a text that is not empty$"),
        ("", 7, r"^question q: test requests a Score of 7; expected a text that is not empty$"),
        ("", "a\ud800", r"^question q: test requests a Score of a text that cannot be encoded: .*lone surrogate"),
        (BranchPrompt(Prompt("", ""), (), ()), "Bel", r"^question q: test requests a Score in an empty context; "),
    ],
)
def test_what_cannot_be_scored_is_refused(context: Any, text: Any, said: str, tiny_rollout: Make) -> None:
    run = tiny_rollout(system_of(asking(context, text)))
    with pytest.raises(UserError, match=said):
        run.run(make_jobs([Question("q", "Who?", ("Bel",))]), 1.0)


def test_a_text_without_room_ends_the_trajectory(tiny_rollout: Make, tiny_tokenizer: Tokenizer) -> None:
    question = Question("q", "Who?", ("Bel",))
    length = len(tiny_rollout(SYSTEM).prompt(question))
    for room, reason in ((8, "ended"), (7, "context")):
        text = tiny_tokenizer.decode(tiny_tokenizer.encode("x" * 20)[:8])
        assert len(tiny_tokenizer.encode(text)) == 8
        run = tiny_rollout(system_of(asking("", text)), max_context=length + room)
        (trajectory,) = run.run(make_jobs([question]), 1.0)
        assert trajectory.reason == reason and len(trajectory.scores) == (reason == "ended")


def test_a_server_is_refused() -> None:
    run = chat_rollout(None, SYSTEM, EpisodeConfig("{question}", 2), None, 1, "{text}", 9)
    with pytest.raises(UserError, match=r"^test needs log-probs of a text \(Score\), which a server does not give; "):
        run.run(make_jobs([Question("q", "Who?", ("Bel",))]), 1.0)
