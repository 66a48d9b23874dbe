"""Test the counts of rollouts with a tail: by hand, against a simulation slot by slot, and by properties of all of
them; and their seconds."""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thresher.bench.roofline import MODELS
from thresher.common.errors import UserError
from thresher.common.records import write_records
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.planning.memory import kv_bytes, read_setting
from thresher.engine.planning.plan import plan
from thresher.engine.planning.tail import (
    MEAN_SHARE,
    SIGMA,
    Queue,
    RolloutCounts,
    count_rollouts,
    lengths_of_run,
    predicted_rollout_s,
    predicted_tail,
    read_lengths,
    tail_lengths,
    tokens_again,
    usual_rollouts,
)
from thresher.engine.planning.time import (
    CHIPS,
    DECODE_SHARE,
    DecodeShape,
    MeasuredRates,
    link_rate,
    predicted_decode_s,
    predicted_prefill_s,
    sent_bytes,
)


def test_groups_that_outlive_their_step_by_hand() -> None:
    """One sample per group, one group per step, two in flight, two slots. Group 1 ends in the first rollout, so the
    second has no decode step; groups 2 and 3 then begin at once, and group 3 continues in the fourth."""
    first, second, third, fourth = count_rollouts([3, 1, 2, 4], Queue(1, 1, 2, 2))
    assert first == RolloutCounts(1, Counter({(2, 1): 1, (1, 1): 2}), Counter({0: 3}), positions=7, prompts=2)
    assert second == RolloutCounts(1, Counter(), Counter({1: 1}))
    assert third == RolloutCounts(1, Counter({(2, 1): 2}), Counter({0: 2}), positions=6, prompts=2)
    ages = Counter({0: 2, 1: 2})
    assert fourth == RolloutCounts(1, Counter({(1, 1): 2}), ages, positions=7, tokens_again=2, prompts_again=1)
    total = first + second + third + fourth
    assert (total.steps, total.decode_steps, total.drawn, total.mean_busy) == (4, 7, 10, 10 / 7)
    assert total.mean_staleness == 3 / 10 and second.mean_busy == 0.0
    assert tokens_again(total, prompt=100) == 102 and tokens_again(total, 100, a_token=1.5) == 103


def test_a_slot_that_is_free_takes_the_next_sample_by_hand() -> None:
    """Two groups of two in three slots: the fourth sample begins when the second has ended."""
    (found,) = count_rollouts([2, 1, 3, 1], Queue(2, 2, 2, 3))
    assert found.batches == {(3, 2): 2, (1, 1): 1} and found.positions == 3 + 1 + 6 + 1
    assert found.staleness == {0: 7} and (found.prompts, found.tokens_again, found.prompts_again) == (2, 0, 0)


def slot_by_slot(lengths: list[int], queue: Queue) -> list[dict[str, Any]]:
    """Return the counts of each rollout, from a loop over decode steps and slots."""
    group_of = [number // queue.group for number in range(len(lengths))]
    drawn, waiting, running = [0] * len(lengths), list(range(len(lengths))), list[int]()
    ages: dict[int, Counter[int]] = {}
    begun: set[int] = set()
    rollouts = []
    for step in range(len(lengths) // queue.group // queue.questions):
        found: dict[str, Any] = {"batches": Counter(), "positions": 0, "tokens_again": 0}
        drew: set[int] = set()
        own = [n for n, group in enumerate(group_of) if group // queue.questions == step]
        carried = list(running)
        while any(drawn[n] < lengths[n] for n in own):
            while waiting and len(running) < queue.slots:
                if group_of[waiting[0]] >= step * queue.questions + queue.in_flight:
                    break
                running.append(waiting.pop(0))
            found["tokens_again"] += sum(drawn[n] for n in carried)
            carried = []
            here = {group_of[n] for n in running}
            found["batches"][len(running), max(round(len(running) / len(here)), 1)] += 1
            for n in running:
                drawn[n] += 1
                found["positions"] += drawn[n]
                trained = group_of[n] // queue.questions
                ages.setdefault(trained, Counter())[trained - step] += 1
            drew |= here
            running = [n for n in running if drawn[n] < lengths[n]]
        found |= {"prompts": len(drew - begun), "prompts_again": len(drew & begun)}
        begun |= drew
        rollouts.append(found)
    return [found | {"steps": 1, "staleness": ages[step]} for step, found in enumerate(rollouts)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], Queue]:
    group, questions = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    in_flight = draw(st.integers(questions, 4 * questions))
    samples = group * questions * draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 9), min_size=samples, max_size=samples))
    return lengths, Queue(group, questions, in_flight, draw(st.integers(1, 12)))


