"""Tests of stored records: every kind of damage to every kind of file, with each of its readers; old files; kills."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_cases import eval_record, make_run, step_record, trajectory
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from stored_cases import stored

from thresher.cli import main as cli
from thresher.common import records as records_module
from thresher.common.errors import UserError
from thresher.common.records import RecordLog, read_records, write_records
from thresher.engine.baselines.reading import read_evidence
from thresher.engine.evaluation.compare import compare, read_evaluation
from thresher.engine.evaluation.run import EvalFolder, Generated
from thresher.engine.extraction.records import Journal
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.reports import report
from thresher.engine.reports.report import write_comparison, write_report
from thresher.engine.reports.token_view import write_token_view
from thresher.engine.reports.watch import LivePage, read_state
from thresher.engine.scoring.endpoint import Replies
from thresher.engine.scoring.transcripts import score_file
from thresher.engine.store.run_folder import RunFolder, best_checkpoint
from thresher.engine.store.token_stats import TokenStats, write_token_stats
from thresher.engine.training.sft_data import taught_records
from thresher.policy.tokenizer import Tokenizer
from thresher.rewards.reward import Source

Lines = list[bytes]
Reader = Callable[[Path, bool], object]  # (world, unverified)


def another(line: bytes) -> bytes:
    """Return the line with one digit or letter changed."""
    at = next(n for n, byte in enumerate(line) if n > 12 and chr(byte).isalnum() and line[n - 1 : n] in b'" ')
    return line[:at] + (b"7" if line[at : at + 1] != b"7" else b"8") + line[at + 1 :]


def wrong_type(line: bytes) -> bytes:
    record = json.loads(line)
    record[next(iter(record))] = [{"x": []}]
    return json.dumps(record).encode() + b"\n"


def bare(line: bytes) -> bytes:
    record = json.loads(line)
    del record["checksum"]
    return json.dumps(record).encode() + b"\n"


# Three records and, in a finished file, a closing line.
INSIDE: dict[str, Callable[[Lines], Lines]] = {
    "changed": lambda lines: [lines[0], another(lines[1]), *lines[2:]],
    "first changed": lambda lines: [another(lines[0]), *lines[1:]],
    "wrong type": lambda lines: [lines[0], wrong_type(lines[1]), *lines[2:]],
    "lost": lambda lines: [lines[0], *lines[2:]],
    "first lost": lambda lines: lines[1:],
    "doubled": lambda lines: [lines[0], lines[1], *lines[1:]],
    "swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
    "without a checksum": lambda lines: [lines[0], bare(lines[1]), *lines[2:]],
}
AT_THE_END: dict[str, Callable[[Lines], Lines]] = {
    "cut at a line's end": lambda lines: lines[:2],
    "half a line": lambda lines: [*lines[:2], lines[2][:20]],
    "not closed": lambda lines: lines[:3],
    "last lost": lambda lines: [*lines[:2], lines[3]],
    "emptied": lambda lines: [],
}
TOLD = ("lost", "half a line")  # can be read unverified; token statistics need all trajectories


def report_of(world: Path, unverified: bool) -> object:
    return write_report(world / "run", world / "out", unverified)


def compared_runs(world: Path, unverified: bool) -> object:
    return write_comparison([world / "run", world / "other"], world / "out" / "page.html", unverified)


def resumed(world: Path, unverified: bool) -> object:
    run = RunFolder(world / "run", unverified=unverified)
    run.check_checkpoints(2)
    run.check_metrics(2, json.loads((world / "mark.json").read_text()) if not unverified else None)
    return run.metrics_mark()


def compared(world: Path, unverified: bool) -> object:
    return compare(read_evaluation(world / "eval", unverified), read_evaluation(world / "eval", unverified))


def scored(world: Path, unverified: bool) -> object:
    return score_file("search_r1", {}, world / "r.jsonl", world / "out" / "s.jsonl", unverified=unverified)


READERS: dict[str, list[Reader]] = {
    "run/metrics.jsonl": [
        report_of,
        compared_runs,
        resumed,
        lambda world, unverified: read_state(world / "run", unverified),
        lambda world, unverified: LivePage(world / "run", unverified),
    ],
    "run/evaluations/step_000002.jsonl": [report_of, compared_runs],
    "run/trajectories/step_000002.jsonl": [
        lambda world, unverified: write_token_view(world / "run", "2", world / "out" / "t.html", unverified)
    ],
    "eval/trajectories.jsonl": [compared],
    "r.jsonl": [scored],
}
# Without --unverified: functions that continue a file, or make something lasting from it.
ONLY_VERIFIED: dict[str, list[Callable[[Path], object]]] = {
    "run/metrics.jsonl": [lambda world: best_checkpoint(world / "run")],
    "e.jsonl": [
        lambda world: Journal(world / "e.jsonl", {}, ["answer"]),
        lambda world: read_evidence(world / "e.jsonl"),
    ],
    "r.jsonl": [lambda world: taught_records(world / "r.jsonl", "extract")],
}
# The expected length of an unfinished file is not known.
UNFINISHED: dict[str, list[Callable[[Path], object]]] = {
    "run/starts.jsonl": [lambda world: RunFolder(world / "run").starts(), lambda world: read_state(world / "run")],
    "replies.jsonl": [lambda world: Replies(world / "replies.jsonl")],
    "left/generated.jsonl": [lambda world: opened(world).generated()],
}


def opened(world: Path) -> EvalFolder:
    return EvalFolder(world / "left", 0)


@pytest.fixture
def world(tmp_path: Path, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a file of each kind, with three records each. Plots are not drawn."""
    monkeypatch.setattr(report, "draw", lambda *_: b"PNG")
    monkeypatch.setattr(records_module, "_warned", set())
    (tmp_path / "out").mkdir()
    tiny_tokenizer.save(tmp_path / "model")
    text = "<answer> Bel </answer>"
    said = {"ids": tiny_tokenizer.encode(text), "source": "policy", "text": text}
    sampled = [trajectory(f"q{n}", n == 1, group=0, sample=n, advantage=0.5, segments=[said]) for n in range(3)]
    for name in ("run", "other"):
        run = make_run(tmp_path / name, str(tmp_path / "model"))
        for step in range(3):
            run.append_start({"step": step, "host": "elsewhere", "at": "2026-01-01"})
        run.append_metrics(step_record(1))
        run.append_metrics(step_record(2))
        run.append_metrics(eval_record(2, 0.5))
        (tmp_path / "mark.json").write_text(json.dumps(run.metrics_mark()))
        run.write_trajectories(2, sampled)
        count = len(said["ids"])
        values = {name: np.zeros(count, np.float32) for name in ("sampled", "recomputed", "entropy", "clipped")}
        stats = [TokenStats(key=(0, n), values=values, branches=np.empty(0, np.float32)) for n in range(3)]
        write_token_stats(run.trajectories / "step_000002.safetensors", stats, 10**6)
        run.write_evaluation(2, [trajectory(f"q{n}", n == 1) for n in range(3)])
        (run.checkpoints / "step_000002").mkdir()
        run.write_summary({"em_before": 0.25, "em_after": 0.5, "seconds": 3.0})
    with EvalFolder.open(tmp_path / "eval", {}) as folder:
        answers = ({"id": str(n), "question": "?", "parts": {}, "measures": {"em": n % 2}} for n in range(3))
        folder.finish(answers, "table", {"em": 0.5, "system": "s"})
    with EvalFolder.open(tmp_path / "left", {}) as folder:
        one = Trajectory("q", 0, 0, [Segment(Source.PROMPT, [1])], "ended")
        folder.append([Generated(one, 0.5, [])] * 2)
        folder.append([Generated(one, 0.25, [True])])
    journal = Journal(tmp_path / "e.jsonl", {}, ["answer"])
    for n in range(3):
        journal.add({"id": str(n), "evidence": "It is.", "answer": "so"})
    journal.finish({"questions": 3})
    log = RecordLog(tmp_path / "r.jsonl")
    log.append(*sampled[:2])
    log.append(sampled[2])
    log.finish()
    replies = Replies(tmp_path / "replies.jsonl")
    for n in range(3):
        replies.put(str(n), {"n": n}, "so")
    return tmp_path


