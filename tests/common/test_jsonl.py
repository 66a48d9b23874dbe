"""Tests of reading and writing records: an error in a file, of any kind, is reported with its line."""

import gzip
import json

import pytest

from thresher.common.errors import UserError
from thresher.common.jsonl import iter_jsonl, iter_records, write_jsonl


def test_lines_are_numbered_as_an_editor_does_and_blank_ones_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "x\xe2\x80\xa8y"}')  # BOM, CRLF, U+2028, no final line feed
    assert list(iter_jsonl(path)) == [(1, {"a": 1}), (4, {"a": "x\u2028y"})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "column 8"),
        (b'{"a": 1} {"a": 2}', "column 10"),
        (b"[1, 2]", "expected a JSON object, found a list"),
        (b"null", "found null"),
        (b"3.5", "found a number"),
        (b'{"a": "\xff"}', "not valid UTF-8 at byte 7"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "not valid JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    records = iter_jsonl(path)
    assert next(records) == (1, {"a": 1})
    with pytest.raises(UserError) as caught:
        next(records)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_in_json_is_read_item_by_item(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n {"a": 1},\n {"a": 2}\n]\n')
    assert list(iter_records(path)) == [(f"{path}: item 1", {"a": 1}), (f"{path}: item 2", {"a": 2})]
    for content, message in (
        ('{"Title": ["Sentence."]}', "expected a JSON list of objects, found an object"),
        ('[{"a": 1}, 2]', "item 2: expected a JSON object, found a number"),
        ('[{"a": 1},\n {"a": }]', "line 2 column 8"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=message) as caught:
            list(iter_records(path))
        assert str(path) in str(caught.value)


def test_gzip_of_both_kinds(tmp_path):
    records = [{"a": 1}, {"a": "ü"}]
    lines, items = tmp_path / "a.jsonl.gz", tmp_path / "a.json.gz"
    lines.write_bytes(gzip.compress(b"".join(json.dumps(r).encode() + b"\n" for r in records)))
    items.write_bytes(gzip.compress(json.dumps(records).encode()))
    assert [record for _, record in iter_records(lines)] == records
    assert [record for _, record in iter_records(items)] == records


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % n for n in range(50_000)))
    for name, content, expected in (
        ("cut.jsonl.gz", whole[: len(whole) // 2], "truncated or damaged gzip data after line"),
        ("plain.jsonl.gz", b'{"a": 1}\n', "truncated or damaged gzip data after line"),
        ("absent.jsonl", None, "no such file"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=expected) as caught:
            list(iter_jsonl(tmp_path / name))
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
    with pytest.raises(UserError, match="cannot be read"):
        list(iter_jsonl(tmp_path))
    monkeypatch.setattr("thresher.common.jsonl.WHOLE_LIMIT", 12)
    (tmp_path / "a.json").write_bytes(b'[{"a": 123}]')
    assert len(list(iter_records(tmp_path / "a.json"))) == 1
    (tmp_path / "a.json").write_bytes(b'[{"a": 1234}]')
    with pytest.raises(UserError, match=r"a\.json: holds more than 12 bytes in one JSON value; convert"):
        list(iter_records(tmp_path / "a.json"))


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_what_is_written_is_read_back(tmp_path, name):
    records = [{"t": 'Röntgen\u2028\n"x"'}, {"t": "\ud800 half a pair"}, {"n": 0.1}]
    assert write_jsonl(tmp_path / name, iter(records)) == 3
    assert [record for _, record in iter_jsonl(tmp_path / name)] == records
    first = (tmp_path / name).read_bytes()
    write_jsonl(tmp_path / name, records)
    assert (tmp_path / name).read_bytes() == first  # no timestamp in the gzip header


def test_writing_leaves_nothing_half_written(tmp_path):
    def records():
        yield {"a": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_jsonl(tmp_path / "out.jsonl", records())
    with pytest.raises(ValueError, match="JSON compliant"):
        write_jsonl(tmp_path / "out.jsonl", [{"a": float("nan")}])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="does not exist"):
        write_jsonl(tmp_path / "none" / "out.jsonl", [])


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    bomb = tmp_path / "bomb.jsonl.gz"
    with gzip.open(bomb, "wb") as file:
        file.write(b'{"a": 1}\n{"a": "')
        for _ in range(80):
            file.write(b" " * 10**6)
        file.write(b'"}\n')
    assert bomb.stat().st_size < 10**5
    records = iter_jsonl(bomb)
    assert next(records) == (1, {"a": 1})
    with pytest.raises(UserError, match=f"{bomb}:2: the line is longer than 64,000,000 bytes; convert the file"):
        next(records)
    monkeypatch.setenv("THRESHER_LINE_LIMIT", "99000000")
    assert [number for number, _ in iter_jsonl(bomb)] == [1, 2]
    monkeypatch.setenv("THRESHER_LINE_LIMIT", "9")  # including the line feed
    assert next(iter_jsonl(bomb)) == (1, {"a": 1})
    for said in ("64 MB", "0", "", "9" * 30):
        monkeypatch.setenv("THRESHER_LINE_LIMIT", said)
        with pytest.raises(UserError, match=r"THRESHER_LINE_LIMIT is .*; expected a number of bytes"):
            next(iter_jsonl(bomb))
