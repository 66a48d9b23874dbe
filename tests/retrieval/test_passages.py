"""Test the formats of corpora with the same content, how they are told apart, and cutting into chunks."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thresher.common.errors import UserError
from thresher.retrieval.corpus import open_corpus, read_corpus
from thresher.retrieval.passages import Passage, chunks

PASSAGES = [
    Passage("1", "Aaron", 'Aaron ("Ahärôn") is\u2028a\tprophet. '),
    Passage("2", '"Heroes" (song)', "It is.\r\nTwice."),
    Passage("3", "", 'She said "no"'),
]
RECORDS = [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]


def lines(records: object) -> str:
    assert isinstance(records, list)
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def table(path: Path, *rows: list[str], end: str = "\n") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator=end).writerows(rows)
    return path


def test_the_same_passages_in_every_format(tmp_path: Path) -> None:
    """Corpora are read in memory and on disk. The name tells the format, or the content if the name does not."""
    contents = [{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in PASSAGES]
    rows = [[p.id, p.text, p.title] for p in PASSAGES]
    texts = {
        "a.jsonl": lines(RECORDS),
        "wiki-18.jsonl": lines(contents),
        "beir.jsonl": lines([{"_id": p.id, "title": p.title, "text": p.text, "metadata": {}} for p in PASSAGES]),
        "docid.jsonl": lines([{"docid": int(p.id), "title": p.title, "text": p.text} for p in PASSAGES]),
        "windows.jsonl": "\ufeff" + "\n" + lines(RECORDS).replace("\n", "\r\n") + "\r\n",
        "bom.jsonl": "\ufeff" + lines(contents),
        "list.json": json.dumps(RECORDS, indent=1),
        "lines.json": lines(contents),
        "lines.txt": lines(RECORDS),
        "list.txt": "\n " + json.dumps(RECORDS),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    table(tmp_path / "dpr.tsv", ["id", "text", "title"], *rows)
    table(tmp_path / "table", ["id", "text", "title"], *rows)
    table(tmp_path / "windows.tsv", ["id", "text", "title"], *rows, end="\r\n")
    table(tmp_path / "wide.tsv", ["title", "n", "text", "id"], *([p.title, "0", p.text, p.id] for p in PASSAGES))
    (tmp_path / "bom.tsv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "dpr.tsv").read_bytes() + b"\n\n")
    for path in sorted(tmp_path.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 30
    for path in paths:
        assert list(read_corpus(path)) == PASSAGES, path.name
        stored = open_corpus(path, tmp_path / "cache" / path.name)
        assert list(stored) == [stored[row] for row in range(3)] == PASSAGES, path.name
        assert stored.sha256 == read_corpus(path).sha256 == read_corpus(paths[0]).sha256


@pytest.mark.parametrize("name", ["c.json", "c.json.gz"])
def test_titles_with_their_sentences(tmp_path: Path, name: str) -> None:
    """HotpotQA's sentences may or may not begin with a space; a title may occur twice, which a dict would hide."""
    text = '{"A": ["One.", " Two.", "Three.", "", " "], "B": "All of it.", "A": ["Again."]}'
    data = ("\ufeff" + text).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    expected = [Passage("0", "A", "One. Two. Three. "), Passage("1", "B", "All of it."), Passage("2", "A", "Again.")]
    assert list(read_corpus(tmp_path / name)) == list(open_corpus(tmp_path / name, tmp_path / "cache")) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", '{"A": ["x"], "B": [["x"]]}', "title 'B': expected a list of sentences"),
        ("c.json", '{"data": {"A": ["x"]}}', "title 'data': expected a list of sentences"),
        ("c.json", '{"A": []}', "title 'A': \"text\" is empty"),
        ("c.json", '{"A": ["x"],\n "B": }', "not valid JSON at line 2"),
        ("c.json", '{"A": ["half \\ud800"]}', "half of a surrogate pair"),
        ("c.json", '[{"title": "A"}]', 'item 1: no "text"'),
        ("c.parquet", "PAR1\x15\x04", "not a corpus in a known format; expected JSONL, a JSON list or"),
        ("c.csv", "id,text,title\n1,x,A\n", "not a corpus in a known format"),
        ("c.tsv", "", "the first line should be the header id, text, title"),
        ("c.tsv", "1\tx\tA\n", r"found '1\tx\tA'; put the header there"),
        ("c.tsv", "id\ttext\ttitle\ttext\n", "the first line should be the header"),
        ("c.tsv", "id\ttext\ttitle\n", "holds no passages"),
        ("c.tsv", "id\ttext\ttitle\n1\tx\tA\n2\tx\n", ":3: expected 3 columns (id, text, title), found 2"),
        ("c.tsv", "id\ttext\ttitle\n1\tx\tA\n\n2\tx y\tB\tC\n", ":4: expected 3 columns (id, text, title), found 4"),
        ("c.tsv", 'id\ttext\ttitle\n1\t"x\tA\n2\ty\tB\n', ":2: malformed TSV (unexpected end of data)"),
        ("c.tsv", 'id\ttext\ttitle\n1\t"x\tA\n2\t"y"\tB\n', ":2: malformed TSV ("),
        ("c.tsv", 'id\ttext\ttitle\n1\t"x" y\tA\n', ":2: malformed TSV ("),
        ("c.tsv", "id\ttext\ttitle\n1\tx\rid\tA\n", ":2: malformed TSV ("),
        ("c.tsv", "id\ttext\ttitle\n1\t \tA\n", ':2: "text" is empty'),
        ("c.tsv", "id\ttext\ttitle\n\tx\tA\n", ':2: "id" is empty'),
        ("c.tsv", "id\ttext\ttitle\n1\tx\tA\n1\ty\tA\n", ":3: the id '1' was used before, at "),
    ],
)
def test_what_is_no_corpus_is_reported_in_one_sentence(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content, newline="")
    for attempt in (read_corpus, lambda path: open_corpus(path, tmp_path / "cache")):
        with pytest.raises(UserError) as caught:
            attempt(path)
        sentence = str(caught.value)
        assert sentence.startswith(f"{path}:") and message in sentence and "\n" not in sentence


