"""Malformed records: one among whole ones, in a file that a command reads.

What can be no record (not JSON, no object, a needed key that is absent or of another type) must be refused, in a
sentence that names the file. What is merely odd (huge, nested, unseen characters, duplicates, keys that nobody reads)
may be refused or read, but never ends in a trace. A fork reads a few hundred such files, one after the other.
"""

import io
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from thresher.bench.torture.attack import Field, Tried, shuffled
from thresher.bench.torture.kills import clear
from thresher.bench.torture.worker import Ended, ForkLimits, Worker
from thresher.bench.torture.world import eval_words

RECORDS, LEAST = 10_000, 20
BATCH = 100
SECONDS = 120.0  # of a batch
WRONG_TYPES: tuple[Any, ...] = (None, True, 7, -1.5, [], {}, [7], [None], {"a": 1}, [["x"]])


@dataclass(frozen=True, slots=True)
class Reader:
    """A kind of file. record: a whole one of a number. needed: keys that must be there, with the types of theirs that
    are right. words: from world, file and a free path to the command that reads it."""

    record: Callable[[int], dict[str, Any]]
    needed: Mapping[str, tuple[type, ...]]
    words: Callable[[Path, Path, Path], list[str]]


def _question(number: int) -> dict[str, Any]:
    return {"id": f"q{number}", "question": f"Who is {number}?", "golden_answers": [f"Anna {number}"]}


def _transcript(number: int) -> dict[str, Any]:
    segments = [{"source": "policy", "text": f"<answer>Anna {number}</answer>"}]
    return {"id": f"t{number}", "golden_answers": ["Anna"], "segments": segments}


def _passage(number: int) -> dict[str, Any]:
    return {"id": f"p{number}", "title": f"Anna {number}", "text": f"Anna {number} lives at number {number}."}


def _prediction(number: int) -> dict[str, Any]:
    return {"id": f"q{number}", "question": f"Who is {number}?", "measures": {"em": 1.0, "f1": 0.5}, "parts": {"em": 1}}


def _compared(at: Path, file: Path, out: Path) -> list[str]:
    return ["compare", str(file.parent), str(file.parent), "--out", str(out)]


def _scored(at: Path, file: Path, out: Path) -> list[str]:
    return ["score", "--system", "eval_rar", "--transcripts", str(file), "--out", str(out)]


def _built(at: Path, file: Path, out: Path) -> list[str]:
    return ["index", "build", "--corpus", str(file), "--dim", "16", "--out", str(out)]


READERS = {
    "questions": Reader(
        _question,
        {"question": (str,), "golden_answers": (list, str)},
        lambda at, file, out: ["data", "check", str(file)],
    ),
    "transcripts": Reader(_transcript, {"id": (str, int), "golden_answers": (list,), "segments": (list,)}, _scored),
    "corpora": Reader(_passage, {"text": (str,)}, _built),
    "predictions": Reader(_prediction, {"measures": (dict,), "parts": (dict,)}, _compared),
}


def attack(field: Field) -> Iterator[Tried]:
    """Malformed records of every reader, by every kind of malformation."""
    draw = field.draw("records")
    _write_evaluation(field)
    kinds = shuffled(draw, list(READERS), field.count(RECORDS, LEAST))
    for begin in range(0, len(kinds), BATCH):
        cases = [_case(field, draw, kind, begin + place) for place, kind in enumerate(kinds[begin : begin + BATCH])]
        yield from read_batch(field.worker, cases, field.scratch / "read.jsonl")
        for case in cases:
            case.remove()


@dataclass(frozen=True, slots=True)
class Case:
    """A file with one malformed record, and what is known of it. must: it has to be refused."""

    kind: str
    name: str
    must: bool
    file: Path
    words: list[str]
    out: Path

    def remove(self) -> None:
        """The file, and what the command wrote."""
        if self.file.name != "trajectories.jsonl":
            self.file.unlink(missing_ok=True)
        clear(self.out)


