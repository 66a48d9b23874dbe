"""Drafts change only the number of forwards: whatever is guessed, tokens, log-probs, stops and limits are, bit for bit,
those of one token per forward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_invariance import needs_invariant_policy
from rollout_cases import make_jobs, record

from thresher.engine.decoding.decoder_cuda import DeviceDecoder
from thresher.engine.decoding.speculative import BEGIN, PATIENCE, PAUSE, TURN_END, Drafter, gpu_costs
from thresher.engine.rollout.rollout import Rollout
from thresher.kernels.attention import paged_cuda
from thresher.policy.model import Policy
from thresher.retrieval.questions import Question

Make = Callable[..., Rollout]


@pytest.mark.parametrize(
    ("attention", "speculate"), [("torch", "auto"), ("torch", 1), ("triton", 8), ("torch", 8)], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.fast_cases(2)
def test_episodes_repeat_what_they_wrote_in_fewer_forwards(
    attention: str,
    speculate: Any,
    temperature: float,
    tiny_rollout: Make,
    tiny_policy: Policy,
    tiny_questions: list[Question],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`rollout.num_draft_tokens` reaches the decoder of `rollout.attention`, as do trajectories of earlier calls."""
    needs_invariant_policy(tiny_policy)
    if not torch.cuda.is_available():
        monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)  # the interpreter would take minutes
    jobs = make_jobs(tiny_questions[:6], samples=2)

    def written(run: Rollout) -> Any:
        found = run.run(jobs, temperature, recall=True)
        if attention == "torch":
            return list(map(record, found))
        return [([segment.ids for segment in one.segments], one.reason, one.searches) for one in found]

    plain = tiny_rollout(attention=attention)
    run = tiny_rollout(attention=attention, num_draft_tokens=speculate)
    assert isinstance(run.decoder, DeviceDecoder) == (attention == "triton")
    expected = written(plain)
    assert written(run) == expected
    first = run.clock.forwards
    assert written(run) == expected
    assert run.clock.forwards < first <= plain.clock.forwards
    assert 0 < run.clock.accepted_tokens <= run.clock.drafted_tokens
    assert run.clock.sampled_tokens == plain.clock.sampled_tokens


def test_a_guess_continues_a_place_where_the_last_tokens_occurred() -> None:
    drafter = Drafter(4, 2, 16)
    tokens_BL = np.zeros((2, 16), np.int64)
    tokens_BL[0, :9] = [7, 1, 2, 3, 8, 9, 1, 2, 3]
    tokens_BL[1, :4] = [5, 6, 7, 8]
    drafter.open(1, np.array([6, 7, 1, 5, 6, 7, 8, 40, 41]))
    drafts = drafter.draft(tokens_BL, np.array([9, 4]), np.array([0, 1]), np.array([9, 1]))
    assert drafts is not None and drafts.count_N.tolist() == [4, 1]
    assert drafts.ids_NK[0, :4].tolist() == [8, 9, 1, 2], "own context"
    assert drafts.ids_NK[1, 0] == 40, "earlier text, no more than there is room for"
    drafter.open(1, None)
    assert drafter.draft(tokens_BL, np.array([9, 4]), np.array([1]), np.array([9])) is None


def test_a_guess_ends_with_the_earlier_turn_and_prefers_the_place_nearest_to_its_own() -> None:
    drafter = Drafter(8, 1, 16)
    tokens_BL = np.zeros((1, 16), np.int64)
    tokens_BL[0, :5] = [4, 5, 6, 7, 8]
    turns = [5, 6, 7, 8, 1, 2, TURN_END, 5, 6, 7, 8, 3, TURN_END]
    drafter.open(0, np.array(turns))
    drafts = drafter.draft(tokens_BL, np.array([5]), np.array([0]), np.array([9]))
    assert drafts is not None and drafts.ids_NK.tolist() == [[1, 2]]
    tokens_BL[0, :9] = [0, 0, 0, 0, 0, 5, 6, 7, 8]
    drafts = drafter.draft(tokens_BL, np.array([9]), np.array([0]), np.array([9]))
    assert drafts is not None and drafts.ids_NK.tolist() == [[3]]
    drafter.open(0, np.array([5, 6, 7, 8, TURN_END, 5]))
    assert drafter.draft(tokens_BL, np.array([9]), np.array([0]), np.array([9])) is None, "the turn ended there"


def test_auto_looks_only_now_and_then_where_nothing_is_found() -> None:
    drafter, looked = Drafter("auto", 1, 8), 0
    for _ in range(10 * PAUSE):
        if drafter.looks(1):
            looked += 1
            assert drafter.draft(np.arange(8)[None], np.array([6]), np.array([0]), np.array([2])) is None
    assert PATIENCE < looked <= PATIENCE + 11


def test_auto_stops_where_guesses_fail_and_where_rows_are_dear() -> None:
    drafter = Drafter("auto", 1, 16)
    few, many = ([drafter._drafts_wanted(kind, n) for kind in range(len(BEGIN))] for n in (2, 500))
    assert all(a >= b for a, b in zip(few, many, strict=True)) and few[0] > many[0]
    for _ in range(50):
        drafter.note(np.array([0]), np.array([4]), np.array([0]))
    assert drafter._drafts_wanted(0, 64) == 0 < few[0]


# --- What a GPU pays for


def drafted(slots: int, some: int, weight_bytes: float = 15e9, speculate: Any = "auto") -> list[int] | None:
    """Return the drafts of slots of which `some` repeat their own text, where 8 of 10 guesses have come true."""
    drafter = Drafter(speculate, slots, 64, gpu_costs(int(weight_bytes)))
    drafter.counts[:] = [80.0, 20.0]
    tokens_BL = np.arange(slots)[:, None] * 100 + np.arange(64)
    tokens_BL[:some, 20:24] = tokens_BL[:some, :4]
    assert drafter.looks(slots)
    drafts = drafter.draft(tokens_BL, np.full(slots, 24), np.arange(slots), np.full(slots, 40))
    return None if drafts is None else drafts.count_N.tolist()


def test_a_gpu_pays_for_the_rows_of_slots_that_have_no_guess() -> None:
    assert drafted(8, 8) == [8] * 8, "rows are cheap while they are few"
    assert drafted(8, 2) == [4] * 2 + [0] * 6, "the other six have four rows more, too"
    assert drafted(8, 1) is None
    assert drafted(60, 60) == [2] * 60 and drafted(60, 30) is None
    assert drafted(8, 2, weight_bytes=1e9) is None, "it would wait for the host longer than it computes"
    assert drafted(60, 1, speculate=3) == [3] + [0] * 59, "who asks for drafts gets them"
    assert not Drafter("auto", 200, 64, gpu_costs(15_000_000_000)).looks(200), "as many rows as are free decode already"


def test_a_row_of_a_model_with_states_writes_them() -> None:
    """Qwen3.5-0.8B: a state is 19 MB of 1.5 GB of weights, so that 8 more rows cost a tenth of a forward more."""
    plain, states = gpu_costs(1_500_000_000), gpu_costs(1_500_000_000, 19_000_000)
    assert 8 * (states.row_each - plain.row_each) == pytest.approx(8 * 19 / 1500)
