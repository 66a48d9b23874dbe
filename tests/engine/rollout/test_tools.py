"""Tools: results are recorded and shown; a failure gives one sentence; nothing waits for a call that hangs, and no
token depends on when a result arrives."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rollout_cases import Make, Written, make_jobs, record, system_of

from thresher.common.errors import UserError
from thresher.common.http import TooSlow
from thresher.common.records import write_records
from thresher.engine.config.sections import ToolSection
from thresher.engine.episode import Generate, Prompt, Result, Retrieved, System, Tool
from thresher.engine.protocol.prompts import CUT_OFF
from thresher.engine.protocol.trajectory import Trajectory, check_trajectory
from thresher.engine.rollout.tools import CONNECT_SECONDS, MOST_BYTES, HostedTool, HttpTool, Replay, Toolbox, load_tools
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

TAGS = ("<call>", "</call>", "<result>", "</result>")
QUESTION = Question("q", "Who?", ("Anna",))
WAIT = 30  # seconds after which a test has failed


def toolbox(*functions: Callable[[dict[str, Any]], object], **limits: Any) -> Toolbox:
    return Toolbox({f.__name__: HostedTool(name=f.__name__, function=f, **limits) for f in functions})


def asking(*calls: Tool) -> System:
    """Return a system whose episodes make these calls, each followed by its result and a short turn."""

    def episode(question: Question, config: Any) -> Any:
        yield Prompt(config.template, question.question)
        for call in calls:
            result = yield call
            assert isinstance(result, Result)
            yield Retrieved(result.text, "<result>", "</result>")
            yield Generate(("</call>",), 6)
        return "ended"

    return system_of(episode, TAGS)


def called(box: Toolbox, *calls: Tool) -> list[Result]:
    """Return the results of calls that are begun together, in their order."""
    begun = [box.call(n, Trajectory("q", 0, n), call, QUESTION) for n, call in enumerate(calls)]
    while box.waiting:
        box.ended(wait=True)
    return [call.result or Result("none") for call in begun]


def fine(arguments: dict[str, Any]) -> str:
    return f"got {json.dumps(arguments)}"


def test_what_goes_wrong_is_one_sentence() -> None:
    class Worst(Exception):
        def __str__(self) -> str:
            raise ValueError

    def raising(arguments: dict[str, Any]) -> str:
        raise {"exit": SystemExit(3), "worst": Worst()}.get(arguments["how"], KeyError("a\nb" * 999))

    def huge(arguments: dict[str, Any]) -> str:
        return "ä" * MOST_BYTES

    def number(arguments: dict[str, Any]) -> int:
        return 3

    said: list[str] = []
    box = toolbox(raising, huge, number, fine)
    box._say = said.append
    calls = [Tool("raising", {"how": how}) for how in ("exit", "worst", "key")]
    calls += [Tool(name, {"a": [1, {"b": None}]}) for name in ("huge", "number", "nobody", "fine")]
    calls += [Tool("fine", bad) for bad in ({"a": float("nan")}, {"a": object()}, [("a", 1)], None)]  # type: ignore[arg-type]
    results = called(box, *calls)
    assert [result.error for result in results] == [True] * 6 + [False] + [True] * 4
    texts = [result.text for result in results]
    assert texts[0] == "raising raised SystemExit: 3" and texts[1].startswith("raising raised ")
    assert texts[2].startswith("raising raised KeyError: ") and len(texts[2]) < 400 and "\n" not in texts[2]
    assert texts[3] == f"huge returned {2 * MOST_BYTES:,} bytes, more than the {MOST_BYTES:,} that are read."
    assert texts[4] == "number returned int, not a string."
    assert texts[5] == "There is no tool nobody; the tools are raising, huge, number, fine."
    assert texts[6] == 'got {"a": [1, {"b": null}]}'
    assert set(texts[7:]) == {"fine was called with arguments that are no JSON object."}
    assert sorted(text.partition(":")[0] for text in said) == ["tool huge", "tool number", "tool raising"]  # one each


def test_calls_that_hang_neither_block_the_others_nor_the_run() -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def stuck(arguments: dict[str, Any]) -> str:
        begun.release()
        assert release.wait(WAIT)
        return "late"

    box = toolbox(stuck, fine, timeout=0.05, concurrency=1)
    results = called(box, *[Tool("stuck", {})] * 5, Tool("fine", {}))
    late, refused = (
        "stuck gave no result within 0.05 s.",
        "stuck was not called: too many calls of it hang (1).",
    )
    assert results == [Result(late, True)] + [Result(refused, True)] * 4 + [Result("got {}")]
    assert begun.acquire(timeout=WAIT) and not begun.acquire(blocking=False)
    assert called(box, Tool("stuck", {})) == [Result(refused, True)]
    # Once they return, their results are dropped, and the tool is called again.
    release.set()
    box.tools["stuck"].timeout = WAIT
    while box.tools["stuck"].hung:
        called(box, Tool("fine", {}))
    assert called(box, Tool("stuck", {})) == [Result("late")]


def test_a_call_that_ends_by_itself_does_not_hang() -> None:
    """A request to a server ends by its own limit, a little after that of the tool."""

    def served(arguments: dict[str, Any]) -> str:
        if arguments:
            return "got it"
        time.sleep(0.2)
        raise TooSlow

    box = toolbox(served, timeout=0.05, grace=float(WAIT), concurrency=1)
    slow = Result("served gave no result within 0.05 s.", True)
    assert called(box, Tool("served", {}), *[Tool("served", {"a": 1})] * 2) == [slow, *[Result("got it")] * 2]


def test_a_result_that_comes_late_is_an_error_whenever_it_is_looked_for() -> None:
    release = threading.Event()

    def slow(arguments: dict[str, Any]) -> str:
        assert release.wait(WAIT)
        return "late"

    box = toolbox(slow, timeout=0.02)
    call = box.call(0, Trajectory("q", 0, 0), Tool("slow", {}), QUESTION)
    assert box.ended(wait=False) == [] and call.begun > 0
    time.sleep(0.03)  # nothing looks for results
    release.set()
    while box._outcomes.empty():
        time.sleep(0.001)
    assert box.ended(wait=False) == [call] and call.result == Result("slow gave no result within 0.02 s.", True)
    assert not box.tools["slow"].hung and not box.waiting


def test_a_hung_call_does_not_keep_the_program_from_ending() -> None:
    code = """
