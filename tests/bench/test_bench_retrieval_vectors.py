"""Synthetic vectors: the same whatever else is drawn, of norm 1, and with neighbours as far away as real ones'."""

import numpy as np
import pytest

from thresher.bench.retrieval_sets import CHUNK, Law, SyntheticVectors, neighbours
from thresher.retrieval.indexes.faiss_library import faiss

D = 96


def passages(rows: int, seed: int = 0) -> np.ndarray:
    return np.concatenate(list(SyntheticVectors(D, seed=seed).passages(rows)))


def test_a_passage_is_the_same_whatever_else_is_drawn() -> None:
    many, few = passages(CHUNK + 50), passages(20)
    assert many.shape == (CHUNK + 50, D) and many.dtype == np.float32
    assert np.array_equal(many[:20], few) and not np.array_equal(few, passages(20, seed=1))
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, atol=1e-5)


def test_a_question_is_about_its_passage_and_is_not_a_copy() -> None:
    world, rows = SyntheticVectors(D), CHUNK + 50
    question_QD, gold_Q = world.questions(100, rows)
    again_QD, again_Q = SyntheticVectors(D).questions(100, rows)
    assert np.array_equal(question_QD, again_QD) and np.array_equal(gold_Q, again_Q)
    assert question_QD.shape == (100, D) and gold_Q.max() < rows and gold_Q.max() >= CHUNK // 2
    vectors_ND = passages(rows)
    own_Q = (question_QD * vectors_ND[gold_Q]).sum(1)
    others_Q = (question_QD @ vectors_ND.T).mean(1)
    assert (own_Q > others_Q).mean() > 0.95 and np.median(own_Q) < 0.9
    assert np.median(own_Q) > np.median(others_Q) + 0.3


def test_the_spectrum_is_the_laws() -> None:
    variance_D = Law().deviations(D) ** 2
    assert variance_D.sum() == pytest.approx(1, abs=1e-5) and (np.diff(variance_D) < 0).all()
    # Words and noise have one spectrum, so a sum of them has it too; frequent words leave some slack.
    measured_D = passages(2 * CHUNK).var(axis=0)
    assert np.abs(measured_D[8:] / measured_D[8:].sum() - variance_D[8:] / variance_D[8:].sum()).sum() < 0.1


def test_neighbours_are_where_those_of_real_embeddings_are() -> None:
    # The medians of all-MiniLM-L6-v2 over 2,000 Wikipedia passages, of the neighbours of rank 1, 5, 10 and 100.
    vectors_ND = np.concatenate(list(SyntheticVectors(384).passages(2000)))
    score_QF, _ = faiss.knn(vectors_ND[:300], vectors_ND, 101, metric=faiss.METRIC_INNER_PRODUCT)
    np.testing.assert_allclose(
        np.median(score_QF[:, [1, 5, 10, 100]], axis=0), [0.430, 0.346, 0.314, 0.197], atol=0.035
    )
    # And they come nearer as there are more, or an index over many would be measured on another task.
    few = neighbours(vectors_ND[:50], vectors_ND[50:550], (5,))
    assert few[0, 1] < neighbours(vectors_ND[:50], vectors_ND[50:], (5,))[0, 1] - 0.03
