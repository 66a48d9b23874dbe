"""The attacks can fail: a broken command, server or reward is reported by each; and a slice of the whole campaign."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from documents import ROOT

from thresher.bench.torture import answers, disks, files, holes, kills, mishaps, records, requests, sampling, terminal
from thresher.bench.torture.attack import Field, judge
from thresher.bench.torture.endurance import judged_descriptors, judged_memory
from thresher.bench.torture.run import ATTACKS, stored, summary
from thresher.bench.torture.worker import Ended, ForkLimits, Worker
from thresher.cli.commands.bench.torture import ATTACKS as NAMED
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.common.hashes import read_hashes, write_hashes
from thresher.engine.systems import NAMES

Run = Callable[[Sequence[str]], int]


def field_of(run: Run, folder: Path) -> Field:
    at, scratch = folder / "world", folder / "scratch"
    at.mkdir(parents=True)
    scratch.mkdir()
    return Field(at=at, scratch=scratch, worker=Worker(run, folder / "streams"), seed=0, scale=1.0)


def said(sentence: str) -> int:
    print(f"thresher: {sentence}", file=sys.stderr)
    return 2


# forks


def crash(words: Sequence[str]) -> int:
    match words[0]:
        case "hang":
            time.sleep(60)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "trace":
            raise ValueError("ours")
        case "eat":
            bytearray(1 << 40)
        case "mute":
            return 2
        case "lock":
            Path(words[1]).write_text("x")
        case "fill":
            Path(words[1]).write_bytes(b"x" * 100)
    return int(words[0] == "one")


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("hang", "hangs"),
        ("die", "died of signal 9"),
        ("trace", "ValueError: ours"),
        ("eat", "MemoryError"),
        ("mute", "without a sentence"),
        ("one", "status 1"),
        ("lock", "Permission denied"),
        ("fill", "File too large"),
    ],
)
def test_whatever_a_command_does_ends_with_its_fork(tmp_path: Path, word: str, fault: str) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    target = {"lock": locked / "file", "fill": tmp_path / "file"}.get(word, tmp_path)
    limits = ForkLimits(seconds=0.3 if word == "hang" else 20, powerless=word == "lock")
    if word == "fill":
        limits = ForkLimits(seconds=20, file_bytes=50)
    ended = Worker(crash, tmp_path / "streams").play([word, str(target)], limits)
    verdict, found = judge(ended, lambda: True)
    assert verdict == "wrong" and fault in found, ended


def test_a_verdict() -> None:
    ended = Ended(status=0, signal=None, timed_out=False, seconds=0.0, out="", err="")
    assert judge(ended, lambda: True)[0] == "right"
    assert judge(ended, lambda: False) == ("wrong", "another result without a word")
    assert judge(ended, lambda: False, lambda: True)[0] == "read"


# attacks on what is broken


def summed(words: Sequence[str]) -> int:
    """summed FOLDER OUT [--no-verify]: the bytes of FOLDER/data, added up, into OUT."""
    folder, out = Path(words[0]), Path(words[1])
    try:
        if "--no-verify" not in words and (hashes := read_hashes(folder, expected=True)) is not None:
            hashes.check_all()
    except UserError as error:
        return said(str(error))
    out.write_text(str(sum((folder / "data").read_bytes())))
    return 0


@pytest.mark.parametrize("damage", files.DAMAGES)
def test_damage_that_nobody_looks_for_is_reported(tmp_path: Path, damage: str) -> None:
    field = field_of(summed, tmp_path)
    folder = field.at / "index"
    folder.mkdir()
    (folder / "data").write_bytes(bytes(Random(0).randbytes(500)))
    (field.at / "recipe.toml").touch()
    (field.at / "flat2").mkdir()
    (field.at / "index2").mkdir()
    (field.at / "index2" / "data").write_bytes(b"other")
    write_hashes(folder)
    pristine = tmp_path / "pristine"
    shutil.copytree(field.at, pristine)
    for flags, verdicts in (((), {"refused"}), (("--no-verify",), {"wrong", "right"})):
        target = files.Readable(("index/data",), lambda at, out, flags=flags: [str(at / "index"), str(out), *flags])  # type: ignore[misc]
        field.worker.play(target.words(field.at, field.scratch / "out"))
        expected = {"out": files.content(field.scratch / "out")["out"]}
        found = files.try_mutant(field, pristine, target, folder / "data", damage, Random(1), expected)
        # A sum does not see parts that are swapped.
        assert found[0] in verdicts and (found[0] != "right" or damage == "parts swapped"), found
        assert (folder / "data").read_bytes() == (pristine / "index/data").read_bytes()


def counted(words: Sequence[str]) -> int:
    """counted OUT HOW: 30 lines, one after the other; begun again it goes on (or, broken, repeats or loses a line)."""
    out, how = Path(words[0]), words[1]
    done = out.read_text().splitlines() if out.exists() else []
    if how == "repeats" and done:
        done.pop()
        out.write_text("\n".join(done) + "\n")
        with out.open("a") as file:
            file.write(f"{len(done)}\n{len(done)}\n")
        done.append("")
    for number in range(len(done), 30):
        with out.open("a") as file:
            file.write(f"{number}\n")
        time.sleep(0.002)
    if how == "traces" and done:
        raise KeyError(how)
    return 0


@pytest.mark.parametrize(("how", "verdict"), [("sound", "right"), ("repeats", "wrong"), ("traces", "wrong")])
def test_a_command_that_does_not_resume_is_reported(tmp_path: Path, how: str, verdict: str) -> None:
    field = field_of(counted, tmp_path)
    job = kills.Killable(lambda at, out: [str(out), how], out="out.txt")
    expected = {"out.txt": kills.content(_written(field, job))["out.txt"]}
    kills.clear(field.scratch / "out.txt")
    draw = Random(0)
    found = [kills.kill_and_resume(field, job, draw, 0.06, expected) for _ in range(4)]
    assert verdict in {one for one, _ in found} and (verdict == "wrong" or len({one for one, _ in found}) == 1), found


def _written(field: Field, job: kills.Killable) -> Path:
    out = field.scratch / job.out
    assert field.worker.play(job.words(field.at, out)).status == 0
    return out


def careless(words: Sequence[str]) -> int:
    """careless FILE HOW: what a reader may do wrong with a file of records."""
    data = Path(words[0]).read_bytes()
    match words[1]:
        case "reads all":
            return 0
        case "is vague":
            return said("something is wrong")
        case "dies" if b'"NaN' in data or b"\xff" in data or not data.strip().endswith(b"}"):
            os.kill(os.getpid(), signal.SIGKILL)
    lines = [json.loads(line) for line in data.split(b"\n") if line.strip()]
    return 0 if all(isinstance(line["question"], str) for line in lines) else said(f"{words[0]}: no")


@pytest.mark.parametrize("how", ["reads all", "is vague", "dies", "raises"])
def test_a_careless_reader_is_reported(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = field_of(careless, tmp_path)
    whole = records.READERS["questions"]
    reader = records.Reader(whole.record, whole.needed, lambda at, file, out: [str(file), how])
    monkeypatch.setattr(records, "READERS", {"questions": reader})
    draw = Random(0)
    cases = [records._case(field, draw, "questions", number) for number in range(60)]
    found = list(records.read_batch(field.worker, cases, tmp_path / "journal"))
    wrong = [one for one in found if one.verdict == "wrong"]
    assert len(found) == 60 and len(wrong) >= 5, wrong
    if how == "reads all":
        assert {one.verdict for one in found} == {"wrong", "read"}


def answering(data: bytes | None) -> tuple[str, int]:
    """The address of a server that says this, whatever is asked, and goes; None: nothing, for long."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        connection.recv(1 << 16)
        if data is None:
            time.sleep(0.5)
        else:
            connection.sendall(data)
        connection.close()
        listening.close()

    threading.Thread(target=serve, daemon=True).start()
    host, port = listening.getsockname()
    return host, port


