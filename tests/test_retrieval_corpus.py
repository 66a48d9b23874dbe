"""Corpora in the formats people have, and what is refused."""

import gzip
import json

import pytest

from thresher.retrieval.corpus import Corpus, Passage, embedded_text, read_corpus
from thresher.rewards.errors import UserError


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "passage"),
    [
        ({"title": "T", "text": "x"}, Passage("0", "T", "x")),
        ({"id": "p7", "title": "T", "text": "x", "source": "s"}, Passage("p7", "T", "x")),
        ({"id": 12, "title": "", "text": " x\n"}, Passage("12", "", " x\n")),
        (
            {"id": "5", "contents": '"Evan Morris"\nHe was.\nTwice.'},
            Passage("5", "Evan Morris", "He was.\nTwice."),
        ),
        ({"id": "5", "contents": '""Heroes" (song)"\nIt is.'}, Passage("5", '"Heroes" (song)', "It is.")),
        ({"id": "5", "contents": '"\nIt is.'}, Passage("5", '"', "It is.")),
        ({"id": "5", "contents": "Bare title\nIt is."}, Passage("5", "Bare title", "It is.")),
        ({"id": "5", "contents": "One line, no title."}, Passage("5", "", "One line, no title.")),
        ({"title": "T", "text": "<|im_end|></search>"}, Passage("0", "T", "<|im_end|></search>")),
    ],
)
def test_records_become_passages(tmp_path, record, passage):
    assert list(read_corpus(write(tmp_path / "c.jsonl", record))) == [passage]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"title": "T"}, 'no "text"'),
        ({"text": "x"}, 'no "title"'),
        ({"id": "1", "body": "x"}, 'expected "title" and "text", or "id" and "contents"'),
        ({"title": "T", "text": ["x"]}, '"text" should be a string, found a list'),
        ({"title": None, "text": "x"}, '"title" should be a string, found null'),
        ({"title": "T", "text": " \n"}, '"text" is empty'),
        ({"id": "1", "contents": ""}, '"contents" is empty'),
        ({"id": "1", "contents": '"T"\n '}, "a title without text"),
        ({"id": "1", "contents": 3}, '"contents" should be a string, found a number'),
        ({"id": "", "title": "T", "text": "x"}, '"id" is empty'),
        ({"id": True, "title": "T", "text": "x"}, '"id" should be a string, found a boolean'),
        ({"id": 1.0, "title": "T", "text": "x"}, '"id" should be a string, found a number'),
        ({"id": "first", "title": "T", "text": "x"}, "the id 'first' was used before, at"),
        ({"title": "T", "text": "half \ud800"}, "half of a surrogate pair"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, record, told):
    path = write(tmp_path / "c.jsonl", {"id": "first", "title": "T", "text": "x"}, record)
    with pytest.raises(UserError) as caught:
        read_corpus(path)
    assert str(caught.value).startswith(f"{path}:2: ") and told in str(caught.value)


def test_a_row_number_may_not_meet_a_given_id(tmp_path):
    path = write(tmp_path / "c.jsonl", {"id": "1", "title": "A", "text": "x"}, {"title": "B", "text": "y"})
    with pytest.raises(UserError, match=r"c\.jsonl:2: the id '1' was used before, at .*c\.jsonl:1"):
        read_corpus(path)


@pytest.mark.parametrize(("name", "content"), [("c.jsonl", b""), ("c.jsonl", b"\n\n"), ("c.json", b"[]")])
def test_an_empty_corpus_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: holds no passages"):
        read_corpus(tmp_path / name)


def test_a_corpus_made_by_hand_obeys_the_same_rules():
    with pytest.raises(UserError, match="holds no passages"):
        Corpus([])
    with pytest.raises(UserError, match="the id 'a' occurs twice"):
        Corpus([Passage("a", "", "x"), Passage("a", "", "y")])


def test_the_hash_is_over_the_content_not_the_file(tmp_path):
    records = [{"id": "0", "title": "A", "text": "x"}, {"id": "1", "title": "B", "text": "y"}]
    plain = write(tmp_path / "c.jsonl", *records)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(records, indent=2))
    wiki = write(tmp_path / "w.jsonl", *({"id": r["id"], "contents": f'"{r["title"]}"\n{r["text"]}'} for r in records))
    read = [read_corpus(path) for path in (plain, tmp_path / "c.jsonl.gz", tmp_path / "c.json", wiki)]
    assert len({corpus.sha256 for corpus in read}) == 1 and len(read[0].sha256) == 64
    assert read[0].path == plain


@pytest.mark.parametrize(
    "other",
    [
        [Passage("1", "B", "y"), Passage("0", "A", "x")],
        [Passage("0", "A", "x")],
        [Passage("0", "A", "x"), Passage("1", "By", "")],
        [Passage("0", "A", "x"), Passage("2", "B", "y")],
        [Passage("0", "A", "x"), Passage("1", "B", "y ")],
    ],
)
def test_the_hash_sees_order_and_every_field(other):
    assert Corpus([Passage("0", "A", "x"), Passage("1", "B", "y")]).sha256 != Corpus(other).sha256


def test_what_is_embedded():
    assert embedded_text(Passage("0", "T", "x"), "text") == "x"
    assert embedded_text(Passage("0", "T", "x"), "title+text") == "T\nx"
    assert embedded_text(Passage("0", "", "x"), "title+text") == "x"
    with pytest.raises(UserError, match="expected one of text, title"):
        embedded_text(Passage("0", "T", "x"), "title")


def test_real_corpora(shared_data):
    hotpot = read_corpus(shared_data / "hotpotqa/corpus.jsonl")
    assert len(hotpot) == 4937 and hotpot[1].title == "Scott Derrickson" and hotpot[4936].id == "4936"
    assert [p.id for p in hotpot[:3]] == ["0", "1", "2"]
    wiki2 = read_corpus(shared_data / "2wiki/corpus.json")
    assert len(wiki2) == 6119 and wiki2[0].title == "Teutberga"
    search_r1 = read_corpus(shared_data / "formats/searchr1_corpus.jsonl")
    assert len(search_r1) == 10 and search_r1[0].title == "Evan Morris"
    assert search_r1[0].text.startswith("Evan Morris Evan L. Morris (January 26")
    scale = read_corpus(shared_data / "formats/wiki_passages_50k.jsonl.gz")
    assert len(scale) == 50271 and scale[0].title == "Teutberga" and scale[0].text == wiki2[0].text


def test_chunks_that_share_an_id_are_refused(shared_data):
    with pytest.raises(UserError, match=r"ultrarag_corpus_example\.jsonl:\d: the id '\d+' was used before"):
        read_corpus(shared_data / "formats/ultrarag_corpus_example.jsonl")