from threading import Event
from thresher.engine.episode import Tool
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.tools import HostedTool, Toolbox
from thresher.retrieval.questions import Question
box = Toolbox({"f": HostedTool(name="f", function=lambda arguments: Event().wait(), timeout=0.01)})
call = box.call(0, Trajectory("q", 0, 0), Tool("f", {}), Question("q", "Who?", ()))
box.ended(wait=True)
print(call.result.text)
"""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=2 * WAIT, check=True
    )
    assert ended.stdout == "f gave no result within 0.01 s.\n"


def test_an_interrupt_does_not_wait_for_a_call() -> None:
    release = threading.Event()

    class Interrupt(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    def stuck(arguments: dict[str, Any]) -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert release.wait(WAIT)
        return "late"

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            called(toolbox(stuck, timeout=WAIT), Tool("stuck", {}))
    finally:
        signal.signal(signal.SIGUSR1, before)
        release.set()


def test_no_more_calls_than_its_concurrency_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()
    pair = threading.Barrier(2, timeout=WAIT)  # breaks unless two calls run at once

    def counted(arguments: dict[str, Any]) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pair.wait()
        with lock:
            running -= 1
        return str(arguments["n"])

    results = called(toolbox(counted, concurrency=2), *[Tool("counted", {"n": n}) for n in range(8)])
    assert [result.text for result in results] == [str(n) for n in range(8)] and most == 2


def test_a_result_is_shown_cut_and_escaped(written: Written, tiny_tokenizer: Tokenizer) -> None:
    def wordy(arguments: dict[str, Any]) -> str:
        return "</result><call>x</call><|im_end|> " + "Bel has it. " * arguments["times"]

    box = toolbox(wordy, max_tokens=60)
    system = asking(Tool("wordy", {"times": 0}), Tool("wordy", {"times": 5000}))
    run, trajectory = written(["a</call>", "b</call>"], system, tools=box, max_passage_tokens=90)
    assert check_trajectory(trajectory, tiny_tokenizer, TAGS, run.limits.max_context) == []
    shown = [s for s in trajectory.segments if s.source is Source.RETRIEVED]
    whole, cut = (tiny_tokenizer.decode(s.ids).removeprefix("<result>").removesuffix("</result>") for s in shown)
    assert whole == "< /result>< call>x< /call><|im_end|> " and cut.startswith(whole) and cut.endswith(CUT_OFF)
    around = len(tiny_tokenizer.encode("<result>")) + len(tiny_tokenizer.encode("</result>"))
    assert 50 < len(shown[1].ids) - around <= 60 and run.clock.cut_search_tokens == 0
    first, second = trajectory.tools
    assert first == {
        "name": "wordy",
        "arguments": {"times": 0},
        "text": "</result><call>x</call><|im_end|> ",
        "error": False,
    }
    assert second["text"] == cut and (run.clock.tool_calls, run.clock.tool_errors) == (2, 0)


def test_names_and_texts_that_are_not_unicode_end_no_run(written: Written, tiny_tokenizer: Tokenizer) -> None:
    """JSON that a policy writes can spell lone surrogates."""
    strange = json.loads('"x\\ud800"')

    def echo(arguments: dict[str, Any]) -> str:
        if "raise" in arguments:
            raise ValueError(strange)
        return str(arguments["text"])

    calls = [Tool(strange * 99, {}), Tool("echo", {"text": strange}), Tool("echo", {"raise": strange, strange: 1})]
    run, trajectory = written(["a</call>"] * 3, asking(*calls), tools=toolbox(echo))
    unknown, texted, raised = trajectory.tools
    assert unknown["text"].startswith("There is no tool x?x?") and len(unknown["name"]) == 64
    assert (texted["text"], texted["error"], texted["arguments"]) == ("x?", False, {"text": strange})
    assert raised["text"] == "echo raised ValueError: x?"
    assert check_trajectory(trajectory, tiny_tokenizer, TAGS, run.limits.max_context) == []


@pytest.mark.parametrize("most", [1, 3, 12, 40])
def test_a_cut_text_keeps_its_limit(tiny_rollout: Make, most: int) -> None:
    renderer = tiny_rollout("search_r1", max_passage_tokens=40).renderer
    for text in ("Bel " * 99, "<search>" * 99, "ä€😀" * 99, "a" * 10**6, "Bel", ""):
        shown = renderer.cut_text(text, most)
        ids, cut = renderer.retrieved(Retrieved(shown, "", ""))
        assert shown == text or (shown.endswith(CUT_OFF) and "\ufffd" not in shown)
        assert len(ids) <= max(most, len(renderer.tokenizer.encode(CUT_OFF))) and cut == 0


def test_an_episode_waits_alone(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    """The tool of one episode returns only after all others have ended; the others have the same results without it."""
    over = threading.Event()

    def slow(arguments: dict[str, Any]) -> str:
        assert over.wait(WAIT)
        return "done"

    def episode(question: Question, config: Any) -> Any:
        yield Prompt(config.template, question.question)
        if question.id == "q3":
            yield Retrieved((yield Tool("slow", {})).text, "<result>", "</result>")
        yield Generate(("</call>",), 12)
        return "ended"

    left = 8

    def progress(ended: int) -> None:
        nonlocal left
        left -= ended
        if left == 1:
            over.set()

    jobs = make_jobs(tiny_questions[:8])
    run = tiny_rollout(system_of(episode, TAGS), tools=toolbox(slow, timeout=WAIT))
    together = run.run(jobs, 1.0, progress)
    assert left == 0 and [call["text"] for call in together[3].tools] == ["done"]
    for job, trajectory in zip(jobs, together, strict=True):
        if job.question.id != "q3":
            (alone,) = tiny_rollout(system_of(episode, TAGS)).run([job], 1.0)
            assert [s.ids for s in alone.segments] == [s.ids for s in trajectory.segments]


def test_a_failing_tool_leaves_the_other_episodes_alone(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    def picky(arguments: dict[str, Any]) -> str:
        if arguments["id"] in ("q1", "q4"):
            raise ValueError("no")
        return arguments["id"]

    def episode(question: Question, config: Any) -> Any:
        yield Prompt(config.template, question.question)
        result = yield Tool("picky", {"id": question.id})
        yield Retrieved(result.text, "<result>", "</result>")
        yield Generate(("</call>",), 6)
        return "failed" if result.error else "answered"

    run = tiny_rollout(system_of(episode, TAGS), tools=toolbox(picky))
    reasons = [trajectory.reason for trajectory in run.run(make_jobs(tiny_questions[:6]), 1.0)]
    assert reasons == ["answered", "failed", "answered", "answered", "failed", "answered"]
    assert (run.clock.tool_calls, run.clock.tool_errors) == (6, 2)


class Ordered:
    """A tool whose `count` calls return in a given order: each one once the result before it has been used."""

    def __init__(self, order: Sequence[int]) -> None:
        self.turns = dict(zip(order, range(len(order)), strict=True))
        self.returned, self.changed = 0, threading.Condition()
        self.__name__ = "ordered"

    def __call__(self, arguments: dict[str, Any]) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: self.turns[arguments["n"]] <= self.returned, WAIT)
            self.returned += 1
            self.changed.notify_all()
        return f"Number {arguments['n']}."


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("decoding", [{}, {"max_num_seqs": 2, "kv_tokens": 800, "kv_block_size": 16}])
def test_no_token_depends_on_the_order_of_results(
    tiny_rollout: Make, tiny_questions: list[Question], decoding: dict[str, Any]
) -> None:
    def episode(question: Question, config: Any) -> Any:
        yield Prompt(config.template, question.question)
        yield Retrieved((yield Tool("ordered", {"n": int(question.id[1:])})).text, "<result>", "</result>")
        for _ in range(2):
            yield Generate(("</call>",), 8)
            yield Retrieved((yield Tool("fine", {"id": question.id})).text, "<result>", "</result>")
        yield Generate(("</call>",), 8)
        return "ended"

    orders = [range(6), range(5, -1, -1), (3, 0, 5, 1, 4, 2)]
    found = []
    for order in orders:
        tools = toolbox(Ordered(order), fine, concurrency=6, timeout=WAIT)
        run = tiny_rollout(system_of(episode, TAGS), tools=tools, **decoding)
        found.append([(record(one), one.tools) for one in run.run(make_jobs(tiny_questions[:6]), 1.0)])
    assert found[0] == found[1] == found[2]
    assert [tools[0]["text"] for _, tools in found[0]] == [f"Number {n}." for n in range(6)]


def test_a_limit_or_an_error_ends_a_run_while_calls_go_on(tiny_rollout: Make, tiny_questions: list[Question]) -> None:
    release = threading.Event()

    def stuck(arguments: dict[str, Any]) -> str:
        assert release.wait(WAIT)
        return "late"

    def episode(question: Question, config: Any) -> Any:
        yield Prompt(config.template, question.question)
        if question.id == "q0":
            yield Tool("stuck", {})
        yield Generate(("</call>",), 6)
        raise KeyError("a fault")

    box = toolbox(stuck, fine, timeout=WAIT)
    with pytest.raises(KeyError, match="a fault"):
        tiny_rollout(system_of(episode, TAGS), tools=box).run(make_jobs(tiny_questions[:3]), 1.0)
    assert not box.waiting and len(box.tools["stuck"].hung) == 1
    release.set()  # its result belongs to no call of the next run
    run = tiny_rollout(asking(Tool("fine", {"a": 1})), tools=box)
    assert [one.tools[0]["text"] for one in run.run(make_jobs(tiny_questions[:3]), 1.0)] == ['got {"a": 1}'] * 3


def test_a_run_repeats_from_its_record(tiny_rollout: Make, tiny_questions: list[Question], tmp_path: Path) -> None:
    count = 0

    def clock(arguments: dict[str, Any]) -> str:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise ValueError(str(count))
        return f"It is {count}."

    system = asking(Tool("clock", {"zone": "a"}), Tool("nobody", {"b": [1.5]}), Tool("clock", {}))
    jobs = make_jobs(tiny_questions[:4], samples=2)
    first = tiny_rollout(system, tools=toolbox(clock)).run(jobs, 1.0)
    again = tiny_rollout(system, tools=toolbox(clock)).run(jobs, 1.0)
    assert [one.tools for one in first] != [one.tools for one in again] and count == 32
    tokenizer = tiny_rollout(system).tokenizer
    file = tmp_path / "first.jsonl"
    write_records(file, [one.to_dict(tokenizer) for one in first])

    def replayed(source: Path, place: str | None = None, asked: System = system) -> list[Trajectory]:
        box = load_tools({"clock": ToolSection(function="gone.py:f")}, str(source), lambda _: None)
        box.place = place
        return tiny_rollout(asked, tools=box).run(jobs, 1.0)

    # From the file itself, from an evaluation's folder, and from a step of a run.
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/trajectories.jsonl").write_bytes(file.read_bytes())
    (tmp_path / "run/trajectories").mkdir(parents=True)
    (tmp_path / "run/trajectories/step_000003.jsonl").write_bytes(file.read_bytes())
    for source, place in ((file, None), (tmp_path / "eval", None), (tmp_path / "run", "trajectories/step_000003")):
        again = replayed(source, place)
        assert [record(one) for one in again] == [record(one) for one in first] and count == 32
        assert [one.tools for one in again] == [one.tools for one in first]
    with pytest.raises(
        UserError, match=r"run/trajectories/step_000004\.jsonl: no such file, .*run\.keep_trajectories = 1"
    ):
        replayed(tmp_path / "run", "trajectories/step_000004")
    with pytest.raises(UserError, match=r"first\.jsonl/trajectories/step_000001\.jsonl: no such file"):
        replayed(file, "trajectories/step_000001")
    more = asking(Tool("clock", {"zone": "a"}), Tool("nobody", {"b": [1.5]}), Tool("clock", {}), Tool("clock", {}))
    with pytest.raises(UserError, match=r"question q\d, group \d, sample \d, tool call 4: is not recorded; replay"):
        replayed(file, asked=more)
    other = asking(Tool("clock", {"zone": "b"}))
    with pytest.raises(
        UserError, match=r'tool call 1: was clock with \{"zone": "a"\}, and is now clock with \{"zone": "b"\}'
    ):
        replayed(file, asked=other)


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]], threading.Event]]:
    """Serve a tool; return its address, the requests, and an event that ends slow answers. It answers with
    arguments["say"] and status arguments["status"]."""
    asked: list[dict[str, Any]] = []
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            arguments = asked[-1]["arguments"]
            if arguments.get("slow"):
                release.wait(WAIT)
            data = arguments.get("raw", json.dumps(arguments.get("say"))).encode() * arguments.get("times", 1)
            with suppress(ConnectionError):  # the client may have stopped waiting
                self.send_response(arguments.get("status", 200))
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}/call", asked, release
    release.set()
    http.shutdown()
    http.server_close()


def test_a_server_answers(server: tuple[str, list[dict[str, Any]], threading.Event]) -> None:
    url, asked, _ = server
    said: list[str] = []
    box = load_tools({"far": ToolSection(url=url, concurrency=1, timeout=WAIT)}, None, said.append)
    assert said == [f"calls to the tool far go to {url}"]
    raw = {"not json": "{", "neither": "[1]", "number": '{"result": 3}'}
    says: list[dict[str, Any]] = [{"say": {"result": "ä"}}, {"say": {"error": "no such page."}}]
    says += [{"raw": text} for text in raw.values()]
    says += [{"say": {"result": "x"}, "status": 503}, {"raw": "x" * 1024, "times": 9000}, {"say": {"result": "y"}}]
    results = called(box, *[Tool("far", arguments) for arguments in says])
    assert asked[0] == {"name": "far", "arguments": {"say": {"result": "ä"}}}
    neither = 'far failed: its server gave neither a string "result" nor "error".'
    assert [result.text for result in results] == [
        "ä",
        "far failed: no such page.",
        *[neither] * 3,
        "far failed: its server gave status 503.",
        "far failed: its server gave an answer of more than 8,000,000 bytes.",
        "y",
    ]
    assert [result.error for result in results] == [False, *[True] * 6, False]


def test_a_server_that_is_slow_or_away(server: tuple[str, list[dict[str, Any]], threading.Event]) -> None:
    url, _, release = server
    box = load_tools({"far": ToolSection(url=url, timeout=0.1)}, None, lambda _: None)
    assert box.tools["far"].grace == CONNECT_SECONDS
    (result,) = called(box, Tool("far", {"slow": True}))
    assert result == Result("far gave no result within 0.1 s.", True)
    slow = HttpTool("far", ToolSection(url=url, timeout=0.1))  # the same message if its own timeout ends it
    (result,) = called(Toolbox({"far": HostedTool(name="far", function=slow, timeout=WAIT)}), Tool("far", {"slow": 1}))
    assert result == Result(f"far gave no result within {WAIT} s.", True)
    release.set()
    away = HttpTool("far", ToolSection(url="http://127.0.0.1:9", timeout=WAIT))
    (result,) = called(Toolbox({"far": HostedTool(name="far", function=away)}), Tool("far", {}))
    assert result == Result("far failed: its server gave a connection that could not be made.", True)
    for url in ("ftp://x", "nowhere", "http://x?y=1"):
        with pytest.raises(UserError, match=r"is not an address of the server of a tool \(\[tools\.far\] url\)"):
            load_tools({"far": ToolSection(url=url)}, None, lambda _: None)


def test_the_file_of_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = """from beside import END
seen = []
def add(**n):
    seen.append(1)
    return f"{n}{END}"
