"""The stored values of a step's tokens: they are read back unchanged, stay within their limit, and are refused if
bad."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from thresher.common.errors import UserError
from thresher.engine.store.token_stats import TokenRecorder, TokenStats, read_token_stats, stats_of, write_token_stats

SAMPLED = {(0, 0): [-0.5, -1.25, -3.0], (0, 1): [-0.125], (2, 0): [], (2, 1): [-2.0, -4.0]}
BRANCHES = {(0, 1): [-0.75, -1.5]}


def recorded() -> list[TokenStats]:
    """Return statistics of two micro-batches, longest first as packed; (0, 1) was in no update, (2, 0) is empty."""
    recorder = TokenRecorder()
    for items in ([((2, 1), 0, 2)], [((0, 0), 0, 3)]):
        rows = sum(count for _, _, count in items)
        values_R = {name: torch.arange(rows) - float(rows) for name in ("recomputed", "reference", "entropy")}
        recorder.add(items, values_R | {"clipped": torch.arange(rows) == 1})
    return stats_of(SAMPLED, BRANCHES, recorder)


def test_a_step_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "step_000003.safetensors"
    assert write_token_stats(file, recorded(), 10**6)
    found = read_token_stats(file, [3, 1, 0, 2], [0, 2, 0, 0])
    assert found is not None
    assert [entry.values["sampled"].tolist() for entry in found] == list(SAMPLED.values())
    assert [entry.branches.tolist() for entry in found] == [[], [-0.75, -1.5], [], []]
    for entry, expected in ((found[0], [-3.0, -2.0, -1.0]), (found[3], [-2.0, -1.0])):
        assert all(entry.values[name].tolist() == expected for name in ("recomputed", "reference", "entropy"))
        assert entry.values["clipped"].tolist() == [n == 1 for n in range(len(expected))]
    assert np.isnan(found[1].values["recomputed"]).all() and np.isnan(found[1].values["reference"]).all()
    assert found[1].values["clipped"].tolist() == [False]
    assert load_file(file)["entropy_P"].dtype == np.float16
    assert read_token_stats(tmp_path / "step_000004.safetensors", [], []) is None


def test_values_of_contexts_are_in_order_behind_what_was_inherited() -> None:
    """The contexts of a trajectory arrive in the order of their lengths, with other sequences between them."""
    recorder = TokenRecorder()
    for items, values in (([((0, 0), 1, 2), ((1, 0), 0, 1)], [3.0, 4.0, 9.0]), ([((0, 0), 0, 1)], [2.0])):
        values_R = torch.tensor(values)
        recorder.add(items, dict.fromkeys(("recomputed", "entropy"), values_R) | {"clipped": values_R == 3.0})
    forked, other = stats_of({(0, 0): [-1.0] * 5, (1, 0): [-1.0]}, {}, recorder)
    np.testing.assert_array_equal(forked.values["recomputed"], [np.nan, np.nan, 2.0, 3.0, 4.0])
    assert forked.values["clipped"].tolist() == [False, False, False, True, False]
    assert other.values["recomputed"].tolist() == [9.0]


def test_a_rank_that_trained_on_nothing_has_blanks(tmp_path: Path) -> None:
    idle = stats_of({(5, 0): [-1.0]}, {}, TokenRecorder())
    assert "reference" not in idle[0].values
    file = tmp_path / "step_000001.safetensors"
    write_token_stats(file, [*recorded(), *idle], 10**6)
    found = read_token_stats(file, [3, 1, 0, 2, 1], [0, 2, 0, 0, 0])
    assert found is not None and np.isnan(found[4].values["reference"]).all()


def test_the_oldest_are_deleted_for_the_newest(tmp_path: Path) -> None:
    def write(step: int, limit: int) -> bool:
        return write_token_stats(tmp_path / f"step_{step:06d}.safetensors", recorded(), limit)

    assert write(1, 10**6)
    size = (tmp_path / "step_000001.safetensors").stat().st_size
    (tmp_path / "step_000001.jsonl").write_text("")
    for step in (2, 3, 4):
        assert write(step, 2 * size + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000001.jsonl",
        "step_000003.safetensors",
        "step_000004.safetensors",
    ]
    assert not write(5, size - 1) and not (tmp_path / "step_000005.safetensors").exists()


def test_refusals(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.safetensors"
    write_token_stats(file, recorded(), 10**6)
    for counts, branches in (([3, 1, 0, 3], [0, 2, 0, 0]), ([1, 3, 0, 2], [0, 2, 0, 0]), ([3, 1, 0, 2], [0, 1, 0, 0])):
        with pytest.raises(UserError, match=r"does not fit the trajectories of step_000001\.jsonl"):
            read_token_stats(file, counts, branches)
    whole = file.read_bytes()
    for damaged in (b"", whole[:60], whole[:-1], b"\xff" * 8 + whole[8:], b"{}"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read"):
            read_token_stats(file, [3, 1, 0, 2], [0, 2, 0, 0])
