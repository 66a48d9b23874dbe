"""Test that published question sets are read into questions, and that a file in another format is recognised."""

import csv
import gzip
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from browsecomp_cases import RECORD as BROWSECOMP

from thresher.common.errors import UserError
from thresher.retrieval.datasets import containers
from thresher.retrieval.datasets.containers import iter_rows
from thresher.retrieval.datasets.formats import (
    EMPTY_PARAGRAPH,
    FACT_ABSENT,
    FORMATS,
    NAMES,
    NO_ANSWER,
    NO_QUESTION,
    UNANSWERABLE,
    Row,
    Skipped,
    content_id,
    detect,
    find_format,
)
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question

FACTS = [["Alpha", 1], ["Gamma", 0]]
CONTEXT = [["Alpha", ["A one.", " A two."]], ["Beta", ["B."]], ["Gamma", ["C one.", "C two."]]]
HUB_CONTEXT = {"title": [title for title, _ in CONTEXT], "sentences": [lines for _, lines in CONTEXT]}
HUB_FACTS = {"title": [title for title, _ in FACTS], "sent_id": [number for _, number in FACTS]}
TEXTS = [("Alpha", "A one. A two."), ("Beta", "B."), ("Gamma", "C one. C two.")]
PASSAGES = tuple(Passage(content_id(title, text), title, text) for title, text in TEXTS)
HOTPOT = {"_id": "h", "question": "q? ", "answer": "a", "type": "bridge", "supporting_facts": FACTS, "context": CONTEXT}
HOTPOT_HUB = {**HOTPOT, "supporting_facts": HUB_FACTS, "context": HUB_CONTEXT}
WIKI = {**HOTPOT, "evidences": [["Alpha", "is", "a"]], "answer_id": "Q1"}
WIKI_TEXT = {key: json.dumps(value) if key in ("context", "supporting_facts") else value for key, value in WIKI.items()}
MUSIQUE = {
    "id": "m",
    "question": "q?",
    "answer": "a",
    "answer_aliases": ["A.", "a", " "],
    "answerable": True,
    "paragraphs": [
        {"idx": number, "title": title, "paragraph_text": text, "is_supporting": title != "Beta"}
        for number, (title, text) in enumerate(TEXTS)
    ],
    "question_decomposition": [],
}
TRIVIA = {
    "Question": "q?",
    "QuestionId": "tc_1",
    "QuestionSource": "s",
    "EntityPages": [{"Title": "T"}],
    "Answer": {"Value": "a", "Aliases": ["b", "a"], "NormalizedAliases": ["x"], "HumanAnswers": ["c"]},
}
TRIVIA_HUB = {
    "question": "q?",
    "question_id": "tc_1",
    "search_results": {"title": []},
    "answer": {"value": "a", "aliases": ["b"], "normalized_aliases": ["x"]},
}
POPQA = {"id": "7", "question": "q?", "possible_answers": '["a", "b"]', "prop": "capital"}
DPR = {
    "question": "q?",
    "answers": ["a"],
    "ctxs": [
        {"id": "wiki:1", "title": "Alpha", "text": "A.", "score": "81.5", "has_answer": True},
        {"id": 2, "title": "Beta", "text": "B.", "score": "80.1", "has_answer": False},
    ],
}
VERL = {
    "data_source": "nq",
    "prompt": [{"role": "system", "content": "be good"}, {"role": "user", "content": "q?"}],
    "reward_model": {"ground_truth": "a<|answer_split|>b", "style": "rule"},
    "extra_info": {"index": 4, "split": "dev"},
}
FLASHRAG = {"id": "test_0", "question": "q?", "golden_answers": ["a", "b"], "metadata": {"hops": 2}}
NATIVE = {**FLASHRAG, "passages": [{"title": "T", "text": "t."}], "gold_indices": [1]}
BAMBOOGLE = {"Question": "q?", "Answer": "a"}
NQ = {"question": "q?", "answer": ["a", "b"]}
PLAIN = {"idx": 3, "question": "q?", "answer": "a", "level": "easy"}
FACT_DATA = {"type": "bridge", "supporting_facts": FACTS}
WIKI_DATA = {**FACT_DATA, "evidences": WIKI["evidences"], "answer_id": "Q1"}
GOLD = (1, 3)