def damaged(file: Path, attack: Callable[[Lines], Lines]) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    found = attack(lines)
    assert found != lines
    file.write_bytes(b"".join(found))


def refused(file: Path, read: Callable[[], object], named: bool) -> None:
    with pytest.raises(UserError) as caught:
        read()
    message = str(caught.value)
    assert message.startswith(f"{file}:") and "\n" not in message
    assert not named or message.removeprefix(f"{file}:")[:1].isdigit(), message


@pytest.mark.parametrize("name", [*READERS, *UNFINISHED, "e.jsonl"])
def test_every_reader_refuses_what_is_not_as_it_was_written(
    name: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, readers, finished = world / name, READERS.get(name, []), name not in UNFINISHED
    calls = ONLY_VERIFIED.get(name, []) if finished else UNFINISHED[name]
    whole = file.read_bytes()
    for read in readers:
        read(world, False)
    for call in calls if not readers else ():
        call(world)
    assert capsys.readouterr().err == ""
    for attack, change in (INSIDE | (AT_THE_END if finished else {})).items():
        damaged(file, change)
        for read in readers:
            refused(file, lambda read=read: read(world, False), attack in INSIDE)
            if attack in ("changed", "without a checksum") or (attack in TOLD and "trajectories" not in name):
                read(world, True)
        for call in calls[: 0 if readers else 1] if attack == "emptied" else calls:  # an empty file may be a user's own
            refused(file, lambda call=call: call(world), attack in INSIDE)
        file.write_bytes(whole)
    if not finished:
        file.write_bytes(whole[:-20])  # as after a kill
        for call in calls:
            call(world)


@pytest.mark.parametrize("name", ["run/summary.json", "eval/metrics.json", "e.json"])
def test_a_summary_that_was_changed_is_refused(name: str, world: Path) -> None:
    file = world / name
    file.write_text(file.read_text().replace("5", "6").replace("3.0", "9.0").replace(": 3", ": 4", 1))
    readers: list[Reader] = {"run": [report_of, compared_runs], "eval": [compared]}.get(name.split("/")[0], [])
    for read in readers:
        refused(file, lambda read=read: read(world, False), False)
        read(world, True)
    if name == "e.json":
        refused(file, lambda: Journal(world / "e.jsonl", {}, ["answer"]), False)


def test_token_statistics_have_a_digest(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = world / "run" / "trajectories" / "step_000002.safetensors", world / "out" / "t.html"
    arrays = load_file(file)
    with safe_open(file, "numpy") as opened_file:
        metadata = opened_file.metadata()
    save_file({**arrays, "sampled_P": arrays["sampled_P"] - 1}, file, metadata)
    refused(file, lambda: write_token_view(world / "run", "2", page), False)
    write_token_view(world / "run", "2", page, unverified=True)
    save_file(arrays, file)  # as an earlier version wrote it
    write_token_view(world / "run", "2", page)
    assert capsys.readouterr().err.count("by an earlier version") == 1


def older(file: Path) -> None:
    """Rewrite the file as an earlier version wrote it."""
    if file.suffix == ".jsonl":
        file.write_bytes(b"".join(map(bare, file.read_bytes().splitlines(keepends=True)[:3])))
    else:
        values = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in values.items() if key not in ("digest", "metrics")}))


