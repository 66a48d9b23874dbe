"""Test the lexical encoder: sums by hand, vectors that do not depend on the batch, and a complete copy on disk."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.common.errors import UserError
from thresher.common.files import MOST_JSON
from thresher.retrieval.encoders.lexical import CHUNK, LexicalEncoder, words

# Wide enough that no two of the few words used below share a place; otherwise the scores below would differ.
WIDE = 4096
TEXTS = ["red fox", "red red red hen", "blue hen, old hen", "Red old fox."]


@pytest.fixture(scope="module")
def encoder() -> LexicalEncoder:
    return LexicalEncoder.fit(TEXTS, WIDE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ed Wood's 1994 film.", ["ed", "wood", "s", "1994", "film"]),
        ("snake_case-and_more", ["snake", "case", "and", "more"]),
        ("Röntgen ΑΘΗΝΑ Москва", ["röntgen", "αθηνα", "москва"]),
        ("東京 2020年", ["東京", "2020年"]),
        ("?! -- \n\t", []),
        ("", []),
        ("half \ud800 pair", ["half", "pair"]),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


def test_idf_by_hand(encoder):
    # N = 4; red in 3 passages, fox, hen and old in 2, blue in 1, cat in none.
    assert encoder.idf("red") == pytest.approx(math.log(1 + 1.5 / 3.5))
    assert encoder.idf("fox") == encoder.idf("hen") == encoder.idf("old") == pytest.approx(math.log(2))
    assert encoder.idf("blue") == pytest.approx(math.log(1 + 3.5 / 1.5))
    assert encoder.idf("cat") == 0
    assert encoder.idf("blue") > encoder.idf("hen") > encoder.idf("red") > 0


def test_scores_by_hand(encoder):
    red, two, blue = (encoder.idf(word) for word in ("red", "fox", "blue"))
    passages = encoder.encode_passages(TEXTS)
    fox, twice_fox, red_cat = encoder.encode_queries(["fox", "Fox FOX!", "red cat"]) @ passages.T
    expected = [two / math.hypot(red, two), 0, 0, two / math.sqrt(red**2 + 2 * two**2)]
    np.testing.assert_allclose(fox, expected, atol=1e-6)
    np.testing.assert_allclose(twice_fox, expected, atol=1e-6)  # a query of one word, repeated
    thrice = 3 * 2.2 / (3 + 1.2)  # saturated: 1.571 for three times, 1.375 for twice
    hens = 2 * 2.2 / (2 + 1.2)
    np.testing.assert_allclose(
        red_cat,
        [
            red / math.hypot(red, two),
            thrice * red / math.hypot(thrice * red, two),
            0,
            red / math.sqrt(red**2 + 2 * two**2),
        ],
        atol=1e-6,
    )
    hen = encoder.encode_queries(["hen"])[0] @ passages[2]
    assert hen == pytest.approx(hens * two / math.sqrt(blue**2 + (hens * two) ** 2 + two**2), abs=1e-6)


def test_word_order_and_case_leave_no_trace(encoder):
    some = [f"word{n}" for n in range(300)]
    shuffled = random.Random(0).sample(some, len(some))
    first, second = encoder.encode_passages([" ".join(some), ", ".join(shuffled).upper()])
    assert (first == second).all()


def test_independent_of_batch_composition_to_the_last_bit():
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(400)}" for _ in range(rng.randrange(40))) for _ in range(2 * CHUNK + 5)]
    encoder = LexicalEncoder.fit(texts, 512)
    batched = encoder.encode_passages(texts)
    for row in (0, 1, 17, CHUNK - 1, CHUNK, 2 * CHUNK + 4):
        assert (encoder.encode_queries([texts[row]])[0] == batched[row]).all()
    # Texts that were encoded before, and are cached, change nothing either.
    assert (LexicalEncoder.fit(texts, 512).encode_queries(texts[::-1])[::-1] == batched).all()


def test_the_hash_is_the_same_on_every_machine():
    vector = LexicalEncoder(64, 1, {"fox": 1}).encode_queries(["fox"])[0]
    assert [(int(place), float(vector[place])) for place in np.flatnonzero(vector)] == [
        (7, 0.5),
        (18, 0.5),
        (32, -0.5),
        (56, 0.5),
    ]


@pytest.mark.parametrize("dim", [16, 17, 63, 1000])
def test_any_dimension_from_sixteen(dim):
    some = [f"w{n}" for n in range(4 * dim)]
    vectors = LexicalEncoder.fit(some, dim).encode_passages(some)
    assert (np.count_nonzero(vectors, axis=1) == 4).all()  # a word's four places never coincide
    # 16 words per place on average: all places are used, evenly enough (a Poisson count has a deviation of 4).
    counts = np.count_nonzero(vectors, axis=0)
    assert counts.min() > 0 and counts.max() < 16 + 5 * 4


def test_saved_and_loaded(tmp_path, encoder):
    encoder.save(tmp_path)
    again = LexicalEncoder.load(tmp_path)
    assert again.fingerprint == encoder.fingerprint and again.dim == WIDE and again.name == "lexical"
    queries = [*TEXTS, "unseen", "Röntgen"]
    assert (again.encode_queries(queries) == encoder.encode_queries(queries)).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        (json.dumps({"dim": 64, "passages": 3}), 'expected "dim", "passages" and "counts"'),
        (json.dumps({"dim": 8, "passages": 3, "counts": {}}), "needs at least 16"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "lexical.json").write_text(content)
    with pytest.raises(UserError, match=message):
        LexicalEncoder.load(tmp_path)


def test_the_fingerprint_sees_what_shapes_the_vectors(encoder):
    others = [
        LexicalEncoder.fit(TEXTS, 512),
        LexicalEncoder.fit([*TEXTS, "?"], WIDE),
        LexicalEncoder.fit([*TEXTS[:3], "red old fix"], WIDE),
    ]
    assert len({encoder.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert LexicalEncoder.fit(TEXTS[::-1], WIDE).fingerprint == encoder.fingerprint


@given(st.lists(st.text(max_size=60), max_size=5), st.text(max_size=60))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_any_text_gives_a_unit_or_a_zero_vector(texts, query):
    encoder = LexicalEncoder.fit(texts, 32)
    known = {word for text in texts for word in words(text)}
    for text, vector in zip([query, *texts], encoder.encode_queries([query, *texts]), strict=True):
        norm = float(np.linalg.norm(vector))
        assert vector.shape == (32,) and vector.dtype == np.float32
        assert norm == pytest.approx(1, abs=1e-5) if known.intersection(words(text)) else norm == 0


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("red cat", "red"),
        ("cat red dog cat", "red"),
        ("unheard hen of a fox cat", "hen fox"),
        ("reds FOX foxes", "fox"),
        ("cat dog", ""),
        ("redfox", ""),
    ],
)
def test_words_that_no_passage_holds_leave_no_trace(encoder, text, known):
    for encode in (encoder.encode_queries, encoder.encode_passages):
        assert (encode([text]) == encode([known])).all()
    assert encoder.encode_queries([text]).any() == bool(known)


def test_the_words_of_a_large_corpus_are_read_again(tmp_path):
    saved = LexicalEncoder(64, 1, {"fox" * MOST_JSON: 1})
    saved.save(tmp_path)
    assert LexicalEncoder.load(tmp_path).dim == 64
