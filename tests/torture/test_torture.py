"""Test that each attack reports a command, server or reward that is broken on purpose, and run part of the campaign."""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from documents import ROOT
from torture import harness, inputs, servers, storage
from torture.__main__ import ATTACKS, last_row, summary
from torture.harness import ASYNC, Campaign, Command, Ended, Limits, content, judge
from torture.storage import Target

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.common.hashes import read_hashes, write_hashes
from thresher.engine.systems import NAMES, load_system

SHORT = Limits(seconds=20)


def campaign_of(run: Command, folder: Path) -> Campaign:
    (folder / "world").mkdir(parents=True)
    return Campaign("attack", folder, run)


def refuse(sentence: str) -> int:
    print(f"thresher: {sentence}", file=sys.stderr)
    return 2


def misbehave(words: Sequence[str]) -> int:
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
        case "write":
            Path(words[1]).write_bytes(b"x" * 100)
        case "show":
            print(words[1] if words[2] == "raw" else ascii(words[1]))
            return 0
    return 1


@pytest.mark.parametrize(
    ("word", "limits", "fault"),
    [
        ("hang", Limits(seconds=0.3), "hangs"),
        ("die", SHORT, "died of signal 9"),
        ("trace", SHORT, "ValueError: ours"),
        ("eat", SHORT, "MemoryError"),
        ("mute", SHORT, "without a sentence"),
        ("one", SHORT, "status 1"),
        ("write", Limits(unprivileged=True), "Permission denied"),
        ("write", Limits(file_bytes=50), "File too large"),
    ],
)
def test_whatever_a_command_does_ends_with_its_fork(tmp_path: Path, word: str, limits: Limits, fault: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o555 if limits.unprivileged else 0o755)
    ended = campaign_of(misbehave, tmp_path).play([word, str(folder / "file")], limits)
    verdict, found = judge(ended, right=True)
    assert verdict == "wrong" and fault in found, ended


def test_another_result_is_right_only_where_it_may_be_read() -> None:
    ended = Ended(status=0, signal=None, timed_out=False, seconds=0.0, out="", err="")
    assert judge(ended, right=True)[0] == "right"
    assert judge(ended, right=False) == ("wrong", "another result without a word")
    assert judge(ended, right=False, may_be_read=True)[0] == "read"


def add_up(words: Sequence[str]) -> int:
    """Write the sum of the bytes of FOLDER/data: FOLDER OUT [--no-verify]."""
    folder, out = Path(words[0]), Path(words[1])
    try:
        if "--no-verify" not in words and (hashes := read_hashes(folder, expected=True)) is not None:
            hashes.check_all()
    except UserError as error:
        return refuse(str(error))
    out.write_text(str(sum((folder / "data").read_bytes())))
    return 0


@pytest.mark.parametrize("damage", storage.DAMAGES)
def test_damage_that_nobody_looks_for_is_reported(tmp_path: Path, damage: str) -> None:
    campaign = campaign_of(add_up, tmp_path)
    for name, data in (("index", Random(0).randbytes(500)), ("index2", b"other")):
        (campaign.world / name).mkdir()
        (campaign.world / name / "data").write_bytes(data)
    write_hashes(campaign.world / "index")
    pristine, path = tmp_path / "pristine", campaign.world / "index" / "data"
    shutil.copytree(campaign.world, pristine)
    for flags, verdicts in (("", {"refused"}), (" --no-verify", {"wrong", "right"})):
        target = Target(f"{{at}}/index {{out}}{flags}", ("index/data",))
        _, expected = campaign.unharmed(target.words)
        found = storage.try_damage(campaign, pristine, target, path, damage, expected)
        # A sum does not detect swapped parts.
        assert found[0] in verdicts and (found[0] != "right" or damage == "parts swapped"), found
        assert path.read_bytes() == (pristine / "index/data").read_bytes()


@pytest.mark.slow
def test_a_changed_record_that_is_used_is_reported(tmp_path: Path) -> None:
    """One reader checks no digest; another checks it, but refuses with --unverified too."""
    line = b'{"id": 1, "em": 0.0}\n'

    def mean(words: Sequence[str]) -> int:
        file, out, how, *more = words
        data = Path(file).read_bytes()
        if how != "careless" and data != line * 3 and not (how == "sound" and "--unverified" in more):
            return refuse(f"{file}: a record was changed; read it as it is with --unverified")
        Path(out).write_bytes(data)
        return 0

    for how, verdict in (("sound", "refused"), ("careless", "wrong"), ("strict", "wrong")):
        campaign = campaign_of(mean, tmp_path / how)
        (campaign.world / "records.jsonl").write_bytes(line * 3)
        words = f"{{at}}/records.jsonl {{out}} {how}"
        target = Target(words, ("records.jsonl",), unverified=storage.RECORD_DAMAGES)
        for damage in storage.RECORD_DAMAGES:
            found = storage.damage_all(campaign, {"records": target}, [damage], 1)
            assert {one.verdict for one in found} == {verdict}