def test_an_old_folder_is_read_with_one_warning(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = RunFolder(world / "run").metrics()
    page = report_of(world, False)
    assert isinstance(page, Path)
    text = page.read_text()
    for file in (*(world / "run").rglob("*.jsonl"), world / "run" / "summary.json"):
        older(file)
    assert report_of(world, False) == page and page.read_text() == text
    read_state(world / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"thresher: {world / 'run'}: ") and "was written by an earlier version, without" in line
    assert RunFolder(world / "run").metrics() == before
    # A run that continues rewrites the file.
    run = RunFolder(world / "run")
    run.append_metrics(step_record(3))
    assert stored(run.metrics_file) == [*before, step_record(3)] and b"checksum" in run.metrics_file.read_bytes()
    older(world / "r.jsonl")  # a user's own file, to be scored
    scored(world, False)
    assert capsys.readouterr().err == ""


def test_the_commands_have_the_flag(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("eval/trajectories.jsonl", "r.jsonl", "run/metrics.jsonl"):
        damaged(world / name, INSIDE["changed"])
    for words in (
        ["compare", str(world / "eval"), str(world / "eval")],
        ["score", "--system", "search_r1", "--transcripts", str(world / "r.jsonl"), "--out", str(world / "s.jsonl")],
        ["report", str(world / "run"), "--out", str(world / "out")],
        ["report", str(world / "run"), str(world / "other"), "--out", str(world / "out" / "c.html")],
        ["watch", str(world / "run"), "--tty"],
    ):
        assert cli.run(words) == 2
        assert "read it as it is with --unverified" in capsys.readouterr().err
        if words[0] != "watch":  # a run that seems to be on another host is watched without end
            assert cli.run([*words, "--unverified"]) == 0


def test_a_kill_at_any_byte_and_what_goes_on_from_it_give_the_same_file(tmp_path: Path) -> None:
    path, records = tmp_path / "a.jsonl", [{"id": n, "text": "ä\udc80", "x": n / 3} for n in range(2)]
    log = RecordLog(path)
    for record in records:
        log.append(record)
    mark = log.finish()
    whole = path.read_bytes()
    assert log.finish() == mark and path.read_bytes() == whole
    assert write_records(tmp_path / "b.jsonl", records) == mark and (tmp_path / "b.jsonl").read_bytes() == whole
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        log = RecordLog(path)
        kept = [record for _, record in log.recover()]
        assert path.read_bytes() == whole[:length]  # until there is more to write
        for record in records[len(kept) :]:
            log.append(record)
        assert log.finish() == mark and path.read_bytes() == whole, length
    log.append({"id": 2})  # beyond its expected length
    assert log.finish()["records"] == 3 and stored(path) == [*records, {"id": 2}]
    assert [record for _, record in read_records(path)] == stored(path)
    for record in ({}, {"checksum": "x"}):
        with pytest.raises(ValueError, match="a stored record needs keys"):
            RecordLog(tmp_path / "c.jsonl").append(record)
    assert not (tmp_path / "c.jsonl").exists()


def state_of(world: Path, unverified: bool) -> object:
    return read_state(world / "run", unverified).to_dict()


(token_page,) = READERS["run/trajectories/step_000002.jsonl"]
# A record without a checksum: file, reader, key, value, and the error.
MISTYPED: list[tuple[str, Reader, str, Any, str]] = [
    ("metrics.jsonl", state_of, "step", None, "step: expected a whole number, found null"),
    ("metrics.jsonl", state_of, "step", 10**400, "step: expected a whole number, found 1000"),
    ("metrics.jsonl", compared_runs, "eval", [7], "eval: expected an object, found a list"),
    ("metrics.jsonl", report_of, "eval", {"parts": {"em": "x"}}, "eval: parts: em: expected a number, found a string"),
    ("summary.json", state_of, "seconds", "x", "seconds: expected a number, found a string"),
    ("starts.jsonl", state_of, "step", True, "step: expected a whole number, found True"),
    ("evaluations/step_000002.jsonl", report_of, "id", [], "id: expected a string or a whole number, found a list"),
    ("evaluations/step_000002.jsonl", report_of, "golden_answers", ["x", 7], "golden_answers, item 2: expected a str"),
    ("evaluations/step_000002.jsonl", report_of, "searches", [{"query": 7}], "searches, item 1: query: expected a str"),
    ("trajectories/step_000002.jsonl", token_page, "reward", "x", "reward: expec"),
    ("trajectories/step_000002.jsonl", token_page, "segments", [{"ids": [0.5]}], "segments, item 1: ids, item 1: expe"),
]
WRONG: tuple[Any, ...] = (True, 10**400, "x", [7], [None], {"a": {"b": []}}, None)


@pytest.fixture
def old(world: Path) -> Path:
    """Return the run as an earlier version wrote it."""
    for file in (*(world / "run").rglob("*.jsonl"), world / "run" / "summary.json"):
        older(file)
    return world / "run"


@contextmanager
def spoilt(file: Path, key: str, value: Any) -> Iterator[str]:
    """Change a value of the file's last record for the duration; yield the place as an error names it."""
    whole = file.read_text()
    *before, last = whole.splitlines() if file.suffix == ".jsonl" else [whole]
    file.write_text("\n".join([*before, json.dumps(json.loads(last) | {key: value})]) + "\n")
    yield f"{file}:{len(before) + 1}" if file.suffix == ".jsonl" else f"{file}"
    file.write_text(whole)


def test_a_value_of_a_wrong_type_in_an_old_record_is_named(old: Path) -> None:
    for name, read, key, value, sentence in MISTYPED:
        with spoilt(old / name, key, value) as where, pytest.raises(UserError) as caught:
            read(old.parent, False)
        assert str(caught.value).startswith(f"{where}: {sentence}")
        assert "; put a copy back, or remove the file" in str(caught.value)


@pytest.mark.slow
def test_values_of_wrong_types_end_in_a_sentence(old: Path) -> None:
    readers = {name: {read for at, read, *_ in MISTYPED if at == name} for name, *_ in MISTYPED}
    for name in ("metrics.jsonl", "summary.json", "starts.jsonl"):
        readers[name] = {state_of, compared_runs}
    for name, reads in readers.items():
        text, refused = (old / name).read_text(), 0
        for key in json.loads(text.splitlines()[-1] if name.endswith("l") else text):
            for value in WRONG:
                for read in reads:
                    with spoilt(old / name, key, value):
                        try:
                            read(old.parent, False)
                        except UserError as error:
                            assert "\n" not in str(error)
                            refused += 1
        assert refused > 0, name