def ends(lengths: list[int], queue: Queue) -> list[int]:
    """Return the decode steps until the end of each step's rollout."""
    return list(accumulate(counts.decode_steps for counts in count_rollouts(lengths, queue)))


@given(cases())
def test_counts_are_those_of_a_simulation_slot_by_slot(case: tuple[list[int], Queue]) -> None:
    lengths, queue = case
    assert count_rollouts(lengths, queue) == [RolloutCounts(**found) for found in slot_by_slot(lengths, queue)]


@given(cases())
def test_every_token_is_drawn_and_trained_on_once_and_none_is_too_old(case: tuple[list[int], Queue]) -> None:
    lengths, queue = case
    found = count_rollouts(lengths, queue)
    a_step = queue.group * queue.questions
    of_steps = [sum(lengths[first : first + a_step]) for first in range(0, len(lengths), a_step)]
    assert [counts.staleness.total() for counts in found] == of_steps
    assert sum(counts.drawn for counts in found) == sum(lengths)
    assert sum(counts.prompts for counts in found) == len(lengths) // queue.group
    assert sum(counts.positions for counts in found) == sum(length * (length + 1) // 2 for length in lengths)
    limit = (queue.in_flight - 1) // queue.questions
    assert all(0 <= age <= limit for counts in found for age in counts.staleness)
    assert all(1 <= busy <= queue.slots for counts in found for busy, _ in counts.batches)
    for step, counts in enumerate(found):  # groups that begin in the rollout that trains on them
        first = ((step - 1) * queue.questions + queue.in_flight) * queue.group if step else 0
        assert counts.decode_steps >= max(lengths[first : (step + 1) * a_step], default=0)
    if queue.in_flight == queue.questions:
        assert all(counts.tokens_again == counts.prompts_again == 0 for counts in found)


@given(cases(), st.data())
def test_no_step_ends_later_with_more_in_flight_more_slots_or_shorter_samples(
    case: tuple[list[int], Queue], data: st.DataObject
) -> None:
    lengths, queue = case
    usual = ends(lengths, queue)
    more = Queue(queue.group, queue.questions, queue.in_flight + 1, queue.slots)
    wider = Queue(queue.group, queue.questions, queue.in_flight, queue.slots + 1)
    number = data.draw(st.integers(0, len(lengths) - 1))
    shorter = [max(length - (n == number), 1) for n, length in enumerate(lengths)]
    for earlier in (ends(lengths, more), ends(lengths, wider), ends(shorter, queue)):
        assert all(a <= b for a, b in zip(earlier, usual, strict=True))


@pytest.mark.parametrize(
    ("lengths", "queue"),
    [([], (1, 1, 1, 1)), ([1, 2, 3], (2, 1, 1, 1)), ([1, 0], (2, 1, 1, 1)), ([1], (1, 2, 1, 1)), ([1], (1, 1, 1, 0))],
)
def test_what_is_no_run_is_refused(lengths: list[int], queue: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        count_rollouts(lengths, Queue(*queue))


def test_lengths_have_a_tail() -> None:
    lengths = tail_lengths(samples=256)
    assert len(lengths) == 256 and lengths == sorted(lengths, reverse=True)
    assert sum(lengths) / 256 == pytest.approx(300, abs=1) and lengths[0] == 1000 and lengths[-1] >= 1
    assert sum(lengths) / lengths[0] == pytest.approx(77, abs=1)  # bound: as docs/gpu.md says
    logs = tail_lengths(mean=300, longest=10**9, sigma=0.5)
    middle, above = sorted(logs)[len(logs) // 2], sorted(logs)[int(len(logs) * 0.8413)]  # one deviation above
    assert above / middle == pytest.approx(2.718281828**0.5, rel=0.01)


def test_busy_slots_shorten_a_rollout_whose_decode_step_costs_little_by_sequence() -> None:
    """1.42 ms and .0129 ms per sequence, for 1.5B on an H100: a step's own samples take 2.4 s, refilled slots 1.4 s."""
    lengths = tail_lengths()

    def seconds(in_flight: int) -> float:
        counts = usual_rollouts(lengths, Queue(8, 32, in_flight, 256))
        return sum(many * (1.42 + 0.0129 * busy) for (busy, _), many in counts.batches.items()) / counts.steps / 1000

    assert seconds(32) == pytest.approx(2.4, abs=0.05) and seconds(160) == pytest.approx(1.4, abs=0.05)


def test_samples_of_one_length_gain_nothing() -> None:
    """There are as many slots as samples of a step, so no other group begins before the step ends."""
    for in_flight in (4, 12):
        counts = usual_rollouts([30], Queue(2, 4, in_flight, 8), steps=5)
        assert counts.batches == {(8, 2): 150} and set(counts.staleness) == {0}
        assert (counts.steps, counts.prompts, counts.tokens_again) == (5, 20, 0)


def test_lengths_are_taken_as_often_as_each_other() -> None:
    run = lengths_of_run([1, 2, 3, 4], 400)
    assert all(sorted(run[first : first + 4]) == [1, 2, 3, 4] for first in range(0, 400, 4))
    assert run == lengths_of_run([1, 2, 3, 4], 400) and run[:7] == lengths_of_run([1, 2, 3, 4], 7)
    assert len({tuple(run[first : first + 4]) for first in range(0, 400, 4)}) > 12  # of 24 orders
    counts = usual_rollouts([1, 2, 3, 4], Queue(2, 2, 2, 4), steps=7)
    assert counts.staleness == {0: 70} and counts.drawn == 70 and counts.decode_steps == 28


def test_a_rollout_is_its_steps_and_its_prefills() -> None:
    """Two groups of two: four samples run for two steps, two for one, one for two more."""
    config, chip, queue = MODELS["0.5B"], CHIPS["A100-80"], Queue(2, 2, 2, 4)
    (counts,) = count_rollouts([5, 2, 3, 2], queue)
    steps = [(4, 2, 1), (4, 2, 2), (2, 1, 3), (1, 1, 4), (1, 1, 5)]
    shapes = [DecodeShape(batch=batch, group=group, shared=100, own=own) for batch, group, own in steps]
    expected = sum(predicted_decode_s(config, shape, chip) for shape in shapes)
    expected += predicted_prefill_s(config, 200, chip)
    # Half a position of each token, by which the mean of own positions is rounded.
    rounded = counts.drawn * kv_bytes(config) / 2 / chip.bytes_per_s / DECODE_SHARE
    assert predicted_rollout_s(config, counts, 100, chip) == pytest.approx(expected, rel=0, abs=rounded)


def test_what_is_prefilled_costs_its_tokens() -> None:
    config, chip = MODELS["0.5B"], CHIPS["A100-80"]
    counts = sum(count_rollouts([9, 4, 7, 8], Queue(1, 1, 2, 2)), RolloutCounts())
    assert counts.tokens_again > 0 < counts.prompts_again
    anew = predicted_rollout_s(config, counts, 50, chip)
    kept = predicted_rollout_s(config, counts, 50, chip, stale_cache=True)
    again = counts.tokens_again + 50 * counts.prompts_again
    assert anew - kept == pytest.approx(predicted_prefill_s(config, again, chip) / 4)


ROLLOUT = {"group_size": 8, "questions_per_step": 32, "max_policy_tokens": 1000, "max_context": 2000, "max_turns": 4}
PARTIAL = {"partial": True, "max_staleness": 2, "groups_in_flight": 80}


def recipe(**rollout: Any) -> Recipe:
    tables: dict[str, Any] = {"model": {"path": "m", "dtype": "bfloat16", "device": "cuda"}}
    return from_dict(Recipe, tables | {"rollout": ROLLOUT | {"max_num_seqs": 256} | rollout}, "test")


def test_a_plan_has_the_rollout_of_a_tail_with_and_without_partial() -> None:
    config, chip = MODELS["1.5B"], CHIPS["H100"]
    found = plan(config, recipe(), rates=chip).tail
    assert found is not None and found.whole.in_flight == 32 and found.partial.in_flight == 64
    assert (found.sigma, found.slots, found.longest) == (SIGMA, 256, 1000)
    assert found.mean == pytest.approx(1000 * MEAN_SHARE, abs=1)
    counts = usual_rollouts(tail_lengths(300, 1000), Queue(8, 32, 32, 256))
    setting = read_setting(recipe())
    assert found.whole.busy == counts.mean_busy and found.whole.decode_steps == counts.decode_steps / counts.steps
    assert found.whole.seconds == predicted_rollout_s(config, counts, setting.prompt, chip, setting.own / 1000)
    assert (found.whole.staleness, found.whole.max_staleness, found.whole.tokens_again) == (0, 0, 0)
    its = plan(config, recipe(**PARTIAL), rates=chip).tail
    assert its is not None and its.whole == found.whole and its.partial.in_flight == 80
    assert its.partial.max_staleness == 2 and its.partial.tokens_again > 0
    kept = plan(config, recipe(**PARTIAL, stale_cache=True), rates=chip).tail
    assert kept is not None and kept.partial.seconds < its.partial.seconds and kept.partial.tokens_again == 0
    assert plan(config, recipe()).tail is None


def test_a_rank_has_its_share_of_groups_and_waits_for_its_weights() -> None:
    config, chip = MODELS["7B"], CHIPS["A100-80"]
    setting = read_setting(recipe(**PARTIAL), gpus=4)
    found = predicted_tail(config, setting, chip)
    assert (found.whole.in_flight, found.partial.in_flight) == (8, 20)
    alone = predicted_tail(config, setting, MeasuredRates(chip.flops_per_s, chip.bytes_per_s))
    links = link_rate(chip, 4)
    assert links is not None and found.whole.decode_steps == alone.whole.decode_steps
    sending = sent_bytes(config, setting)["rollout"] / links
    queue, a_token = Queue(8, 8, 8, 256), setting.own / setting.sampled
    counts = usual_rollouts(tail_lengths(300, 1000), queue)
    assert found.whole.seconds == sending + predicted_rollout_s(config, counts, setting.prompt, chip, a_token)


def test_given_lengths_are_taken_and_end_at_the_limit() -> None:
    found = predicted_tail(MODELS["0.5B"], read_setting(recipe()), CHIPS["H100"], [0, 5000])
    assert (found.mean, found.longest, found.sigma) == (500.5, 1000, None)


def test_groups_in_flight_need_no_more_keys_and_values_than_slots_hold() -> None:
    config = MODELS["1.5B"]
    whole, partial = (plan(config, recipe(**more), memory_bytes=80 * 10**9) for more in ({}, PARTIAL))
    assert whole.phases == partial.phases
    # The cache that older weights computed is kept through the update.
    kept = plan(config, recipe(**PARTIAL, stale_cache=True, kv_tokens=100_000), memory_bytes=80 * 10**9).phases
    assert kept["rollout"]["KV pool"] >= 100_000 * kv_bytes(config)
    for phase in ("loss", "backward", "gradients", "optimiser"):
        assert kept[phase]["KV pool"] == kept["rollout"]["KV pool"] and whole.phases[phase]["KV pool"] == 0


def segment(source: str, ids: list[int]) -> dict[str, Any]:
    return {"source": source, "text": "", "ids": ids}


def test_lengths_of_stored_trajectories(tmp_path: Path) -> None:
    file = tmp_path / "step_000010.jsonl"
    searched = [segment("prompt", [1]), segment("policy", [2, 3]), segment("retrieved", [4]), segment("policy", [5])]
    write_records(file, [{"id": "a", "segments": searched}, {"id": "b", "segments": searched[:2]}])
    assert read_lengths(file) == [3, 2]
    write_records(file, [{"id": "a", "segments": [{"source": "policy", "text": "x"}]}])
    with pytest.raises(UserError, match=r"step_000010.jsonl:1: expected segments with ids"):
        read_lengths(file)
    write_records(file, [{"id": "a", "segments": searched[:1]}])
    with pytest.raises(UserError, match="expected trajectories in which the policy wrote something"):
        read_lengths(file)