def test_bad_utf_8_in_a_table_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_bytes(b'id\ttext\ttitle\n1\t"x\ny"\tA\n2\t\xff\tB\n')
    with pytest.raises(UserError, match=r"c\.tsv:4: not valid UTF-8 at byte 2"):
        read_corpus(tmp_path / "c.tsv")


def test_damaged_gzip_is_reported(tmp_path: Path) -> None:
    whole = gzip.compress(lines([{"title": f"T{row}", "text": f"text {row * 7919}"} for row in range(9000)]).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "plain.json.gz").write_text(json.dumps(RECORDS))
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: truncated or damaged gzip data after line \d{4} "):
        open_corpus(tmp_path / "cut.jsonl.gz", tmp_path / "cache")
    with pytest.raises(UserError, match=r"plain\.json\.gz: truncated or damaged gzip data at its beginning "):
        open_corpus(tmp_path / "plain.json.gz", tmp_path / "cache")


@pytest.mark.parametrize("data", [bz2.compress(b"{}\n"), lzma.compress(b"{}\n"), b"\x28\xb5\x2f\xfd", b"PK\x03\x04"])
def test_what_is_packed_otherwise_is_reported(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "c.jsonl").write_bytes(data)
    with pytest.raises(UserError, match=r"c\.jsonl: is (bzip2|xz|zstd|zip) data; unpack it first: "):
        open_corpus(tmp_path / "c.jsonl", tmp_path / "cache")


def test_a_table_may_have_long_cells_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "c.tsv"
    path.write_text(f"  \nid\ttext\ttitle\n\n1\t{'x' * 200_000}\tA\n \n2\ty\tB\n")
    for corpus in (read_corpus(path), open_corpus(path, tmp_path / "cache")):
        assert [(passage.id, len(passage.text), passage.title) for passage in corpus] == [
            ("1", 200_000, "A"),
            ("2", 1, "B"),
        ]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_archive_under_another_name_is_reported(tmp_path: Path, kind: int) -> None:
    data = lines(RECORDS).encode()
    for name in ("c.jsonl", "c.jsonl.gz"):
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w", format=kind) as archive:
            member = tarfile.TarInfo("wiki_dump.jsonl")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        with pytest.raises(UserError, match=r"c\.jsonl(\.gz)?: is a tar archive; unpack it first: tar -xOf "):
            open_corpus(tmp_path / name, tmp_path / "cache")
    spoken = {"title": "T", "text": " " * 232 + "mustard is no archive"}
    assert json.dumps(spoken).index("ustar") == 257
    (tmp_path / "c.jsonl").write_text(lines([spoken]))
    assert len(read_corpus(tmp_path / "c.jsonl")) == 1


