"""Packing: each row predicts the next token, rows are the policy's own tokens, and nothing is lost or duplicated."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.engine.config.sections import GrpoSection
from thresher.engine.packing import MicroBatch, TrainSequence, build_train_sequences, pack
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.kernels import token_logprobs
from thresher.policy.model import Policy
from thresher.rewards.reward import Source

BEGIN = 7  # the first id of every item below, which no row predicts


def item(rows: list[int], length: int, first: int = BEGIN) -> TrainSequence:
    """Return ids that count up from `first`, so that a target reveals its position; the other numbers differ by row."""
    return TrainSequence(
        ids=list(range(first, first + length)),
        positions=rows,
        old_logprobs=[-first - row / 64 for row in rows],
        advantage=first / 16,
        weight=1 / first,
    )


def unpacked(batch: MicroBatch) -> list[tuple[list[int], list[int], list[int], list[float], list[float], list[float]]]:
    """Take a batch apart by its own layout: ids, rows, targets and values of each row, item by item."""
    parts = []
    for start, length in zip(accumulate(batch.layout.lengths, initial=0), batch.layout.lengths, strict=False):
        mine = (batch.rows_R >= start) & (batch.rows_R < start + length)
        parts.append(
            (
                batch.ids_T[start : start + length].tolist(),
                (batch.rows_R[mine] - start).tolist(),
                batch.targets_R[mine].tolist(),
                batch.old_logprobs_R[mine].tolist(),
                batch.advantages_R[mine].tolist(),
                batch.weights_R[mine].tolist(),
            )
        )
    return parts


def test_by_hand() -> None:
    long, short = item([2, 3, 5], 6, first=10), item([1], 4, first=50)
    (batch,) = pack([short, long], 100)
    assert batch.members == [1, 0]  # the longer item first
    assert batch.ids_T.tolist() == [10, 11, 12, 13, 14, 50, 51, 52]  # without the last token of each item
    assert batch.layout.lengths == [5, 3] and batch.tokens == 8
    assert batch.layout.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.rows_R.tolist() == [1, 2, 4, 5]
    assert batch.targets_R.tolist() == [12, 13, 15, 51]
    assert batch.old_logprobs_R.tolist() == [*long.old_logprobs, *short.old_logprobs]
    assert batch.advantages_R.tolist() == [0.625, 0.625, 0.625, 3.125]
    assert batch.weights_R.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.02])
    assert batch.weights_R.dtype == torch.float32 and batch.ids_T.dtype == torch.int64


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([5, 5, 5, 5], 10, [[0, 1], [2, 3]]),
        ([5, 5, 5, 5], 9, [[0], [1], [2], [3]]),
        ([9, 2, 2, 2, 2], 18, [[0, 1], [2, 3, 4]]),  # padding counts: each takes nine places next to the nine
        ([3, 100, 3], 6, [[1], [0, 2]]),  # alone, however long it is
        ([4, 4, 4], 1, [[0], [1], [2]]),
        ([2, 3, 4], 10**9, [[2, 1, 0]]),
    ],
)
def test_batches_keep_to_the_budget(lengths: list[int], budget: int, expected: list[list[int]]) -> None:
    assert [batch.members for batch in pack([item([1], length) for length in lengths], budget)] == expected


def test_items_without_rows_are_dropped() -> None:
    assert pack([], 100) == pack([item([], 5)], 100) == []
    (batch,) = pack([item([], 50), item([2], 3), item([], 4)], 100)
    assert batch.members == [1] and batch.tokens == 2


@st.composite
def items(draw: st.DrawFn) -> list[TrainSequence]:
    made = []
    for number in range(draw(st.integers(0, 12))):
        length = draw(st.integers(2, 40))
        rows = sorted(draw(st.sets(st.integers(1, length - 1))))
        made.append(item(rows, length, first=100 * number + BEGIN))
    return made


@given(items(), st.integers(1, 200))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_everything_is_covered_once_and_right(given_items: list[TrainSequence], budget: int) -> None:
    batches = pack(given_items, budget)
    covered = [number for batch in batches for number in batch.members]
    assert sorted(covered) == [number for number, one in enumerate(given_items) if one.positions]
    for batch in batches:
        sizes = [len(given_items[number].ids) for number in batch.members]
        assert len(sizes) == 1 or max(sizes) * len(sizes) <= budget
        assert sizes == sorted(sizes, reverse=True)
        for number, (ids, rows, targets, old, advantages, weights) in zip(batch.members, unpacked(batch), strict=True):
            one = given_items[number]
            assert ids == one.ids[:-1]
            assert [row + 1 for row in rows] == one.positions
            assert targets == [one.ids[row] for row in one.positions]
            assert old == pytest.approx(one.old_logprobs)
            assert advantages == [one.advantage] * len(rows)
            assert weights == pytest.approx([one.weight] * len(rows))


def trajectory(*segments: tuple[Source, list[int]], sample: int = 0) -> Trajectory:
    made = [
        Segment(source, ids, [-1.0 - token / 1000 for token in ids] if source is Source.POLICY else [])
        for source, ids in segments
    ]
    return Trajectory("q", 0, sample, made, "answered")


def test_rows_are_the_policys_tokens_and_no_others() -> None:
    prompt, shown, said = (Source.PROMPT, [1, 2, 3]), (Source.RETRIEVED, [40, 41]), (Source.FEEDBACK, [60, 61, 62])
    several = trajectory(prompt, (Source.POLICY, [20, 21]), shown, (Source.POLICY, [22]), said, (Source.POLICY, [23]))
    cut = trajectory(prompt, (Source.POLICY, [24, 25]), said, (Source.POLICY, []), shown)
    (batch,) = pack(build_train_sequences([several, cut], [1.0, -1.0], GrpoSection()), 1000)
    assert batch.targets_R.tolist() == [20, 21, 22, 23, 24, 25]
    assert batch.ids_T[batch.rows_R].tolist() == [3, 20, 41, 62, 3, 24]  # the token before each target
    assert batch.old_logprobs_R.tolist() == pytest.approx([-1.02, -1.021, -1.022, -1.023, -1.024, -1.025])
    assert batch.advantages_R.tolist() == [1, 1, 1, 1, -1, -1]


@pytest.mark.parametrize(("aggregation", "weight"), [("trajectory", 1 / 10), ("token", 1 / 6), ("constant", 1 / 14)])
def test_each_context_is_a_sequence_with_its_part_of_the_advantages(aggregation: str, weight: float) -> None:
    """The first trajectory folds once and has a trained branch: five tokens with the weight of one trajectory."""
    prompt, later = (Source.PROMPT, [1, 2, 3]), (Source.PROMPT, [4, 5])
    folded = trajectory(prompt, (Source.POLICY, [20, 21]), later, (Source.POLICY, [22]), sample=1)
    folded.branches = {
        "a": trajectory(prompt, (Source.POLICY, [30])),
        "b": trajectory(later, (Source.POLICY, [31, 32])),
    }
    folded.branches["b"].trained = True
    other = trajectory(prompt, (Source.POLICY, [23]))
    grpo = GrpoSection(aggregation=aggregation, aggregation_constant=7.0 if aggregation == "constant" else None)
    one, two, branch, last = build_train_sequences([folded, other], [[0.1, 0.2, 0.3, 0.4, 0.5], -1.0], grpo)
    assert [each.ids for each in (one, two, branch, last)] == [
        [1, 2, 3, 20, 21],
        [4, 5, 22],
        [4, 5, 31, 32],
        [1, 2, 3, 23],
    ]
    assert [each.positions for each in (one, two, branch, last)] == [[3, 4], [2], [2, 3], [3]]
    assert [each.advantage for each in (one, two, branch, last)] == [[0.1, 0.2], [0.3], [0.4, 0.5], -1.0]
    assert [(each.key, each.context) for each in (one, two, branch, last)] == [
        ((0, 1), 0),
        ((0, 1), 1),
        ((0, 1), 2),
        ((0, 0), 0),
    ]
    assert {each.weight for each in (one, two, branch)} == {weight}
    assert last.weight == (weight if aggregation != "trajectory" else 1 / 2)
    with pytest.raises(ValueError, match="3 advantages for 5 trained tokens"):
        build_train_sequences([folded], [[0.1, 0.2, 0.3]], grpo)
    (kept,) = build_train_sequences([folded, other], [0.0, 1.0], replace(grpo, drop_zero_advantage=True))
    assert kept.key == (0, 0)


def test_packed_rows_have_the_log_probs_of_their_sequence_unpacked(tiny_policy: Policy) -> None:
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (31, 2, 17, 17, 5):
        ids = torch.randint(0, tiny_policy.config.vocab_size, (length,), generator=generator).tolist()
        rows = sorted({1, length // 2 + 1, length - 1} & set(range(1, length)))
        made.append(TrainSequence(ids=ids, positions=rows, old_logprobs=[0.0] * len(rows), advantage=0.0, weight=1.0))
    policy = tiny_policy.double()
    for budget in (1, 40, 10**6):
        for batch in pack(made, budget):
            hidden_TH = policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)
            found, _ = token_logprobs(hidden_TH[batch.rows_R], policy.head_VH, batch.targets_R)
            expected = [
                torch.log_softmax(policy.logits(torch.tensor(made[number].ids)), -1)[row - 1, made[number].ids[row]]
                for number in batch.members
                for row in made[number].positions
            ]
            torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-10)