def count(words: Sequence[str]) -> int:
    """Write 30 lines one by one, resuming where it stopped: OUT HOW. Broken ones repeat a line or raise."""
    out, how = Path(words[0]), words[1]
    if os.environ.get("RANK", "0") != "0":  # the other ranks write nothing
        return 0
    done = out.read_text().splitlines() if out.exists() else []
    if how == "repeats" and done:
        out.write_text("\n".join([*done, done[-1], ""]))
    for number in range(len(done), 30):
        with out.open("a") as file:
            file.write(f"{number}\n")
        time.sleep(0.002)
    if how == "raises" and done:
        raise KeyError(how)
    return 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("ranks", ["", f" {ASYNC}"], ids=["alone", "ranks"])
@pytest.mark.parametrize(("how", "verdict"), [("sound", "right"), ("repeats", "wrong"), ("raises", "wrong")])
def test_a_command_that_does_not_resume_is_reported(tmp_path: Path, how: str, verdict: str, ranks: str) -> None:
    campaign = campaign_of(count, tmp_path)
    words = f"{{out}}.txt {how}{ranks}"
    ended, expected = campaign.unharmed(words)
    found = [storage.kill_and_resume(campaign, words, ended.seconds, expected) for _ in range(8)]
    assert verdict in {one for one, _ in found} and (verdict == "wrong" or len({one for one, _ in found}) == 1), found


def wait_for_a_signal(words: Sequence[str]) -> int:
    """Write whether this rank receives SIGINT: FOLDER. A rank without a signal waits for 60 s."""
    note = Path(words[0]) / os.environ["RANK"]

    def leave(number: int, frame: object) -> None:
        note.write_text("SIGINT")
        os._exit(130)

    signal.signal(signal.SIGINT, leave)
    note.write_text("nothing")
    time.sleep(60)
    return 0


@pytest.mark.parametrize(
    ("number", "rank", "status", "noted"),
    [
        (signal.SIGINT, None, 130, ["SIGINT", "SIGINT"]),
        (signal.SIGINT, 0, 130, ["SIGINT", "nothing"]),
        (signal.SIGINT, 1, 130, ["nothing", "SIGINT"]),
        (signal.SIGKILL, 1, None, ["nothing", "nothing"]),
        (signal.SIGKILL, None, None, ["nothing", "nothing"]),
    ],
)
def test_a_signal_comes_to_one_rank_or_to_all_and_none_is_left(
    tmp_path: Path, number: int, rank: int | None, status: int | None, noted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "PATIENCE", 0.5)
    started = campaign_of(wait_for_a_signal, tmp_path).start([str(tmp_path), ASYNC], SHORT)
    notes = [tmp_path / str(each) for each in range(harness.RANKS)]
    started.wait_until(lambda: all(note.exists() and note.read_text() for note in notes))
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    started.kill(number, rank)
    ended = started.wait()
    assert (ended.status, ended.signal) == (status, None if status else number) and not ended.timed_out
    assert [note.read_text() for note in notes] == noted
    left = [Path(f"/proc/{each}/stat") for each in children]
    assert [each for each in left if each.exists() and each.read_text().rpartition(")")[2].split()[0] != "Z"] == []


def write(words: Sequence[str]) -> int:
    """Write a file, with or without handling of full disks: OUT HOW."""
    out, how = Path(words[0]), words[1]
    try:
        if how == "sound":
            atomic_write_text(out, "x" * 100)
        else:
            out.write_text("x" * 100)
    except UserError as error:
        return refuse(str(error))
    except OSError:
        if how == "raises":
            raise
        return 0 if how == "silent" else refuse("the disk is full")
    return 0