def _case(field: Field, draw: Random, kind: str, number: int) -> Case:
    reader, name = READERS[kind], draw.choice(list(ODDITIES))
    lines, must = malformed(reader, name, draw)
    folder = field.scratch / f"{number}" if kind == "predictions" else field.scratch
    if kind == "predictions":
        folder.mkdir(exist_ok=True)
        (folder / "metrics.json").write_bytes((field.scratch / "evaluation" / "metrics.json").read_bytes())
    file = folder / ("trajectories.jsonl" if kind == "predictions" else f"read{number}.jsonl")
    file.write_bytes(b"\n".join(lines) + b"\n")
    out = folder if kind == "predictions" else field.scratch / f"read{number}.out"
    target = folder / "compared" if kind == "predictions" else out
    return Case(kind, name, must, file, reader.words(field.at, file, target), out)


def malformed(reader: Reader, name: str, draw: Random) -> tuple[list[bytes], bool]:
    """The lines of a file of three records, the middle one malformed; whether it must be refused."""
    lines = [json.dumps(reader.record(number)).encode() for number in range(3)]
    lines[1], must = ODDITIES[name](reader, reader.record(1), draw)
    return lines, must


def read_batch(worker: Worker, cases: Sequence[Case], journal: Path) -> Iterator[Tried]:
    """Every case, read in one fork; one that ends before its work has come to its end at a case, and another fork reads
    those behind that."""
    while cases:
        journal.write_text("")
        ended = worker.play_call(partial(_read_all, worker, cases, journal), ForkLimits(seconds=SECONDS))
        done = [json.loads(line) for line in journal.read_text().splitlines()]
        for case, (status, err) in zip(cases, done, strict=False):
            yield verdict(case, status, err)
        if len(done) < len(cases):
            yield Tried(cases[len(done)].kind, "wrong", f"{_shown(cases[len(done)])}: {_how(ended)}")
        cases = cases[len(done) + 1 :]


def verdict(case: Case, status: int, err: str) -> Tried:
    """What a command's end says of how a record was read."""
    last = (err.strip().splitlines() or [""])[-1][:300]
    if "Traceback (most recent call last)" in err or status not in (0, 2):
        return Tried(case.kind, "wrong", f"{_shown(case)}: status {status}: {last}")
    if status == 2:
        named = last.startswith("thresher: ") and (case.file.name in last or str(case.file.parent) in last)
        return Tried(case.kind, "refused" if named else "wrong", f"{_shown(case)}: {last}")
    return Tried(case.kind, "wrong" if case.must else "read", f"{_shown(case)}: read without a word")


def _read_all(worker: Worker, cases: Sequence[Case], journal: Path) -> int:
    with journal.open("a") as file:
        for case in cases:
            err = io.StringIO()
            with redirect_stderr(err), redirect_stdout(io.StringIO()):
                try:
                    status = worker.run(case.words)
                except BaseException:
                    status = 1
                    traceback.print_exc()
            file.write(json.dumps([status, err.getvalue()]) + "\n")
            file.flush()
    return 0


def _write_evaluation(field: Field) -> None:
    ended = field.worker.play(eval_words(field.at, field.scratch / "evaluation"))
    if ended.status != 0:
        raise RuntimeError(ended.err)


def _how(ended: Ended) -> str:
    if ended.timed_out:
        return f"hangs: killed after {SECONDS:.0f} s"
    return f"died: signal {ended.signal}, status {ended.status}: {ended.err[-300:]}"


def _shown(case: Case) -> str:
    data = case.file.read_bytes().split(b"\n")[1]
    return f"{case.name}: {data[:160]!r}{'..' if len(data) > 160 else ''}"


