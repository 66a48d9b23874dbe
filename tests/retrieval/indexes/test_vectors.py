"""Test files of vectors that are appended to and resumed, and exact search over rows in float32 and float16."""

import os
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.common.errors import UserError
from thresher.retrieval.indexes import exact, scan
from thresher.retrieval.indexes import vector_file as vectors
from thresher.retrieval.indexes.exact import ExactRows, largest_row_norm
from thresher.retrieval.indexes.vector_file import VectorFile


def rows_of(count: int, dim: int = 3) -> np.ndarray:
    return np.arange(count * dim, dtype=np.float32).reshape(count, dim)


def test_batches_make_the_file_that_numpy_writes(tmp_path):
    whole = rows_of(10)
    file = VectorFile(tmp_path / "v.npy", 10, 3)
    assert file.done() == 0
    for start in (0, 4, 8):
        file.append(whole[start : start + 4])
        assert file.done() == min(start + 4, 10)
    np.save(tmp_path / "w.npy", whole)
    assert file.path.read_bytes() == (tmp_path / "w.npy").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.npy", "w.npy"]
    assert np.array_equal(file.open(), whole)


def test_rows_behind_the_counted_ones_are_written_again(tmp_path):
    whole = rows_of(10)
    file = VectorFile(tmp_path / "v.npy", 10, 3)
    file.append(whole[:4])
    with file.path.open("ab") as torn:
        torn.write(b"a batch that was never counted")
    again = VectorFile(tmp_path / "v.npy", 10, 3)
    assert again.done() == 4
    again.append(whole[4:])
    assert np.array_equal(again.open(), whole)


def test_a_count_that_the_file_does_not_bear_out_counts_for_nothing(tmp_path):
    file = VectorFile(tmp_path / "v.npy", 10, 3)
    file.append(rows_of(4))
    (tmp_path / "v.npy.rows").write_text("6")
    assert file.done() == 0
    (tmp_path / "v.npy.rows").write_text("x")
    assert file.done() == 0
    (tmp_path / "v.npy.rows").unlink()
    assert file.done() == 0


def test_slices_and_single_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "SLICE_BYTES", 4 * 3 * 4)
    whole = rows_of(10)
    file = VectorFile(tmp_path / "v.npy", 10, 3)
    file.append(whole)
    assert [(start, len(part)) for start, part in file.slices()] == [(0, 4), (4, 4), (8, 2)]
    assert [start for start, _ in file.slices(3, 8)] == [3, 7]
    assert np.array_equal(np.concatenate([part for _, part in file.slices(3, 8)]), whole[3:8])
    wanted = np.array([0, 3, 4, 9])
    assert np.array_equal(file.rows_at(wanted), whole[wanted])


@pytest.mark.parametrize("more", [0, 2 * vectors.READ_FEWEST + 1, 5 * vectors.READERS * vectors.READ_FEWEST])
def test_rows_are_taken_in_any_order_and_never_from_beyond_the_end(tmp_path, more):
    whole = rows_of(10)
    file = VectorFile(tmp_path / "v.npy", 10, 3)
    file.append(whole)
    wanted = np.array([7, 0, 7, *np.random.default_rng(0).integers(0, 9, more), 9])
    assert np.array_equal(file.take(wanted), whole[wanted])
    file.path.write_bytes(file.path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"v\.npy: ends before row 9; build the index again"):
        file.take(wanted)


def test_a_forked_process_has_readers_of_its_own(tmp_path):
    file = VectorFile(tmp_path / "v.npy", 10, 3)
    file.append(rows_of(10))
    wanted = np.arange(4 * vectors.READ_FEWEST) % 10
    taken = file.take(wanted)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if np.array_equal(file.take(wanted), taken) else 1)
    assert os.waitpid(child, 0)[1] == 0


@given(
    st.integers(0, 10**6),
    st.integers(1, 80),
    st.sampled_from([1, 2, 5, 33]),
    st.integers(1, 30),
    st.sampled_from([1, 2, 25]),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from(["float32", "float16"]),
)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_what_faiss_scans_is_exact_in_blocks(seed, count, dim, k, queries, levels, dtype):
    """Few levels make many exact ties; many levels make near ties that float32 sums may swap."""
    rng = np.random.default_rng(seed)
    stored_ND = (rng.integers(-levels, levels + 1, (count, dim)) / levels).astype(dtype)
    query_QD = (rng.integers(-levels, levels + 1, (queries, dim)) / levels).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "BLOCK_BYTES", 7 * 4 * dim)
        found = ExactRows(stored_ND).top(query_QD, k)
    for query_D, best in zip(query_QD, found, strict=True):
        scores = (stored_ND.astype(np.float64) * query_D.astype(np.float64)).sum(axis=1).astype(np.float32)
        assert best == sorted(enumerate(scores.tolist()), key=lambda pair: (-pair[1], pair[0]))[:k]


def test_the_largest_norm_is_found_block_by_block(monkeypatch):
    monkeypatch.setattr(exact, "BLOCK_BYTES", 4 * 2 * 3)
    rows = np.float32([[0, 1], [1, 0], [0, 0], [3, 4], [1, 1]])
    assert largest_row_norm(rows) == 5 and largest_row_norm(rows.astype(np.float16)) == 5


@given(st.integers(0, 10**6), st.integers(1, 700), st.sampled_from([1, 2, 7, 8, 40]), st.integers(1, 60))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_what_torch_scans_is_exact_in_every_batch_with_ties_and_any_block(seed, count, queries, k):
    rng = np.random.default_rng(seed)
    levels = int(rng.choice([1, 2, 1000]))  # few levels: nearly all scores are equal
    stored_ND = (rng.integers(-levels, levels + 1, (count, 6)) / levels).astype(rng.choice(["float32", "float16"]))
    query_QD = (rng.integers(-levels, levels + 1, (queries, 6)) / levels).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "SMALL", 0)
        patch.setattr(exact, "BLOCK_BYTES", 24 * int(rng.integers(1, 900)))
        patch.setattr(exact, "QUERIES", int(rng.integers(1, 50)))
        patch.setattr(exact, "SCORE_CHUNK", 50)
        patch.setattr(scan, "SCORES", int(rng.integers(1, 5000)))
        found = ExactRows(stored_ND).top(query_QD, k)
        rough_QF, row_QF = exact.rough_top(query_QD, count, [(0, stored_ND)], min(k, count))
    for query_D, best, rough_F, row_F in zip(query_QD, found, rough_QF, row_QF, strict=True):
        scores = (stored_ND.astype(np.float64) * query_D.astype(np.float64)).sum(axis=1).astype(np.float32)
        assert best == sorted(enumerate(scores.tolist()), key=lambda pair: (-pair[1], pair[0]))[:k]
        assert len(set(row_F.tolist())) == min(k, count) and np.abs(rough_F - scores[row_F]).max() < 1e-5
        assert np.abs(np.sort(scores)[::-1][: len(rough_F)] - rough_F).max() < 1e-5


def test_a_row_that_is_no_number_hides_no_other():
    rows_ND = np.eye(40, 4, dtype=np.float32)
    rows_ND[::2, 3] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "SMALL", 0)
        score_QF, row_QF = exact.rough_top(np.float32([[0, 1, 0, 0]]), 40, [(0, rows_ND)], 25)
    assert row_QF[0, 0] == 1 and score_QF[0, 0] == 1
    assert sorted(row_QF[0, :20].tolist()) == list(range(1, 40, 2)) and set(row_QF[0, 20:].tolist()) == {-1}