CASES: list[tuple[str, dict[str, Any], Question]] = [
    ("hotpotqa", HOTPOT, Question("h", "q?", ("a",), FACT_DATA, PASSAGES, GOLD)),
    ("hotpotqa-hub", HOTPOT_HUB, Question("h", "q?", ("a",), FACT_DATA, PASSAGES, GOLD)),
    ("2wiki", WIKI, Question("h", "q?", ("a", "alias", "Alphan"), WIKI_DATA, PASSAGES, GOLD)),
    ("2wiki", WIKI_TEXT, Question("h", "q?", ("a", "alias", "Alphan"), WIKI_DATA, PASSAGES, GOLD)),
    ("musique", MUSIQUE, Question("m", "q?", ("a", "A."), {}, PASSAGES, GOLD)),
    ("triviaqa", TRIVIA, Question("tc_1", "q?", ("a", "b", "c"), {"QuestionSource": "s"})),
    ("triviaqa-hub", TRIVIA_HUB, Question("tc_1", "q?", ("a", "b"))),
    ("popqa", POPQA, Question("7", "q?", ("a", "b"), {"prop": "capital"})),
    ("popqa", {**POPQA, "possible_answers": ["a"]}, Question("7", "q?", ("a",), {"prop": "capital"})),
    (
        "dpr",
        DPR,
        Question(
            "9",
            "q?",
            ("a",),
            {"scores": ["81.5", "80.1"], "has_answer": [True, False]},
            (Passage("wiki:1", "Alpha", "A."), Passage("2", "Beta", "B.")),
        ),
    ),
    (
        "dpr",
        {
            **DPR,
            "ctxs": [{"title": "Beta", "text": "B.", "isgold": False}, {"title": "T", "text": "t.", "isgold": True}],
        },
        Question("9", "q?", ("a",), {}, (PASSAGES[1], Passage(content_id("T", "t."), "T", "t.")), (2,)),
    ),
    (
        "verl",
        VERL,
        Question("4", "q?", ("a", "b"), {"data_source": "nq", "extra_info": VERL["extra_info"]}),
    ),
    (
        "verl",
        {
            "id": "train_0",
            "question": "q?",
            "prompt": "Answer: q?",
            "reward_model": {"ground_truth": {"target": ["a"]}},
        },
        Question("train_0", "q?", ("a",)),
    ),
    ("flashrag", FLASHRAG, Question("test_0", "q?", ("a", "b"), {"hops": 2})),
    (
        "flashrag",
        {**FLASHRAG, "metadata": {"context": HUB_CONTEXT, "supporting_facts": HUB_FACTS}},
        Question("test_0", "q?", ("a", "b"), {"supporting_facts": FACTS}, PASSAGES, GOLD),
    ),
    ("native", NATIVE, Question("test_0", "q?", ("a", "b"), {"hops": 2}, (Passage("1", "T", "t."),), (1,))),
    ("bamboogle", BAMBOOGLE, Question("9", "q?", ("a",))),
    ("nq-open", NQ, Question("9", "q?", ("a", "b"))),
    (
        "browsecomp-plus",
        BROWSECOMP,
        Question(
            "769",
            "Who is the mayor of the town?",
            ("Anna Bell",),
            {"evidence_docs": ["11", "22"], "gold_docs": ["22"]},
        ),
    ),
    ("plain", PLAIN, Question("3", "q?", ("a",), {"level": "easy"})),
    ("plain", {"question": "q?", "answer": 1999, "answers": [1999, 2.5]}, Question("9", "q?", ("1999", "2.5"))),
]


def row(record: dict[str, Any]) -> Row:
    return Row(fields=record, where="f:1", number=9, aliases={"Q1": ("alias", "Alphan")})


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "record", "question"), CASES)
def test_a_published_record_is_recognised_and_becomes_a_question(
    tmp_path: Path, name: str, record: dict[str, Any], question: Question
) -> None:
    assert find_format(name).read(row(record)) == question
    assert detect(write(tmp_path / "f.jsonl", record)).name == name
    assert detect(write(tmp_path / "f.json", record)).name == name  # JSON lines in a .json file
    assert find_format(name).fits(record)