def reply(status: int, body: bytes = b"{}", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, size, body)


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (reply(400), "refused"),
        (reply(200), "wrong"),  # what is no JSON was taken
        (reply(500), "wrong"),
        (reply(400, b"Traceback"), "wrong"),
        (reply(400, length=99), "wrong"),
        (b"what?\r\n\r\n", "wrong"),
        (b"", "wrong"),
        (None, "wrong"),
    ],
)
def test_a_server_that_fails_is_reported(data: bytes | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PATIENCE", 0.2)
    hostile = requests.Hostile(requests.post(b"{"), requests.REFUSED)
    assert requests.sent(requests.Connection(answering(data)), hostile)[0] == verdict


def test_an_answer_that_changed_is_reported() -> None:
    assert requests.sound(answering(reply(200)), (200, b"{}")).verdict == "right"
    assert requests.sound(answering(reply(200, b"[]")), (200, b"{}")).verdict == "wrong"


def written(words: Sequence[str]) -> int:
    """written OUT HOW: a file, by a command that does or does not know of full disks."""
    out, how = Path(words[0]), words[1]
    try:
        if how == "sound":
            atomic_write_text(out, "x" * 100)
        else:
            out.write_text("x" * 100)
    except UserError as error:
        return said(str(error))
    except OSError:
        if how == "raises":
            raise
        return 0 if how == "is silent" else said("the disk is full")
    return 0


@pytest.mark.parametrize(
    ("how", "verdict"), [("sound", "refused"), ("raises", "wrong"), ("is silent", "wrong"), ("", "wrong")]
)
def test_a_command_that_does_not_know_of_full_disks_is_reported(tmp_path: Path, how: str, verdict: str) -> None:
    field = field_of(written, tmp_path)
    writer = disks.Writer(lambda at, out: [str(out), how])
    expected, sizes = disks._with_room(field, writer)
    assert sizes == [100]
    assert disks.try_disk(field, writer, ForkLimits(seconds=20, file_bytes=50), expected)[0] == verdict
    assert disks.try_disk(field, writer, ForkLimits(seconds=20, file_bytes=100), expected)[0] == "right"
    assert disks._read_only(field, writer)[0] == verdict
    assert list(field.scratch.iterdir()) == []


def test_leaks_are_reported() -> None:
    draw = Random(0)
    for grown, verdict in ((0, "right"), (200_000, "wrong")):
        looks = [(t / 10, 10**9 + draw.randrange(10**6) + grown * t, 20) for t in range(300)]
        assert judged_memory(looks).verdict == verdict
    assert judged_memory([]).verdict == "wrong"
    flat, leaking = ([(t / 10, 0, 20 + leak * t // 50) for t in range(300)] for leak in (0, 1))
    flat[-1] = (flat[-1][0], 0, 21)  # a file, open for a moment
    assert judged_descriptors(flat).verdict == "right" and judged_descriptors(leaking).verdict == "wrong"


def printed(words: Sequence[str]) -> int:
    """printed HOW TEXT: a text on the screen, with care or without."""
    how, text = words
    print(text if how == "raw" else ascii(text))
    return 0


@pytest.mark.parametrize("payload", terminal.PAYLOADS.values())
@pytest.mark.parametrize(("how", "verdict"), [("raw", "wrong"), ("escaped", "right")])
def test_control_bytes_on_a_terminal_are_reported(tmp_path: Path, how: str, verdict: str, payload: str) -> None:
    ended = terminal.on_terminal(Worker(printed, tmp_path / "streams"), [how, payload])
    assert terminal._judged(ended, payload)[0] == verdict, ended


@pytest.mark.parametrize(("how", "verdict"), [("sound", "refused"), ("careless", "wrong")])
def test_two_writers_of_one_file_are_reported(tmp_path: Path, how: str, verdict: str) -> None:
    def write(words: Sequence[str]) -> int:
        out = Path(words[0])
        with out.open("x" if how == "sound" and not out.exists() else "a") as file:
            if how == "sound":
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return said(f"{out}: another process is writing")
            for number in range(10):
                file.write(f"{number}\n")
                file.flush()
                time.sleep(0.02)
        return 0

    field = field_of(write, tmp_path)
    found = mishaps.two_at_once(field, "write", disks.Writer(lambda at, out: [str(out)], out="out.txt"))
    assert found.verdict == verdict, found


@pytest.mark.parametrize("answer", ["an endless body", "endless headers", "endless chunks"])
def test_a_client_that_reads_without_end_is_reported(tmp_path: Path, answer: str) -> None:
    def read(words: Sequence[str]) -> int:
        host, port = words[0].removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            got = 0
            while got < 100_000 or words[1] == "without end":
                got += len(connection.recv(1 << 20))
        return said("the answer is too long")

    field = field_of(read, tmp_path)
    bounded = answers.try_answer(field, lambda at, out, url: [url, "bounded"], answer, ForkLimits(seconds=10))
    endless = answers.try_answer(field, lambda at, out, url: [url, "without end"], answer, ForkLimits(seconds=0.5))
    assert (bounded.verdict, endless.verdict) == ("refused", "wrong"), (bounded, endless)


def test_stop_strings_that_are_missed_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that stops, and one that does not know of the last stop string of a request."""
    text = "the house of Anna Bell and of Carl Dorn"

    class Request(SimpleNamespace):
        stop: tuple[str, ...] = ()

    class Fake:
        def __init__(self, known: slice) -> None:
            self.known = known

        def generate(self, requests: Sequence[Request]) -> list[list[SimpleNamespace]]:
            cut = [
                min((text.index(s) + len(s) for s in r.stop[self.known] if s in text), default=None) for r in requests
            ]
            return [[SimpleNamespace(text=text[:end])] for end in cut]

    for known, status in ((slice(None), 0), (slice(1, None), 1)):
        monkeypatch.setattr(sampling, "_made", lambda at, known=known: (Fake(known), Request))
        assert sampling.stop_sets(tmp_path, 0) == status


def test_a_changed_record_that_is_used_is_reported(tmp_path: Path) -> None:
    """By a reader that asks no digest; by one that does, but refuses with --unverified too."""
    line = b'{"id": 1, "em": 0.0}\n'

    def mean(words: Sequence[str]) -> int:
        file, out, how, *more = words
        data = Path(file).read_bytes()
        if how != "careless" and data != line * 3 and not (how == "sound" and "--unverified" in more):
            return said(f"{file}: a record was changed; read it as it is by --unverified")
        Path(out).write_bytes(data)
        return 0

    for how, verdict in (("sound", "refused"), ("careless", "wrong"), ("strict", "wrong")):
        field = field_of(mean, tmp_path / how)
        for name, content in (("flat2", b""), ("recipe.toml", b""), ("records.jsonl", line * 3)):
            (field.at / name).write_bytes(content)
        target = files.Readable(
            ("records.jsonl",),
            lambda at, out, how=how: [f"{at}/records.jsonl", str(out), how],
            anyway=lambda damage: True,  # type: ignore[misc]
        )
        for damage in files.RECORD_DAMAGES:
            assert {one.verdict for one in files.damage_all(field, Random(0), {"records": target}, [damage], 1)} == {
                verdict
            }
            shutil.rmtree(field.scratch / "pristine")


# rewards


def test_a_reward_that_pays_more_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hole = holes.Hole("the form", "<think></think><answer></answer>", 0)
    monkeypatch.setattr(holes, "HOLES", {"naive_grpo": [hole]})
    assert [one.verdict for one in holes.attack(field_of(crash, tmp_path))] == ["wrong"]


def test_every_system_pays_what_its_formula_does(tmp_path: Path) -> None:
    tried = list(holes.attack(field_of(crash, tmp_path)))
    assert len(tried) == sum(map(len, holes.HOLES.values()))
    assert [one for one in tried if one.verdict != "right"] == []


def test_every_system_has_ten_holes_and_the_page_lists_what_is_paid() -> None:
    page = (ROOT / "docs" / "papers.md").read_text()
    assert set(NAMES) == set(holes.HOLES)
    for system, tried in holes.HOLES.items():
        assert len(tried) >= 10 and len({hole.what for hole in tried}) == len(tried)
        assert all(hole.by if hole.earns else True for hole in tried), system
        for line in holes.paid(system):
            assert line in page, f"docs/papers.md lacks, of {system}:\n" + "\n".join(holes.paid(system))


# the whole


def test_the_command_names_every_attack() -> None:
    assert tuple(ATTACKS) == NAMED


def test_the_page_shows_the_stored_row() -> None:
    row = stored(ROOT / "bench" / "results" / "torture.jsonl")
    assert summary(row) in (ROOT / "docs" / "reliability.md").read_text()
    assert [kind for kind in row["kinds"] if kind["wrong"]] == []


@pytest.mark.slow
def test_a_slice_of_the_campaign(tmp_path: Path) -> None:
    """In a process of its own: threads of torch do not survive a fork, and this one may have computed."""
    command = [sys.executable, "-m", "thresher.cli", "bench", "torture", "--scale", "0.001", "--seed", "1", "--json"]
    played = subprocess.run(
        [*command, "--out", str(tmp_path / "row.jsonl")], capture_output=True, text=True, timeout=600
    )
    assert played.returncode == 0, played.stderr
    row = stored(tmp_path / "row.jsonl")
    assert {kind["attack"] for kind in row["kinds"]} == set(ATTACKS)
    assert [kind for kind in row["kinds"] if kind["wrong"]] == []