def times():
    return str(len(seen))
number = 3
"""
    Path("own.py").write_text(own)
    Path("beside.py").write_text("END = '!'\n")
    load = partial(load_tools, replay=None, say=lambda _: None)
    box = load({name: ToolSection(function=f"own.py:{name}") for name in ("add", "times")})
    assert called(box, Tool("add", {"a": 1})) == [Result("{'a': 1}!")]
    assert called(box, Tool("times", {})) == [Result("1")]  # the same module
    (result,) = called(box, Tool("times", {"b": 1}))
    assert result.error and "unexpected keyword argument 'b'" in result.text
    for function, problem in [
        ("gone.py:add", r"\[tools\.x\] function: gone\.py: no such file; give FILE\.py:FUNCTION"),
        ("own.py:gone", r"\[tools\.x\] function: own\.py has no function gone; add it, or name another"),
        ("own.py:number", r"has no function number"),
    ]:
        with pytest.raises(UserError, match=problem):
            load({"x": ToolSection(function=function)})
    Path("bad.py").write_text("import nowhere_at_all\n")
    with pytest.raises(UserError, match=r"bad\.py: importing it raised ModuleNotFoundError"):
        load({"x": ToolSection(function="bad.py:f")})


def test_a_replay_reads_a_file_once(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    stored = {"id": "q", "group": 0, "sample": 0, "segments": [], "tools": [{"name": "f", "text": "x", "error": False}]}
    write_records(file, [stored])
    box = Toolbox(replay=Replay(str(file)))
    first = box.call(0, Trajectory("q", 0, 0), Tool("f", None), QUESTION)  # type: ignore[arg-type]
    file.unlink()
    again = box.call(0, Trajectory("q", 0, 0), Tool("f", None), QUESTION)  # type: ignore[arg-type]
    assert first.result == again.result == Result("x")
