"""Tests of every reward on arbitrary transcripts: bounds, equal results twice, and no text that takes long."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import GOLDS, LONG, PIECES, attempt

from thresher.rewards import (
    RewardInput,
    RewardResult,
    TextSegment,
    arena_reward,
    autorefine_reward,
    eval_rar_reward,
    evinote_reward,
    eviomni_reward,
    naive_reward,
    search_r1_reward,
)
from thresher.rewards.papers.evinote import NOTE_TAGS


def of_pieces(reward: Callable[..., RewardResult]) -> Callable[[RewardInput], RewardResult]:
    return lambda tried: reward(tried.pieces, tried.golds)


ACCURACIES: tuple[Any, ...] = ("em", "f1", "judge")
# name -> the reward, its largest value, and its parts (largest value each) whose weighted sum it is
REWARDS: dict[str, tuple[Callable[[RewardInput], RewardResult], float, dict[str, float]]] = {
    "search_r1": (of_pieces(search_r1_reward), 1, {"answer": 1}),
    "eval_rar": (of_pieces(eval_rar_reward), 1, {}),
    "autorefine": (of_pieces(autorefine_reward), 1, {}),
    "naive": (naive_reward, 2, {"format": 1, "answer": 1}),
    "eviomni": (eviomni_reward, 1, {"answer": 0.8, "length": 0.1, "format": 0.1}),
    "arena judge 2": (partial(arena_reward, accuracy="judge", max_indices=2), 13, {}),
}
for accuracy in ACCURACIES:
    parts = dict.fromkeys(("format", "accuracy", "relevance", "bonus"), 1.0)
    REWARDS[f"arena {accuracy}"] = (partial(arena_reward, accuracy=accuracy), 13, parts)
for name in NOTE_TAGS:
    REWARDS[f"evinote {name}"] = (partial(evinote_reward, variant=name), 2 if name.endswith("+EQR") else 1, {})


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    pieces=PIECES,
    golds=GOLDS,
    branches=st.dictionaries(st.sampled_from(["rationale", "evidence", "full"]), PIECES),
    gold=st.one_of(st.none(), st.lists(st.integers(1, 3), max_size=3)),
    number=st.sampled_from([0.0, 1.0]),
)
def test_any_bytes(
    pieces: list[TextSegment],
    golds: list[str],
    branches: dict[str, list[TextSegment]],
    gold: list[int] | None,
    number: float,
) -> None:
    more: dict[str, Any] = {"gold_indices": gold, "verdict": True, "chance": number / 2, "entailment": number}
    tried = RewardInput(pieces=pieces, golds=golds, branches=branches, passages=[("", "word " * 10)] * 3, **more)
    for name, (reward, most, weights) in REWARDS.items():
        result = reward(tried)
        assert 0 <= result.reward <= most and reward(tried) == result, name
        if weights:
            summed = sum(weight * (result.parts[part] or 0) for part, weight in weights.items())
            assert result.reward == pytest.approx(summed), name
        if name.startswith("arena"):
            three = [result.parts[part] for part in ("format", "accuracy", "relevance")]
            assert (result.parts["bonus"] == 10) == (three == [1, 1, 1])
        if name.startswith("evinote SEN") and result.reward:
            assert result.parts["format"] and (result.parts["answer"] or result.parts["notes"])
    either = evinote_reward(tried, marks="either").reward
    assert either >= evinote_reward(tried).reward


@pytest.mark.parametrize("number", range(len(LONG)))
def test_a_hundred_kilobytes(number: int) -> None:
    """Quadratic work on such a text would take minutes, which would be noticed without measuring time."""
    text = LONG[number]
    whole = all(tag not in text for tag in ("<answer>", "</answer>"))
    paris, search, passage = "<answer>Paris</answer>", "<search>q</search>", ("", text)
    noted = f"p:<summary>* a\n- b\n{text}</summary>{paris}"
    found = {
        "naive": naive_reward(attempt(f"p:<think>{text}</think>{paris}")),
        "arena": arena_reward(attempt(f"p:<relevance>{text}</relevance><analysis>{text}</analysis>{paris}")),
        "eviomni": eviomni_reward(
            attempt(f"p:<reason>{text}</reason><extract>{text}</extract>{paris}", passages=[passage])
        ),
        "evinote": evinote_reward(attempt(f"p:{search}", "r:x", noted, entailment=0.0)),
    }
    for name, result in found.items():
        inside = not whole or (name == "evinote" and "<summary>" in text)
        assert result.parts["format"] == float(not inside), name
    assert found["arena"].parts["relevance"] == 0.0
    lengths = found["eviomni"].parts["length_rationale"]
    assert lengths == pytest.approx(0.5 if any(map(str.isalnum, text)) else 0.0)
    pieces = attempt(f"p:<evaluate>{text} Lyon</evaluate><refine>{text} Lyon</refine>").pieces
    assert eval_rar_reward(pieces, ["Lyon"]).reward == autorefine_reward(pieces, ["Lyon"]).reward


def test_thousands_of_turns_and_of_indices() -> None:
    turns = ["p:<search>q</search>", "r:x", "p:<summary>* a\n- b</summary>"] * 3_000
    result = evinote_reward(attempt(*turns, "p:<answer>Paris</answer>", entailment=0.0))
    assert (result.reward, result.parts["format"], result.parts["searches"]) == (1.0, 1.0, 3_000)
    many = ",".join(map(str, range(1, 17_000)))
    named = arena_reward(attempt(f"p:<relevance>[{many}]</relevance>", gold_indices=[1]))
    assert (named.parts["relevance"], named.parts["named"]) == (0.5, 16_999)