def test_every_format_has_a_case() -> None:
    assert {name for name, _, _ in CASES} == set(NAMES) and len(set(NAMES)) == len(FORMATS)
    # A record of another format than the named one is refused.
    for name, record in (("hotpotqa", WIKI), ("flashrag", NATIVE), ("nq-open", {**NQ, "context": []}), ("plain", DPR)):
        assert not find_format(name).fits(record)


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("hotpotqa", {**HOTPOT, "answer": None}, NO_ANSWER),
        ("hotpotqa", {key: value for key, value in HOTPOT.items() if key != "answer"}, NO_ANSWER),
        ("hotpotqa", {**HOTPOT, "question": " "}, NO_QUESTION),
        ("musique", {**MUSIQUE, "answerable": False}, UNANSWERABLE),
        ("triviaqa", {"Question": "q?", "QuestionId": "t"}, NO_ANSWER),
        ("triviaqa-hub", {**TRIVIA_HUB, "answer": {"value": "<unk>", "aliases": []}}, NO_ANSWER),
        ("popqa", {**POPQA, "possible_answers": "[]"}, NO_ANSWER),
        ("popqa", {**POPQA, "possible_answers": ""}, NO_ANSWER),
        ("nq-open", {"question": "q?", "answer": ["", " "]}, NO_ANSWER),
        ("nq-open", {"question": "q?", "answer": [math.nan]}, NO_ANSWER),
        ("verl", {**VERL, "reward_model": {"ground_truth": "<|answer_split|>"}}, NO_ANSWER),
        ("verl", {**VERL, "prompt": []}, NO_QUESTION),
    ],
)
def test_what_no_question_can_be_made_of_is_skipped_with_a_reason(name: str, record: Any, reason: str) -> None:
    with pytest.raises(Skipped) as skip:
        find_format(name).read(row(record))
    assert str(skip.value) == reason


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("hotpotqa", {**HOTPOT, "context": [["Alpha"]]}, '"context" should be a list of pairs'),
        ("hotpotqa", {**HOTPOT, "context": [["Alpha", [1]]]}, "the sentences of 'Alpha' should be strings"),
        ("hotpotqa", {**HOTPOT, "answer": {"a": 1}}, "a gold answer should be a string, found an object"),
        ("hotpotqa", {**HOTPOT, "question": 5}, '"question" should be a string, found a number'),
        (
            "hotpotqa-hub",
            {**HOTPOT_HUB, "context": {"title": ["A"], "sentences": []}},
            '1 titles but 0 in "sentences"',
        ),
        ("2wiki", {**WIKI, "context": "[["}, "should hold JSON, found '[['"),
        ("musique", {**MUSIQUE, "paragraphs": [{"title": "T"}]}, '"paragraphs", item 1: "paragraph_text" should be a'),
        ("popqa", {**POPQA, "possible_answers": "a"}, "\"possible_answers\" should hold JSON, found 'a'"),
        ("dpr", {**DPR, "ctxs": [3]}, '"ctxs", item 1: expected a JSON object'),
        ("native", {**NATIVE, "gold_indices": [2]}, "names passage 2 of 1"),
    ],
)
def test_a_malformed_record_is_named(name: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        find_format(name).read(row(record))
    assert str(error.value).startswith("f:1: ") and message in str(error.value)


def test_paragraphs_without_text_move_the_numbers_and_are_counted() -> None:
    at = row({**HOTPOT, "context": [["Void", [" "]], *CONTEXT], "supporting_facts": [["Gamma", 0], ["Absent", 0]]})
    question = find_format("hotpotqa").read(at)
    assert question.passages == PASSAGES and question.gold_indices == (3,)
    assert at.notes == {EMPTY_PARAGRAPH: 1, FACT_ABSENT: 1}
    test_set = {key: value for key, value in HOTPOT.items() if key != "supporting_facts"}
    assert find_format("hotpotqa").read(row(test_set)).gold_indices is None


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("plain", "nq-open")])
def test_a_file_in_another_format_says_which_it_looks_like(tmp_path: Path, name: str) -> None:
    from thresher.retrieval.datasets.convert import MixSource, convert

    other = HOTPOT if name != "hotpotqa" else MUSIQUE
    looks = "MuSiQue" if name == "hotpotqa" else "HotpotQA as its authors publish it"
    source = MixSource(paths=(write(tmp_path / "f.jsonl", other),))
    with pytest.raises(UserError, match=rf"f\.jsonl:1: expected .* looks like {looks}.*give --format") as error:
        convert([source], tmp_path / "out.jsonl", fmt=name)
    assert "\n" not in str(error.value) and not (tmp_path / "out.jsonl").exists()


