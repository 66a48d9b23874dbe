"""Test question files: the accepted formats and the refusals."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.common.errors import UserError
from thresher.retrieval.datasets.formats import detect
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Query, Question, check_apart, question_record, read_queries, read_questions


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "question"),
    [
        ({"question": "q?", "answer": "a"}, Question("0", "q?", ("a",), {})),
        ({"question": "q?", "answer": ["a", "b"]}, Question("0", "q?", ("a", "b"), {})),
        ({"question": "q?", "answers": ["a"]}, Question("0", "q?", ("a",), {})),
        ({"id": 0, "question": "q?", "golden_answers": ["a"]}, Question("0", "q?", ("a",), {})),
        ({"id": "x", "question": "q?", "golden_answers": ["a"], "answer": "b"}, Question("x", "q?", ("a",), {})),
        (
            {"id": "x", "question": "q?", "answer": "a", "level": "hard", "metadata": {"hops": 2}},
            Question("x", "q?", ("a",), {"hops": 2, "level": "hard"}),
        ),
        ({"question": "q?", "answer": "a", "metadata": None}, Question("0", "q?", ("a",), {"metadata": None})),
    ],
)
def test_records_become_questions(tmp_path, record, question):
    assert read_questions(write(tmp_path / "q.jsonl", record)) == [question]


ALPHA, BETA = {"title": "Alpha", "text": "One."}, {"id": "b", "title": "", "text": "Two."}
PASSAGES = (Passage("1", "Alpha", "One."), Passage("b", "", "Two."))


@pytest.mark.parametrize(
    ("record", "passages", "gold_indices"),
    [
        ({}, (), None),
        ({"gold_indices": None}, (), None),
        ({"gold_indices": []}, (), ()),
        ({"passages": [ALPHA, BETA]}, PASSAGES, None),
        ({"passages": [ALPHA, BETA], "gold_indices": [2, 1]}, PASSAGES, (2, 1)),
        ({"passages": [ALPHA, BETA], "gold_indices": []}, PASSAGES, ()),
        ({"passages": [ALPHA, {**BETA, "gold": True}]}, PASSAGES, (2,)),
        ({"passages": [{**ALPHA, "gold": False}, BETA]}, PASSAGES, ()),
        ({"passages": [{"id": 7, "contents": '"Alpha"\nOne.'}]}, (Passage("7", "Alpha", "One."),), None),
    ],
)
def test_given_passages_and_which_are_gold(tmp_path, record, passages, gold_indices):
    path = write(tmp_path / "q.jsonl", {"question": "q?", "answer": "a", **record})
    assert read_questions(path) == [Question("0", "q?", ("a",), {}, passages, gold_indices)]


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(str.strip)
GIVEN = st.lists(st.builds(Passage, WORDS, st.one_of(st.just(""), WORDS), WORDS), max_size=3).map(tuple)


@st.composite
def questions(draw):
    passages = draw(GIVEN)
    numbers = st.lists(st.sampled_from(range(1, len(passages) + 1)), unique=True) if passages else st.just([])
    values = st.one_of(st.none(), st.integers(), WORDS, st.lists(WORDS, max_size=2))
    return Question(
        draw(WORDS),
        draw(WORDS),
        tuple(draw(st.lists(WORDS, min_size=1, max_size=3))),
        draw(st.dictionaries(st.one_of(WORDS, st.sampled_from(["id", "answer", "metadata"])), values, max_size=3)),
        passages,
        draw(st.one_of(st.none(), numbers.map(tuple))),
    )


@settings(max_examples=60, deadline=None)
@given(question=questions())
def test_a_question_survives_its_record(tmp_path_factory, question):
    path = write(tmp_path_factory.getbasetemp() / "round.jsonl", question_record(question))
    assert read_questions(path) == [question]


def test_what_is_unknown_is_left_out_of_the_record():
    assert question_record(Question("x", "q?", ("a",))) == {"id": "x", "question": "q?", "golden_answers": ["a"]}


GOOD = {"id": "first", "question": "q?", "answer": "a"}
ASKED = {"question": "q?", "answer": "a"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q?"}, "no gold answer"),
        ({"question": "q?", "golden_answers": []}, '"golden_answers" is an empty list'),
        ({**ASKED, "answer": 7}, '"answer" should be a list of strings'),
        ({**ASKED, "answer": ["a", 7]}, '"answer", item 2, should be a string, found a number'),
        ({**ASKED, "answer": ""}, '"answer", item 1, is empty'),
        ({"answer": "a"}, 'no "question"'),
        ({**ASKED, "question": " "}, '"question" is empty'),
        ({**ASKED, "id": ["x"]}, '"id" should be a string, found a list'),
        (GOOD, "the id 'first' was used before"),
        ({**ASKED, "passages": {}}, '"passages" should be a list of objects, found an object'),
        ({**ASKED, "passages": ["t"]}, '"passages", item 1: expected a JSON object'),
        ({**ASKED, "passages": [{"title": "T"}]}, '"passages", item 1: no "text"'),
        ({**ASKED, "passages": [ALPHA, {**BETA, "text": " "}]}, "item 2, holds no text"),
        ({**ASKED, "passages": [{**ALPHA, "gold": 1}]}, '"gold" should be true or false'),
        ({**ASKED, "passages": [{**ALPHA, "gold": True}], "gold_indices": [1]}, 'both "gold_indices" and passages'),
        ({**ASKED, "passages": [ALPHA], "gold_indices": [2]}, '"gold_indices" names passage 2 of 1'),
        ({**ASKED, "passages": [ALPHA], "gold_indices": [0]}, '"gold_indices" names passage 0 of 1'),
        ({**ASKED, "passages": [ALPHA], "gold_indices": [1, 1]}, '"gold_indices" names passage 1 twice'),
        ({**ASKED, "passages": [ALPHA], "gold_indices": [True]}, '"gold_indices" should be a list of whole numbers'),
        ({**ASKED, "gold_indices": 1}, '"gold_indices" should be a list of whole numbers'),
    ],
)
def test_a_bad_question_is_named_by_file_and_line(tmp_path, record, message):
    path = write(tmp_path / "q.jsonl", GOOD, record)
    with pytest.raises(UserError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)


HOTPOT = {"question": "q?", "answer": "a", "supporting_facts": [["T", 0]], "context": [["T", ["One."]]]}
HUB = {"context": {"title": ["T"], "sentences": [["One."]]}, "supporting_facts": {"title": ["T"], "sent_id": [0]}}
MUSIQUE = {"question": "q?", "answer": "a", "paragraphs": [{"title": "T", "paragraph_text": "One."}]}
SUPPORTING = {**MUSIQUE["paragraphs"][0], "is_supporting": True}


@pytest.mark.parametrize(
    ("record", "key", "name"),
    [
        (HOTPOT, "context", "hotpotqa"),
        ({**HOTPOT, **HUB}, "context", "hotpotqa-hub"),
        ({**HOTPOT, "evidences": []}, "context", "2wiki"),
        ({**MUSIQUE, "paragraphs": [SUPPORTING]}, "paragraphs", "musique"),
    ],
)
def test_a_published_set_is_to_be_converted_first(tmp_path, record, key, name):
    path = write(tmp_path / "q.jsonl", GOOD, record)
    with pytest.raises(UserError) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f'{path}:2: a record of a published set, whose passages are under "{key}"')
    assert str(caught.value).endswith(f"thresher data convert --format {name}")
    assert detect(write(path, record)).name == name, "the reader named is not the one that takes such a record"
    assert len(read_queries(path)) == 1, "a search needs no passages"


@pytest.mark.parametrize("record", [{**HOTPOT, "passages": [ALPHA]}, {**GOOD, "context": "c"}, MUSIQUE])
def test_what_only_resembles_a_published_set_is_read(tmp_path, record):
    (question,) = read_questions(write(tmp_path / "q.jsonl", record))
    assert question.golds == ("a",) and set(question.metadata) >= set(record) - {*GOOD, "passages"}


def test_gold_answers_may_be_left_out_where_that_is_said(tmp_path):
    path = write(tmp_path / "q.jsonl", {"question": "q?"}, {"question": "q?", "golden_answers": []}, GOOD)
    assert [question.golds for question in read_questions(path, golds_needed=False)] == [(), (), ("a",)]
    with pytest.raises(UserError, match="item 1, is empty"):
        read_questions(write(path, {"question": "q?", "answer": ""}), golds_needed=False)


def test_an_empty_file_is_refused(tmp_path):
    path = write(tmp_path / "q.jsonl")
    for read in (read_questions, read_queries):
        with pytest.raises(UserError, match=r"q\.jsonl: holds no questions"):
            read(path)


def test_queries_need_no_answers(tmp_path):
    path = write(tmp_path / "q.jsonl", {"question": "a?"}, {"id": "b", "question": "b?", "gold_titles": ["T", "U"]})
    assert read_queries(path) == [Query("0", "a?", ()), Query("b", "b?", ("T", "U"))]
    with pytest.raises(UserError, match=r'q\.jsonl:1: "gold_titles" should be a list of strings'):
        read_queries(write(path, {"question": "a?", "gold_titles": "T"}))


def test_the_titles_to_find_are_those_of_the_gold_passages_unless_named(tmp_path):
    passages = [ALPHA, {**ALPHA, "text": "More."}, {"title": "Beta", "text": "Two."}]
    asked = {"question": "a?", "passages": passages, "gold_indices": [3, 1, 2]}
    path = write(tmp_path / "q.jsonl", asked, {**asked, "metadata": {"gold_titles": ["T"]}})
    assert [query.gold_titles for query in read_queries(path)] == [("Beta", "Alpha"), ("T",)]


@pytest.mark.parametrize("id_", ["1", "nq/17", "train_0", "nq/test_3"])
def test_sets_that_number_their_questions_are_apart(id_):
    train, dev = Question(id_, "who is b?", ("b",)), Question(id_, "who is d?", ("d",))
    check_apart([("train.jsonl", [train]), ("dev.jsonl", [dev])])
    with pytest.raises(UserError, match=rf"dev\.jsonl: question {id_} is in train\.jsonl too"):
        check_apart([("train.jsonl", [train]), ("dev.jsonl", [Question(id_, "Who is B", ("b",))])])


@pytest.mark.parametrize("id_", ["5a8b57f25542995d1e6f1371", "2hop__13548_13529", "tc_33"])
def test_a_question_is_known_by_the_id_of_its_data_set(id_):
    corrected = [[Question(id_, text, ("b",))] for text in ("who si b?", "who is b?")]
    with pytest.raises(UserError, match=r"is in train\.jsonl too"):
        check_apart(zip(("train.jsonl", "dev.jsonl"), corrected, strict=True))


def test_real_questions(shared_data):
    hotpot = read_questions(shared_data / "hotpotqa/questions_500.jsonl")
    assert len(hotpot) == 500 and hotpot[0].id == "5a8b57f25542995d1e6f1371" and hotpot[0].golds == ("yes",)
    assert hotpot[0].metadata["gold_titles"] == ["Ed Wood", "Scott Derrickson"]
    assert set(hotpot[0].metadata) == {"type", "level", "gold_titles"}
    flashrag = read_questions(shared_data / "formats/flashrag_nq_test.jsonl")
    assert len(flashrag) == 17 and flashrag[0].golds == ("Wilhelm Conrad Röntgen",)
    nq = read_questions(shared_data / "nq/NQ-open.dev.jsonl")
    assert len(nq) == 3610 and nq[3609].id == "3609"
    assert nq[0].golds == ("14 December 1972 UTC", "December 1972")
    oracle = read_questions(shared_data / "nq/nq-open-oracle.jsonl.gz")
    assert len(oracle) == 2655 and oracle[0].metadata["ctxs"][0]["title"] == "List of Nobel laureates in Physics"
    queries = read_queries(shared_data / "2wiki/gold_titles_1000.jsonl")
    assert len(queries) == 1000 and queries[0].gold_titles == ("Lothair II", "Ermengarde of Tours")
