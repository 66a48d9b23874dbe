"""Tests of `thresher data convert`, `check` and `show`, called with the words that a person types."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from thresher.cli import main as cli
from thresher.retrieval.datasets.convert import MixSource, planned_bytes
from thresher.retrieval.questions import read_questions

NQ = '{"question": "who?", "answer": ["Ann", "Anna"]}\n{"question": "when?", "answer": []}\n'
HOTPOT = [
    {"_id": f"h{number}", "question": f"h {number}?", "answer": "yes", "supporting_facts": [["One", 0]]}
    | {"context": [["One", ["1."]], ["Two", [f"{number}."]]]}
    for number in range(4)
]
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Return say(*words) -> status, output, errors; it runs next to the two files."""
    monkeypatch.chdir(tmp_path)
    Path("nq.jsonl").write_text(NQ)
    Path("hotpot.json").write_text(json.dumps(HOTPOT))

    def run(*words: str) -> tuple[int, str, str]:
        status = cli.run(["data", *words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_convert_check_and_show(say: Say) -> None:
    mix = ("--mix", "nq=nq.jsonl", "hotpot=hotpot.json:3", "--seed", "1")
    status, printed, _ = say("convert", *mix, "--out", "out.jsonl.gz", "--corpus", "c.jsonl", "--skipped", "s.jsonl")
    assert status == 0 and "nq: skipped, no gold answer" in printed and "{" not in printed
    assert len(Path("s.jsonl").read_text().splitlines()) == 1
    questions = {question.id: question for question in read_questions("out.jsonl.gz")}
    assert questions["nq/0"].golds == ("Ann", "Anna") and len(questions) == 4
    assert len(Path("c.jsonl").read_text().splitlines()) == 1 + 3

    status, printed, _ = say("check", "out.jsonl.gz", "--json")
    assert status == 0 and json.loads(printed)["questions with gold indices"] == 3

    status, printed, _ = say(
        "convert", "--in", "hotpot.json", "hotpot.json", "--limit", "2", "--out", "first.jsonl", "--json"
    )
    figures = json.loads(printed)
    assert status == 0 and [source["format"] for source in figures["sources"]] == ["hotpotqa"]
    assert [question.id for question in read_questions("first.jsonl")] == ["h0", "h1"]

    status, printed, _ = say("show", "out.jsonl.gz", "--id", "nq/0")
    assert status == 0 and "golds     Ann\n" in printed and "passages" not in printed
    status, printed, _ = say("show", "hotpot.json", "--n", "2")
    assert status == 0 and printed.startswith("hotpot.json, read as hotpotqa\n")
    assert printed.count("*  1  [") == 2 and "h2" not in printed
    assert "nq.jsonl:2: skipped, no gold answer" in say("show", "nq.jsonl")[1]


def test_convert_asks_for_room_first(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planned size is close to the written size, indented or not; part of the questions needs part of the space,
    and a corpus that does not fit leaves no questions either."""
    records = [
        {**HOTPOT[0], "_id": f"{number}", "context": [["One", ["1."]], [f"Öd {number}", [f"{number}. " * 50]]]}
        for number in range(900)
    ]
    for indent in (None, 2):
        Path("many.json").write_text(json.dumps(records, indent=indent))
        planned = planned_bytes(MixSource(paths=(Path("many.json"),)))
        assert say("convert", "--in", "many.json", "--out", "all.jsonl")[0] == 0
        assert planned == pytest.approx(Path("all.jsonl").stat().st_size, rel=0.1)
    some = planned_bytes(MixSource(paths=(Path("many.json"),), count=90))
    assert some == pytest.approx(planned / 10, rel=0.1)
    real = shutil.disk_usage
    for out, free, what in (("o.jsonl", planned / 2, "the questions"), ("o.jsonl.gz", planned / 3, "the corpus")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: real(path)._replace(free=int(free)))
        status, _, error = say("convert", "--in", "many.json", "--out", out, "--corpus", "c.jsonl")
        assert status == 2 and f"{what} needs" in error and "are free" in error
        assert not Path(out).exists() and not Path("c.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("convert", "--in", "hotpot.json", "--format", "musique", "--out", "o.jsonl"), "looks like HotpotQA as its"),
        (("convert", "--mix", "nq=nq.jsonl", "--limit", "3", "--out", "o.jsonl"), "--limit is for --in"),
        (("convert", "--mix", "nq.jsonl", "--out", "o.jsonl"), "expected NAME=FILE or NAME=FILE:COUNT"),
        (("check", "hotpot.json"), "convert it to our records first, with thresher data convert"),
        (("show", "nq.jsonl", "--id", "9"), "nq.jsonl: no question with the id '9'"),
        (("show", "nq.jsonl", "--format", "x"), "unknown format 'x'"),
    ],
)
def test_mistakes_end_in_one_sentence(say: Say, words: tuple[str, ...], expected: str) -> None:
    status, _, complaint = say(*words)
    assert status == 2 and expected in complaint and complaint.count("\n") == 1
    assert complaint.startswith("thresher: ") and not Path("o.jsonl").exists()


def test_sets_with_a_question_in_common_are_refused(say: Say) -> None:
    def write(name: str, *asked: tuple[str, str]) -> None:
        lines = ({"id": id_, "question": question, "answer": "a"} for id_, question in asked)
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("train.jsonl", ("t", "Who is it?"), ("0", "Where?"))
    write("dev.jsonl", ("d", "Who was it?"), ("1", "When?"))
    status, printed, _ = say("check", "train.jsonl", "dev.jsonl", "--json")
    assert status == 0 and [found["questions"] for found in json.loads(printed).values()] == [2, 2]
    assert list(json.loads(printed)) == ["train.jsonl", "dev.jsonl"]
    for test, twice in ((("x", "Who  IS it"), "train"), (("d", "Why?"), "dev"), (("0", "When?"), "dev")):
        write("test.jsonl", test)
        status, _, said = say("check", "train.jsonl", "dev.jsonl", "test.jsonl")
        assert status == 2 and f"test.jsonl: question {test[0]} is in {twice}.jsonl too; give" in said
    write("test.jsonl", ("0", "Why?"), ("y", "How?"))  # the row's number, as without an id
    assert say("check", "train.jsonl", "test.jsonl")[0] == 0