@pytest.mark.parametrize(
    ("text", "words", "cut"),
    [
        ("a b c d e", 2, ["a b", "c d", "e"]),
        ("a b c d", 2, ["a b", "c d"]),
        ("  a \n b\u2028c\t", 2, ["a \n b", "c"]),
        ("a", 100, ["a"]),
        ("a b", 1, ["a", "b"]),
        ("x" * 100_000 + " " * 100_000 + "y", 3, ["x" * 100_000 + " " * 100_000 + "y"]),
    ],
)
def test_chunks(text: str, words: int, cut: list[str]) -> None:
    assert list(chunks(Passage("p", "T", text), words)) == [
        Passage(f"p#{number}", "T", piece) for number, piece in enumerate(cut)
    ]


@settings(derandomize=True, max_examples=200, deadline=None)
@example("\x1c a\x85\x1f\u3000b\x0b", 1)
@given(st.text(alphabet="ab \n\t\u2028\u00a0\u200b\x1d"), st.integers(1, 4))
def test_chunks_hold_every_word_once_and_are_full_but_for_the_last(text: str, words: int) -> None:
    cut = [chunk.text for chunk in chunks(Passage("p", "", text), words)]
    assert [word for piece in cut for word in piece.split()] == text.split()
    assert all(len(piece.split()) == words for piece in cut[:-1])
    assert all(piece == piece.strip() and piece in text for piece in cut)


def test_a_corpus_in_chunks(tmp_path: Path) -> None:
    records = [{"id": "a", "title": "T", "text": "1 2 3 4 5"}, {"title": "U", "text": "6"}]
    (tmp_path / "c.jsonl").write_text(lines(records))
    expected = [
        Passage("a#0", "T", "1 2"), Passage("a#1", "T", "3 4"), Passage("a#2", "T", "5"), Passage("1#0", "U", "6")
    ]  # fmt: skip
    for corpus in (
        read_corpus(tmp_path / "c.jsonl", chunk_words=2),
        open_corpus(tmp_path / "c.jsonl", tmp_path / "cache", chunk_words=2),
    ):
        assert list(corpus) == expected and (corpus.records, corpus.skipped, len(corpus)) == (2, 0, 4)
    for words in (-1, -100):
        with pytest.raises(UserError, match=f"chunk_words is {words}; expected at least 1 word"):
            read_corpus(tmp_path / "c.jsonl", chunk_words=words)


def test_empty_records_are_left_out_and_counted_only_when_asked(tmp_path: Path) -> None:
    """This holds in every format; a row number that replaces an id counts the passages kept."""
    records = [{"title": "A", "text": " "}, {"title": "B", "text": "x"}, {"title": "C", "text": ""}]
    records += [{"contents": '"D"\n \t'}, {"contents": " "}, {"title": "E", "text": "y"}, {"title": "F", "text": ""}]
    (tmp_path / "c.jsonl").write_text(lines(records))
    (tmp_path / "c.json").write_text(json.dumps(records))
    (tmp_path / "titles.json").write_text('{"A": [], "B": ["x"], "C": [" "], "E": ["y"]}')
    rows = [["0", "y", "E"], ["8", "", "F"], ["9", "\n", ""]]
    table(tmp_path / "c.tsv", ["id", "text", "title"], ["7", "", "A"], ["b", "x", "B"], *rows)
    for name, kept, skipped in [
        ("c.jsonl", ["0", "1"], 5), ("c.json", ["0", "1"], 5), ("titles.json", ["0", "1"], 2), ("c.tsv", ["b", "0"], 3)
    ]:  # fmt: skip
        with pytest.raises(UserError, match=r"is empty; fill it in, remove this record, or skip all empty ones"):
            open_corpus(tmp_path / name, tmp_path / "cache" / name)
        stored = open_corpus(tmp_path / name, tmp_path / "cache" / name, skip_empty=True)
        read = read_corpus(tmp_path / name, skip_empty=True)
        for corpus in (stored, read):
            assert [(p.id, p.title, p.text) for p in corpus] == [(kept[0], "B", "x"), (kept[1], "E", "y")]
            assert [corpus[row] for row in (0, 1)] == list(corpus)
            assert (corpus.skipped, corpus.records) == (skipped, skipped + 2)
    (tmp_path / "null.jsonl").write_text('{"title": "A", "text": "x"}\n{"title": "A", "text": null}\n')
    with pytest.raises(UserError, match=r'null\.jsonl:2: "text" should be a string, found null'):
        read_corpus(tmp_path / "null.jsonl", skip_empty=True)
    (tmp_path / "none.jsonl").write_text(lines(records[:1]))
    with pytest.raises(UserError, match="holds no passages besides 1 empty ones"):
        open_corpus(tmp_path / "none.jsonl", tmp_path / "cache" / "none", skip_empty=True)