# What is wrong with a record: from a reader and a whole record to its line, and whether it must be refused.


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def _no_key(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    del record[draw.choice(list(reader.needed))]
    return _dump(record), True


def _other_type(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    key = draw.choice(list(reader.needed))
    record[key] = draw.choice(WRONG_TYPES)
    allowed = reader.needed[key]
    right = isinstance(record[key], allowed) and (not isinstance(record[key], bool) or bool in allowed)
    return _dump(record), not right


def _any_type(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    """Somewhere inside a record, however deep."""
    place, holder = draw.choice(list(_places(record)))
    holder[place] = draw.choice(WRONG_TYPES)
    return _dump(record), False


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for place in value if isinstance(value, dict) else range(len(value)):
        yield place, value
        if isinstance(value[place], dict | list):
            yield from _places(value[place])


def _no_object(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    return _dump(draw.choice([[record], "text", 7, None, True, [], 1e9])), True


def _half(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    data = _dump(record)
    return data[: draw.randrange(1, len(data) - 1)], True


def _bad_utf8(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    data = _dump(record)
    return data[:5] + draw.choice([b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"]) + data[5:], True


def _number(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    place, holder = draw.choice(list(_places(record)))
    holder[place] = "NUMBER"
    number = draw.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"1e-999", b"-0", b"1E400"])
    return _dump(record).replace(b'"NUMBER"', number), False


def _nested(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    place, holder = draw.choice(list(_places(record)))
    holder[place] = "DEEP"
    depth = draw.choice([50, 990, 5000, 200_000])
    opened, closed = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return _dump(record).replace(b'"DEEP"', opened * depth + b"0" + closed * depth), depth > 1000


def _characters(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    texts = [(place, holder) for place, holder in _places(record) if isinstance(holder[place], str)]
    place, holder = draw.choice(texts)
    odd = ["\x00", "\ud800", "\udfff", "\u202e", "\ufeff", "\u2028", "\x1b[2J", "\U0010ffff", "\r", "</answer>"]
    holder[place] = draw.choice(["", holder[place]]) + "".join(draw.choices(odd, k=3)) + draw.choice(["", "x"])
    return _dump(record), False


def _long(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    texts = [(place, holder) for place, holder in _places(record) if isinstance(holder[place], str)]
    place, holder = draw.choice(texts)
    holder[place] = draw.choice(["x", " ", "<", "<answer>", "\u0301", "ab "]) * draw.choice([1000, 100_000])
    return _dump(record), False


def _blank(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    texts = [(place, holder) for place, holder in _places(record) if isinstance(holder[place], str)]
    place, holder = draw.choice(texts)
    holder[place] = draw.choice(["", " ", "\t\n", "\u3000"])
    return _dump(record), False


def _twice(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    if draw.random() < 0.5:
        return _dump(record) + b"\n" + _dump(record), False
    data = _dump(record)
    return data[:-1] + b"," + data[1:], False  # every key twice in one object


def _more(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    names = ["id", "passages", "gold_indices", "branches", "answers", "entailment", "verdict", "metadata", "answer"]
    for name in draw.sample([*names, "contents", "__class__", "", "title", "text", "questions"], 2):
        record[name] = draw.choice([*WRONG_TYPES, "x", 10**400, [{"text": 7}], [0], [-1], {"full": 3}, {"x": [{}]}])
    needed = all(isinstance(record.get(key), types) for key, types in reader.needed.items())
    return _dump(record), not needed


def _trailing(reader: Reader, record: dict[str, Any], draw: Random) -> tuple[bytes, bool]:
    return _dump(record) + draw.choice([b"}", b"]", b" {}", b",", b"x", b"\x00"]), True


ODDITIES: dict[str, Callable[[Reader, dict[str, Any], Random], tuple[bytes, bool]]] = {
    "no key": _no_key,
    "another type": _other_type,
    "another type inside": _any_type,
    "no object": _no_object,
    "half a line": _half,
    "not UTF-8": _bad_utf8,
    "a number that is none": _number,
    "nested": _nested,
    "odd characters": _characters,
    "a long text": _long,
    "a blank text": _blank,
    "twice": _twice,
    "more keys": _more,
    "more behind it": _trailing,
}