def test_a_file_in_no_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"f\.jsonl:1: a passage of a corpus \(keys: text, title\)"):
        detect(write(tmp_path / "f.jsonl", {"title": "T", "text": "t"}))
    with pytest.raises(UserError, match=r"f\.jsonl:1: no question set in a known format \(keys: x\).*musique"):
        detect(write(tmp_path / "f.jsonl", {"x": 1}))
    with pytest.raises(UserError, match=r"f\.jsonl: holds no questions"):
        detect(write(tmp_path / "f.jsonl"))
    with pytest.raises(UserError, match=r"unknown format 'hotpot'; did you mean hotpotqa\?"):
        find_format("hotpot")


RECORDS = [{"n": 1, "text": 'a]},"é'}, {"n": 2, "deep": [[{}], "x"]}, {"n": 33, "text": "long" * 20}]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, indent: int | None
) -> None:
    monkeypatch.setattr(containers, "PIECE", piece)
    text = json.dumps(RECORDS, indent=indent, ensure_ascii=False)
    (tmp_path / "f.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "f.json.gz").write_bytes(gzip.compress(text.encode()))
    head = {"Domain": "Web [", "Other": [1, {"Data": 2}]}
    (tmp_path / "o.json").write_text(json.dumps({**head, "Data": RECORDS, "Version": 1.0}, indent=indent))
    for name in ("f.json", "f.json.gz", "o.json"):
        found = list(iter_rows(tmp_path / name))
        assert [record for _, record in found] == RECORDS
        assert [where for where, _ in found] == [f"{tmp_path / name}: item {n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"a"', "item 2: not valid JSON"),
        (b'[{"a": 1}', "breaks off after item 1"),
        (b'[{"a": 1}, 5]', "item 2: expected a JSON object, found a number"),
        (b'[{"a": "\xff"}]', "not valid UTF-8 near byte 8"),
        (b'{\n"a": 1\n}', "expected a JSON list of questions"),
        (b'{"a": {"Data": []}}', 'no list "Data" in this object'),
        (b'[{"a": 1}]\n[{"a": 2}]\n', "more follows the JSON list of 1 items; give each list a file of its own"),
        (b'[{"a": 1}]{"a": 2}', "more follows the JSON list of 1 items"),
        (b'[{"a": 1} {"a": 2}]', "expected a comma after item 1, found '{'"),
        (b'[{"a": 1},, {"a": 2}]', "item 2: not valid JSON"),
        (b'{"Data": [{"a": 1}], "b": 2', "breaks off after item 1"),
        (b'{"Data": [{"a": 1}]} 5', "more follows the JSON list of 1 items"),
    ],
)
def test_a_damaged_json_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(iter_rows(path))
    assert str(error.value).startswith(str(path)) and message in str(error.value)


def table(rows: list[list[str]], delimiter: str) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return text.getvalue()


