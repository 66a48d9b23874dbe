"""IGPO: the requests of its episode, and how a turn's gain reaches the tokens of that turn."""

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from math import exp, fsum

import pytest
from episode_cases import drive, kinds
from rollout_cases import EOS

from thresher.engine.config.sections import GrpoSection
from thresher.engine.episode import Score
from thresher.engine.protocol.trajectory import turns
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.engine.scoring.score import score
from thresher.engine.systems import load_system
from thresher.engine.training.credit import token_advantages
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question

QUESTION = Question("q", "Who mapped Glass Bay?", ("Anna Bell", "Bell"))


def test_the_gold_is_scored_before_each_turn() -> None:
    texts = ["<search>Glass Bay</search>", "nothing", "<answer>Anna Bell</answer>"]
    requests, reason = drive(load_system("igpo", {}), QUESTION, texts, repeat([]))
    step = ["Score", "Generate"]
    assert kinds(requests) == ["Prompt", *step, "Search", "Retrieved", *step, "Feedback", *step]
    assert {r for r in requests if isinstance(r, Score)} == {Score("\n<answer>", " Anna Bell")} and reason == "answered"
    without, _ = drive(load_system("igpo", {"score": False}), QUESTION, texts, repeat([]))
    assert without == [r for r in requests if not isinstance(r, Score)]
    assert drive(load_system("igpo", {}), replace(QUESTION, golds=()), texts, repeat([]))[0] == without


def test_gains_reach_the_tokens_of_their_turns(
    script: Callable[..., None], tiny_rollout: Callable[..., Rollout], tiny_tokenizer: Tokenizer
) -> None:
    """One sample searches and answers, the other answers at once. Advantages are those of the formula."""
    search, right, wrong = "<search>Glass Bay</search>", "<answer>Anna Bell</answer>", "<answer>Bo</answer>"
    script({7: [search, right + EOS], 8: [wrong + EOS]})
    system = load_system("igpo", {})
    trajectories = tiny_rollout(system).run([Job(QUESTION, 0, number, 7 + number) for number in range(2)], 1.0)
    values = [[exp(fsum(s["logprobs"]) / len(s["logprobs"])) for s in one.scores] for one in trajectories]
    assert list(map(len, values)) == [2, 1] and values[0][0] == pytest.approx(values[1][0], abs=1e-6)
    found = score([QUESTION] * 2, trajectories, system, tiny_tokenizer)
    gain = values[0][1] - values[0][0]
    assert [entry.result.turns for entry in found] == [pytest.approx([gain, 0.0]), [0.0]]
    assert [entry.result.reward for entry in found] == [1.0, 0.0]
    grpo = GrpoSection(advantage="turn", baseline="leave_one_out", scale="none")
    tokens = token_advantages(found, [1.0, 0.0], [0.0, 0.0], [{}, {}], grpo, tiny_tokenizer, 0)
    lengths = [[len(turn.ids) for turn in turns(one)] for one in trajectories]
    # Returns-to-go: gain + 1 and 1; 0. The second sample's return of a turn that it did not reach counts as 0.
    wanted = [[1 + gain] * lengths[0][0] + [1.0] * lengths[0][1], [-1 - gain] * lengths[1][0]]
    assert tokens == [pytest.approx(one) for one in wanted]
