"""Test BrowseComp-Plus as published: obfuscated questions, its corpus, and the refusal of other files."""

import json
from pathlib import Path
from typing import Any

import pytest
from browsecomp_cases import CANARY, CORPUS, RECORD, obfuscated

from thresher.common.errors import UserError
from thresher.retrieval.corpus import read_corpus
from thresher.retrieval.datasets.convert import MixSource, convert
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, read_questions

NAMED = {"evidence_docs": ["11", "22"], "gold_docs": ["22"]}


def write(path: Path, *records: Any) -> Path:
    """Write JSON lines, or Parquet, as the data set is published."""
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def converted(folder: Path, *files: Path, **options: Any) -> dict[str, Any]:
    return convert([MixSource(paths=files)], folder / "out.jsonl", **options)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_obfuscated_questions_and_their_corpus_become_our_records(tmp_path: Path, suffix: str) -> None:
    second = {**RECORD, "query_id": "770", "query": "Wer schrieb „Über“?", "answer": "Öd", "gold_docs": []}
    questions = write(tmp_path / f"q.{suffix}", obfuscated(RECORD), obfuscated(second))
    parts = [write(tmp_path / f"{n}.{suffix}", *CORPUS[n::2]) for n in range(2)]
    figures = converted(tmp_path, questions, canary=CANARY, documents=parts, corpus=tmp_path / "c.jsonl")
    assert read_questions(tmp_path / "out.jsonl") == [
        Question("769", "Who is the mayor of the town?", ("Anna Bell",), NAMED),
        Question("770", "Wer schrieb „Über“?", ("Öd",), {**NAMED, "gold_docs": []}),
    ]
    assert list(read_corpus(tmp_path / "c.jsonl")) == [
        Passage("11", "A: town", CORPUS[0]["text"]),
        Passage("33", "", "Nothing else."),
        Passage("22", "Mayors", CORPUS[1]["text"]),
    ]
    assert (figures["documents in the corpus"], figures["documents without text, left out"]) == (3, 1)
    assert [source["format"] for source in figures["sources"]] == ["browsecomp-plus"]


def test_questions_in_clear_need_no_canary(tmp_path: Path) -> None:
    converted(tmp_path, write(tmp_path / "q.jsonl", RECORD))
    assert read_questions(tmp_path / "out.jsonl")[0].metadata == NAMED


@pytest.mark.parametrize(
    ("record", "canary", "message"),
    [
        (obfuscated(RECORD), None, 'q.jsonl:1: "query" is obfuscated; give thresher data convert --canary TEXT'),
        (obfuscated(RECORD), CANARY + "s", 'q.jsonl:1: "query" is not text with this --canary'),
        (RECORD, CANARY, 'q.jsonl:1: "query" is not obfuscated (it is not base64); leave --canary out'),
        ({**RECORD, "evidence_docs": None}, None, 'q.jsonl:1: "evidence_docs" should be a list, found null'),
        ({**RECORD, "gold_docs": [{"text": "x"}]}, None, 'q.jsonl:1: "gold_docs", item 1: "docid" should be a string'),
        ({"id": "1", "question": "q?", "answer": "a"}, CANARY, "--canary is for BrowseComp-Plus"),
    ],
)
def test_questions_that_cannot_be_read_are_named(
    tmp_path: Path, record: dict[str, Any], canary: str | None, message: str
) -> None:
    with pytest.raises(UserError) as error:
        converted(tmp_path, write(tmp_path / "q.jsonl", record), canary=canary)
    assert message in str(error.value) and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        (CORPUS[:1], "1 of the documents that questions name are absent, such as '22' of question '769'; give all"),
        ([{"id": "11", "text": "x"}], 'd.jsonl:1: expected a document with "docid" and "text"'),
        ([{"docid": "11", "text": 5}], 'd.jsonl:1: "text" should be a string'),
    ],
)
def test_a_corpus_that_does_not_hold_what_is_named_leaves_no_file(
    tmp_path: Path, corpus: list[dict[str, Any]], message: str
) -> None:
    questions, documents = write(tmp_path / "q.jsonl", RECORD), [write(tmp_path / "d.jsonl", *corpus)]
    with pytest.raises(UserError) as error:
        converted(tmp_path, questions, documents=documents, corpus=tmp_path / "c.jsonl")
    assert message in str(error.value)
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "c.jsonl").exists()


def test_documents_are_written_to_a_corpus_and_belong_to_this_set(tmp_path: Path) -> None:
    documents = [write(tmp_path / "d.jsonl", *CORPUS)]
    with pytest.raises(UserError, match="--documents is written to --corpus; give --corpus FILE"):
        converted(tmp_path, write(tmp_path / "q.jsonl", RECORD), documents=documents)
    plain = write(tmp_path / "p.jsonl", {"question": "q?", "answer": "a"})
    with pytest.raises(UserError, match="--documents is the corpus of BrowseComp-Plus, and another set was read"):
        converted(tmp_path, plain, documents=documents, corpus=tmp_path / "c.jsonl")
    with pytest.raises(UserError, match=r"d\.jsonl: is read or written under another name too"):
        converted(tmp_path, plain, documents=documents, corpus=tmp_path / "d.jsonl")