@pytest.mark.parametrize(
    ("how", "verdict"), [("sound", "refused"), ("raises", "wrong"), ("silent", "wrong"), ("vague", "wrong")]
)
def test_a_command_that_does_not_know_of_full_disks_is_reported(tmp_path: Path, how: str, verdict: str) -> None:
    campaign = campaign_of(write, tmp_path)
    words = f"{{out}} {how}"
    _, expected = campaign.unharmed(words)
    assert storage.try_disk(campaign, words, 50, expected)[0] == verdict
    assert storage.try_disk(campaign, words, 100, expected)[0] == "right"
    assert storage.try_place(campaign, words, "a read-only folder")[0] == verdict
    assert content(campaign.out.parent) == {} and not campaign.unfinished()


@pytest.mark.parametrize(("how", "verdict"), [("sound", "refused"), ("careless", "wrong")])
def test_two_writers_of_one_file_are_reported(tmp_path: Path, how: str, verdict: str) -> None:
    def write_slowly(words: Sequence[str]) -> int:
        out = Path(words[0])
        with out.open("x" if how == "sound" and not out.exists() else "a") as file:
            if how == "sound":
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return refuse(f"{out}: another process is writing")
            for number in range(10):
                file.write(f"{number}\n")
                file.flush()
                time.sleep(0.02)
        return 0

    found = storage.two_at_once(campaign_of(write_slowly, tmp_path), "{out}.txt")
    assert found[0] == verdict, found


def read_carelessly(words: Sequence[str]) -> int:
    data = Path(words[0]).read_bytes()
    match words[1]:
        case "all":
            return 0
        case "vague":
            return refuse("something is wrong")
        case "dies" if b'"NaN' in data or b"\xff" in data or not data.strip().endswith(b"}"):
            os.kill(os.getpid(), signal.SIGKILL)
    lines = [json.loads(line) for line in data.split(b"\n") if line.strip()]
    return 0 if all(isinstance(line["question"], str) for line in lines) else refuse(f"{words[0]}: no")