def test_tables(tmp_path: Path) -> None:
    rows = [["id", "question", "possible_answers"], ["1", 'who, "x"?\nwell', '["a", "b\\"c"]'], ["2", "q?", "[]"]]
    (tmp_path / "p.tsv").write_text(table(rows, "\t"), encoding="utf-8")
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + table(rows, ",").encode()))
    for name in ("p.tsv", "p.csv.gz"):
        found = list(iter_rows(tmp_path / name))
        assert [list(record.values()) for _, record in found] == rows[1:]
        assert [where.rpartition(":")[2] for where, _ in found] == ["2", "4"]
        assert detect(tmp_path / name).name == "popqa"
        assert find_format("popqa").read(row(found[0][1])).golds == ("a", 'b"c')
    (tmp_path / "b.csv").write_text("Question,Answer\nq?,a\nq?\n")
    assert detect(tmp_path / "b.csv").name == "bamboogle"
    (tmp_path / "d.csv").write_text("Question,Answer,Answer\nq?,a,b\n")
    with pytest.raises(UserError, match=r"d\.csv:1: the column 'Answer' occurs twice"):
        list(iter_rows(tmp_path / "d.csv"))
    with pytest.raises(UserError, match=r"b\.csv:3: expected 2 cells \(Question, Answer\), found 1"):
        list(iter_rows(tmp_path / "b.csv"))


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(containers, "BATCH", 2)
    path = tmp_path / "v.parquet"
    target = {**VERL, "reward_model": {"ground_truth": {"target": ["a", "b"]}}, "extra_info": {"index": 1}}
    parquet.write_table(pyarrow.Table.from_pylist([{**target, "extra_info": {"index": n}} for n in range(5)]), path)
    found = list(iter_rows(path))
    assert [where for where, _ in found] == [f"{path}: row {n}" for n in range(1, 6)]
    assert detect(path).name == "verl"
    assert [find_format("verl").read(row(record)).id for _, record in found] == list("01234")
    assert find_format("verl").read(row(found[0][1])).golds == ("a", "b")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"v\.parquet: not a readable parquet file after row 0"):
        detect(path)


def test_without_pyarrow_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "v.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"read with pyarrow, which is not installed; .*\[data\]"):
        detect(path)


def test_metadata_is_what_json_can_hold() -> None:
    record = {**PLAIN, "score": float("nan"), "raw": b"x", "deep": {1: [float("inf"), (2,)]}, "empty": [], "none": None}
    metadata = find_format("plain").read(row(record)).metadata
    assert metadata == {"level": "easy", "score": None, "raw": "b'x'", "deep": {"1": [None, [2]]}}


@pytest.mark.parametrize(
    ("file", "name", "count", "gold", "golds"),
    [
        ("hotpotqa/hotpot_dev_distractor_first100.json", "hotpotqa-hub", 100, 200, ("yes",)),
        ("hotpotqa/hotpot_train_100.json", "hotpotqa", 100, 200, None),
        ("2wiki/2wiki_train_500_with_context.json", "2wiki", 500, 1184, ("October 5, 1987",)),
        ("musique/musique_train_100.json", "musique", 100, 237, ("G. Stanley Hall", "Stanley Hall")),
        ("nq/NQ-open.dev.jsonl", "nq-open", 3610, 0, ("14 December 1972 UTC", "December 1972")),
        ("nq/nq-open-oracle.jsonl.gz", "dpr", 2655, 2655, ("Wilhelm Conrad Röntgen",)),
        ("questions/bamboogle.jsonl", "plain", 125, 0, ("james madison",)),
        ("questions/deepresearcher_dev_875.parquet", "verl", 875, 0, None),
        ("formats/flashrag_nq_test.jsonl", "flashrag", 17, 0, ("Wilhelm Conrad Röntgen",)),
        ("formats/ultrarag_sample_nq_10.jsonl", "flashrag", 10, 0, ("14 December 1972 UTC", "December 1972")),
    ],
)
def test_real_files(
    shared_data: Path, file: str, name: str, count: int, gold: int, golds: tuple[str, ...] | None
) -> None:
    if file.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    fmt = detect(shared_data / file)
    assert fmt.name == name
    rows = enumerate(iter_rows(shared_data / file))
    questions = [fmt.read(Row(fields=record, where=where, number=number)) for number, (where, record) in rows]
    assert len(questions) == count and sum(len(question.gold_indices or ()) for question in questions) == gold
    assert golds is None or questions[0].golds == golds


def test_gold_titles_of_real_questions_agree_with_those_derived_elsewhere(shared_data: Path) -> None:
    """The hub's first questions are among the pooled 500, whose gold titles come from a join with the source."""
    records = [json.loads(line) for line in (shared_data / "hotpotqa/questions_500.jsonl").open(encoding="utf-8")]
    titles = {record["question"].strip(): set(record["gold_titles"]) for record in records}
    fmt = find_format("hotpotqa-hub")
    for where, record in iter_rows(shared_data / "hotpotqa/hotpot_dev_distractor_first100.json"):
        question = fmt.read(Row(fields=record, where=where))
        gold = {question.passages[number - 1].title for number in question.gold_indices or ()}
        assert gold == titles[question.question]