@pytest.mark.parametrize("how", ["all", "vague", "dies", "raises"])
def test_a_careless_reader_is_reported(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = campaign_of(read_carelessly, tmp_path)
    monkeypatch.setitem(inputs.READERS, "questions", replace(inputs.READERS["questions"], words=f"{{file}} {how}"))
    cases = [inputs.make_malformed(campaign, "questions", number) for number in range(60)]
    found = list(inputs.read_all(campaign, cases))
    wrong = [one for one in found if one.verdict == "wrong"]
    assert len(found) == 60 and len(wrong) >= 5, wrong
    if how == "all":
        assert {one.verdict for one in found} == {"wrong", "read"}


@pytest.mark.parametrize("payload", inputs.PAYLOADS.values())
@pytest.mark.parametrize(("how", "verdict"), [("raw", "wrong"), ("escaped", "right")])
def test_control_bytes_on_a_terminal_are_reported(tmp_path: Path, how: str, verdict: str, payload: str) -> None:
    ended = campaign_of(misbehave, tmp_path).play(["show", payload, how], replace(SHORT, terminal=True))
    assert inputs.judge_shown(ended, payload)[0] == verdict, ended


def test_stop_strings_that_are_missed_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One generator stops; the other ignores the first stop string of a request."""
    text = "the house of Anna Bell and of Carl Dorn"

    class Request(SimpleNamespace):
        stop: tuple[str, ...] = ()

    for known, status in ((slice(None), 0), (slice(1, None), 1)):

        def generate(requests: Sequence[Request], known: slice = known) -> list[list[SimpleNamespace]]:
            ends = [[text.index(s) + len(s) for s in one.stop[known] if s in text] for one in requests]
            return [[SimpleNamespace(text=text[: min(places, default=None)])] for places in ends]

        fake = SimpleNamespace(generate=generate)
        monkeypatch.setattr(inputs, "load_generator", lambda at, fake=fake: (fake, Request))
        assert inputs.stop_sets(tmp_path, 0) == status


def test_a_reward_that_pays_more_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hole = inputs.Hole(what="form", systems=["naive_grpo"], written="<think></think><answer></answer>", earns=0)
    monkeypatch.setattr(inputs, "read_holes", lambda: [hole])
    assert [one.verdict for one in inputs.holes(campaign_of(misbehave, tmp_path))] == ["wrong"]


def test_every_system_pays_what_its_formula_does_and_the_page_lists_what_is_paid(tmp_path: Path) -> None:
    found = list(inputs.holes(campaign_of(misbehave, tmp_path)))
    assert [one for one in found if one.verdict != "right"] == []
    page = (ROOT / "docs" / "papers.md").read_text()
    known = load_system("search_r1", {}).reward  # also of systems that differ only in the update
    others = {name for name in NAMES if name != "search_r1" and load_system(name, {}).reward is known}
    for system in sorted({*NAMES} - {"reading"} - others):  # `reading`: without tags there is no form to abuse
        tried = [hole for hole in inputs.read_holes() if system in hole.systems]
        assert len(tried) >= 10 and len({hole.what for hole in tried}) == len(tried), system
        assert all(hole.by for hole in tried if hole.reward), system
        for line in inputs.paid(system):
            assert line in page, f"docs/papers.md lacks, of {system}:\n" + "\n".join(inputs.paid(system))


def serve_once(data: bytes | None) -> tuple[str, int]:
    """Return the address of a server that answers any request with `data` and ends; None: sends nothing for 0.5 s."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with listening, connection:
            connection.recv(1 << 16)
            if data is None:
                time.sleep(0.5)
            else:
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    host, port = listening.getsockname()
    return host, port


def reply(status: int, body: bytes = b"{}", length: int = 2) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, length, body)


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (reply(400), "refused"),
        (reply(200), "wrong"),  # invalid JSON was accepted
        (reply(500), "wrong"),
        (reply(400, b"Traceback", 9), "wrong"),
        (reply(400, length=99), "wrong"),
        (b"what?\r\n\r\n", "wrong"),
        (b"", "wrong"),
        (None, "wrong"),
    ],
)
def test_a_server_that_fails_is_reported(data: bytes | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PATIENCE", 0.2)
    hostile = servers.Hostile(servers.post("{"), frozenset({400}))
    assert servers.exchange(servers.Connection(serve_once(data)), hostile)[0] == verdict


def test_an_answer_that_changed_is_reported() -> None:
    assert servers.ask_soundly(serve_once(reply(200)), (200, b"{}")).verdict == "right"
    assert servers.ask_soundly(serve_once(reply(200, b"[]")), (200, b"{}")).verdict == "wrong"


@pytest.mark.parametrize("answer", ["an endless body", "endless headers", "endless chunks"])
def test_a_client_that_reads_without_end_is_reported(tmp_path: Path, answer: str) -> None:
    def read(words: Sequence[str]) -> int:
        host, port = re.findall(r"http://(.*):(.*)", words[0])[0]
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            got = 0
            while got < 100_000 or words[1] == "endless":
                got += len(connection.recv(1 << 20))
        return refuse("the answer is too long")

    campaign = campaign_of(read, tmp_path)
    bounded = servers.try_answer(campaign, "answers", "{url} bounded", answer, Limits(seconds=10))
    endless = servers.try_answer(campaign, "answers", "{url} endless", answer, Limits(seconds=0.5))
    assert (bounded.verdict, endless.verdict) == ("refused", "wrong"), (bounded, endless)


def test_leaks_are_reported() -> None:
    draw = Random(0)
    for grown, verdict in ((0, "right"), (200_000, "wrong")):
        looks = [(t / 10, 10**9 + draw.randrange(10**6) + grown * t, 20) for t in range(300)]
        assert servers.judge_memory(looks).verdict == verdict
    assert servers.judge_memory([]).verdict == "wrong"
    flat, leaking = ([(t / 10, 0, 20 + leak * t // 50) for t in range(300)] for leak in (0, 1))
    flat[-1] = (flat[-1][0], 0, 21)  # a file, open for a moment
    assert [servers.judge_descriptors(looks).verdict for looks in (flat, leaking)] == ["right", "wrong"]


# The campaign.


def faults_of(row: dict[str, Any]) -> list[Any]:
    return [kind for kind in row["kinds"] if kind["wrong"]]


def test_the_page_shows_the_stored_row() -> None:
    row = last_row(ROOT / "bench" / "results" / "torture.jsonl")
    assert summary(row) in (ROOT / "docs" / "internals" / "reliability.md").read_text()
    assert faults_of(row) == [] and {kind["attack"] for kind in row["kinds"]} == set(ATTACKS)


@pytest.mark.slow
def test_a_slice_of_the_campaign(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torture", "--scale", "0.001", "--seed", "1", "--out", str(tmp_path / "row.jsonl")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    played = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert played.returncode == 0, played.stdout + played.stderr
    row = last_row(tmp_path / "row.jsonl")
    assert {kind["attack"] for kind in row["kinds"]} == set(ATTACKS) and faults_of(row) == []
