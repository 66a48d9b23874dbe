"""Call the tools of a recipe for episodes: Python functions in threads, servers and chat models by HTTP, or results of
a stored run.

A call waits until fewer than `concurrency` calls of its tool run, and then runs for at most `timeout` seconds. The
thread that plays the episodes does all accounting; another thread runs the call and puts its outcome into a queue.

A thread that hangs cannot be ended. After the timeout its episode continues with an error, another call takes its
place, and a later result is dropped. While `concurrency` calls of a tool or more hang, no others of it are begun, and
each fails at once. Therefore no episode waits for ever, and a tool has at most 2 x concurrency threads, which do not
keep the program from ending. A function that holds Python's global lock cannot be left running in this way.

A call's arguments are kept as JSON text. A function gets its own copy, by keyword; nothing in them is executed. If a
tool has `noise`, it also gets `noisy`, `question` and `golds` (simulated_search.py).
"""

import json
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import urllib3

from thresher.common.background import Background
from thresher.common.errors import UserError, shown
from thresher.common.http import (
    CHAT_PATH,
    HttpAnswer,
    TooLarge,
    TooSlow,
    chat_reply,
    in_words,
    json_of,
    request,
    service_address,
)
from thresher.common.records import read_records
from thresher.engine.config.sections import RunSection, ToolSection
from thresher.engine.episode import Result, Tool
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.simulated_search import (
    DOCUMENT_TOKENS,
    TEMPERATURE,
    Curriculum,
    read_search_prompt,
    search_prompt,
)
from thresher.engine.store.run_folder import TRAJECTORY, check_shape
from thresher.engine.systems import load_functions
from thresher.retrieval.questions import Question

MOST_BYTES = 1_000_000  # of a result; a longer one is an error
MOST_NAME = 64  # characters kept of a tool's name, which the policy may have written
MOST_WORDS = 300  # characters kept of the message of a tool's exception
LONGEST_WAIT = 3600.0  # seconds of one wait for a result; then the wait is repeated
CONNECT_SECONDS = 5.0


class ToolFailure(Exception):
    """Error, in words, for a server that returns no result."""


@dataclass(eq=False, slots=True)
class Call:
    """One call. owner: object that waits for it. arguments: JSON text; None if they are no JSON object. added:
    arguments that the engine adds. result: None until the call has ended."""

    owner: Any
    name: str
    arguments: str | None
    added: Mapping[str, Any] = field(default_factory=dict)
    begun: float = 0.0
    result: Result | None = None

    def record(self) -> dict[str, Any]:
        """Return the record of the call and its result for a trajectory."""
        assert self.result is not None
        arguments = None if self.arguments is None else json.loads(self.arguments)
        record = {"name": self.name, "arguments": arguments, "text": self.result.text, "error": self.result.error}
        return record | {key: self.added[key] for key in ("noisy",) if key in self.added}


@dataclass(eq=False, kw_only=True)
class HostedTool:
    """A tool with its limits and its calls. grace: seconds after `timeout` in which a call may still end by itself, as
    a request to a server does. queue: calls that have not begun. hung: running calls whose results are no longer
    awaited."""

    name: str
    function: Callable[[dict[str, Any]], object]
    timeout: float = 10.0
    grace: float = 0.0
    max_tokens: int | None = None
    concurrency: int = 8
    curriculum: Curriculum | None = None
    queue: deque[Call] = field(default_factory=deque)
    running: set[Call] = field(default_factory=set)
    hung: set[Call] = field(default_factory=set)
    reported: bool = False  # whether a failure of it was reported

    def __post_init__(self) -> None:
        self.threads = Background[None](2 * self.concurrency, f"tool {self.name}")

    @property
    def too_late(self) -> Result:
        return Result(f"{self.name} gave no result within {self.timeout:g} s.", True)

    def outcome(self, arguments: str, added: Mapping[str, Any]) -> Result:
        """Call the function; return its text, or a sentence on why there is none."""
        try:
            text = self.function({**json.loads(arguments), **added})
        except TooSlow:
            return self.too_late
        except ToolFailure as error:
            return Result(_unicode(f"{self.name} failed: {error}"), True)
        except BaseException as error:  # the run continues after any exception
            words = " ".join("".join(traceback.format_exception_only(error)).split())[:MOST_WORDS]
            return Result(_unicode(f"{self.name} raised {words}"), True)
        if not isinstance(text, str):
            return Result(f"{self.name} returned {type(text).__name__}, not a string.", True)
        size = len(text.encode("utf-8", "replace"))
        if size > MOST_BYTES:
            return Result(f"{self.name} returned {size:,} bytes, more than the {MOST_BYTES:,} that are read.", True)
        return Result(_unicode(text))


class Toolbox:
    """The tools of a run. waiting: calls without a result. place: the file that a replay reads next, see Replay. step:
    the current training step, from 1; None outside training steps.

    say: called with a sentence at the first failure of each tool.
    """

    def __init__(
        self,
        tools: Mapping[str, HostedTool] | None = None,
        replay: "Replay | None" = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.tools, self.replay, self._say = tools or {}, replay, say
        self.place: str | None = None
        self.step: int | None = None
        self.waiting: set[Call] = set()
        self._outcomes: SimpleQueue[tuple[Call, Result, float]] = SimpleQueue()

    def call(self, owner: object, trajectory: Trajectory, asked: Tool, question: Question) -> Call:
        """Return a call, which `ended` begins. It already has its result if it is replayed or cannot be made."""
        call = Call(owner, _unicode(str(asked.name))[:MOST_NAME], _as_json(asked.arguments))
        tool = self.tools.get(call.name)
        if tool is not None and tool.curriculum is not None:
            noisy = tool.curriculum.noisy(self.step, question.id, trajectory.sample, len(trajectory.tools))
            call.added = {"noisy": noisy, "question": question.question, "golds": list(question.golds)}
        if self.replay is not None:
            call.result = self.replay.result(self.place, trajectory, call)
        elif tool is None:
            names = f"the tools are {', '.join(self.tools)}" if self.tools else "the recipe names none"
            call.result = Result(f"There is no tool {call.name}; {names}.", True)
        elif call.arguments is None:
            call.result = Result(f"{call.name} was called with arguments that are no JSON object.", True)
        else:
            self.waiting.add(call)
            tool.queue.append(call)
        return call

    def limit(self, name: str) -> int | None:
        """Return `max_tokens` of a tool."""
        return self.tools[name].max_tokens if name in self.tools else None

    def ended(self, wait: bool) -> list[Call]:
        """Begin calls that are due; return those that have ended since the last time. wait: until there is one."""
        found: list[Call] = []
        pause = 0.0
        while True:
            self._receive(found, pause)
            for tool in self.tools.values():
                self._expire(tool, found)
                self._begin(tool, found)
            if found or not wait or not self.waiting:
                return found
            ends = [call.begun + tool.timeout + tool.grace for tool in self.tools.values() for call in tool.running]
            pause = min(max(min(ends) - monotonic(), 1e-3), LONGEST_WAIT)

    def drop(self) -> None:
        """Drop all open calls: the run has ended without them."""
        self.waiting.clear()
        for tool in self.tools.values():
            tool.queue.clear()
            tool.hung |= tool.running
            tool.running.clear()

    def _receive(self, found: list[Call], pause: float) -> None:
        """Take the outcomes that threads have put into the queue; wait at most `pause` seconds for the first."""
        try:
            while True:
                call, result, seconds = self._outcomes.get(timeout=pause) if pause else self._outcomes.get_nowait()
                pause, tool = 0.0, self.tools[call.name]
                if call in tool.hung:
                    tool.hung.remove(call)
                else:
                    tool.running.remove(call)
                    self._close(tool, call, result if seconds <= tool.timeout else tool.too_late, found)
        except Empty:
            return

    def _expire(self, tool: HostedTool, found: list[Call]) -> None:
        now = monotonic()
        for call in [call for call in tool.running if now - call.begun > tool.timeout + tool.grace]:
            tool.running.remove(call)
            tool.hung.add(call)
            self._close(tool, call, tool.too_late, found)

    def _begin(self, tool: HostedTool, found: list[Call]) -> None:
        while tool.queue and len(tool.hung) >= tool.concurrency:
            hang = Result(f"{tool.name} was not called: too many calls of it hang ({len(tool.hung)}).", True)
            self._close(tool, tool.queue.popleft(), hang, found)
        while tool.queue and len(tool.running) < tool.concurrency:
            call = tool.queue.popleft()
            tool.running.add(call)
            call.begun = monotonic()
            tool.threads.submit(partial(self._run, tool, call))

    def _run(self, tool: HostedTool, call: Call) -> None:
        assert call.arguments is not None
        started = monotonic()
        result = tool.outcome(call.arguments, call.added)
        self._outcomes.put((call, result, monotonic() - started))

    def _close(self, tool: HostedTool, call: Call, result: Result, found: list[Call]) -> None:
        call.result = result
        self.waiting.remove(call)
        found.append(call)
        if result.error and not tool.reported:
            tool.reported = True
            self._say(f"tool {tool.name}: {result.text} (reported once; trajectories hold every call)")


def _unicode(text: str) -> str:
    """Return a text without lone surrogates, which JSON from the policy can contain and no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()


def _as_json(arguments: object) -> str | None:
    """Return arguments as JSON; None if they are no object of JSON values."""
    try:
        return json.dumps(arguments, allow_nan=False) if isinstance(arguments, Mapping) else None
    except (TypeError, ValueError, RecursionError):
        return None


class ToolServer:
    """Client of a server that runs a tool. address: URL of the requests."""

    def __init__(self, name: str, section: ToolSection, address: str) -> None:
        self.name, self.timeout, self.url = name, section.timeout, address
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=2 * section.concurrency, retries=False)

    def ask(self, body: Mapping[str, Any]) -> HttpAnswer:
        """Return the server's answer. ToolFailure if there is none, TooSlow if none comes in time."""
        data = json.dumps(body).encode("ascii")
        headers, most = {"content-type": "application/json"}, 8 * MOST_BYTES  # JSON may escape each character
        try:
            return request(self._pool, "POST", self.url, data, headers, self.timeout, CONNECT_SECONDS, most)
        except TooLarge as error:
            raise ToolFailure(f"its server gave {error}.") from None
        except (urllib3.exceptions.ReadTimeoutError, TooSlow):
            raise TooSlow from None
        except urllib3.exceptions.HTTPError as error:
            raise ToolFailure(f"its server gave {in_words(error, self.timeout, 'an answer')}.") from None


class HttpTool(ToolServer):
    """Tool that a server runs. The server receives {"name", "arguments"} and returns {"result": text} or {"error":
    text}."""

    def __init__(self, name: str, section: ToolSection) -> None:
        whose, example = f"the server of a tool ([tools.{name}] url)", "http://127.0.0.1:9000/call"
        super().__init__(name, section, service_address(section.url or "", "", whose, example))

    def __call__(self, arguments: dict[str, Any]) -> str:
        """Return the server's result. ToolFailure if there is none, TooSlow if none comes in time."""
        response = self.ask({"name": self.name, "arguments": arguments})
        answer = json_of(response) if response.status == 200 else None
        found = answer if isinstance(answer, dict) else {}
        if isinstance(error_text := found.get("error"), str):
            raise ToolFailure(error_text[:MOST_BYTES])
        if not isinstance(result := found.get("result"), str):
            what = 'neither a string "result" nor "error"' if response.status == 200 else f"status {response.status}"
            raise ToolFailure(f"its server gave {what}.")
        return result


class ChatTool(ToolServer):
    """Tool whose result a chat model writes: the documents that a search engine would find for the argument `query`,
    one per line."""

    def __init__(self, name: str, section: ToolSection) -> None:
        whose, example = f"a chat model's server ([tools.{name}] chat_url)", "http://127.0.0.1:8000/v1"
        address = service_address(section.chat_url or "", CHAT_PATH, whose, example, root="/v1")
        super().__init__(name, section, address)
        self.template, self.model = read_search_prompt(section.template), section.model
        self.max_tokens = section.max_tokens or DOCUMENT_TOKENS

    def __call__(self, arguments: dict[str, Any]) -> str:
        """Return the documents. ToolFailure if the model writes none, TooSlow if none come in time."""
        asked = {key: arguments[key] for key in ("question", "golds", "noisy")}
        if not isinstance(query := arguments.get("query"), str):
            raise ToolFailure("it was called without a query.")
        content = search_prompt(self.template, query, **asked)
        messages = [{"role": "user", "content": content}]
        body = {"model": self.model, "temperature": TEMPERATURE, "max_tokens": self.max_tokens, "messages": messages}
        response = self.ask(body)
        if response.status != 200:
            raise ToolFailure(f"its server gave status {response.status}.")
        lines = [line.strip() for line in (chat_reply(response) or "").splitlines()]
        if not any(lines):
            raise ToolFailure("its chat model wrote nothing.")
        return "\n".join(filter(None, lines))


class Replay:
    """Results of tools from a stored run. source: the folder of a run of `train`, whose files `place` names
    (trajectories/step_000003), the folder of an evaluation, or a file of `thresher rollout`."""

    def __init__(self, source: str) -> None:
        self.source = Path(source)
        self._read: tuple[str | None, Path, dict[tuple[str, int, int], list[dict[str, Any]]]] | None = None

    def result(self, place: str | None, trajectory: Trajectory, call: Call) -> Result:
        """Return the stored result of a trajectory's next call. UserError if there is none, or if it is of another
        call."""
        if self._read is None or self._read[0] != place:
            whole = place is None and self.source.is_file()
            file = self.source if whole else self.source / f"{place or 'trajectories'}.jsonl"
            self._read = place, file, self._load(file)
        _, file, recorded = self._read
        key, number = (trajectory.question_id, trajectory.group, trajectory.sample), len(trajectory.tools)
        where = f"{file}: question {key[0]}, group {key[1]}, sample {key[2]}, tool call {number + 1}"
        remedy = "replay a run of the same recipe, model and seed, or leave out rollout.tools_replay"
        stored = recorded.get(key, [])[number : number + 1]
        if not stored or not isinstance(text := stored[0].get("text"), str):
            raise UserError(f"{where}: is not recorded; {remedy}")
        now = None if call.arguments is None else json.loads(call.arguments)
        name, arguments = stored[0].get("name"), stored[0].get("arguments")
        if name != call.name or arguments != now:
            then = f"{name} with {json.dumps(arguments)[:80]}"
            raise UserError(f"{where}: was {then}, and is now {call.name} with {json.dumps(now)[:80]}; {remedy}")
        if (recorded_noisy := stored[0].get("noisy")) != (noisy := call.added.get("noisy")):
            raise UserError(f"{where}: noisy was {shown(recorded_noisy)}, and is now {shown(noisy)}; {remedy}")
        return Result(text, stored[0].get("error") is True)

    @staticmethod
    def _load(file: Path) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
        if not file.is_file():
            raise UserError(
                f"{file}: no such file, but rollout.tools_replay takes tool results from it; name a run that kept "
                "the trajectories of every step (run.keep_trajectories = 1), or a file of thresher rollout"
            )
        found = {}
        for number, record in read_records(file):
            check_shape(record, TRAJECTORY, f"{file}:{number}")
            found[str(record.get("id")), record.get("group", 0), record.get("sample", 0)] = record.get("tools") or []
        return found


def load_tools(
    sections: Mapping[str, ToolSection] | None,
    replay: str | None,
    say: Callable[[str], None],
    run: RunSection | None = None,
) -> Toolbox:
    """Return the tools of a recipe, with their files imported. With a replay no tool is loaded or called. run: its seed
    and number of steps determine the noise of simulated searches."""
    sections, run = sections or {}, run or RunSection()
    wanted = {name: one.function for name, one in sections.items() if one.function is not None}
    functions = {} if replay is not None else load_functions({f"[tools.{n}] function": f for n, f in wanted.items()})
    tools: dict[str, HostedTool] = {}
    for name, section in sections.items():
        server = None if section.function is not None else HttpTool if section.chat_url is None else ChatTool
        if replay is not None:
            function: Callable[[dict[str, Any]], object] = partial(_not_called, name)
        elif server is not None:
            function = server(name, section)
            say(f"calls to the tool {name} go to {section.url or section.chat_url}")
        else:
            function = partial(_by_keyword, functions[f"[tools.{name}] function"])
        limits = {key: getattr(section, key) for key in ("timeout", "max_tokens", "concurrency")}
        curriculum, grace = _curriculum(section, run), 0.0 if server is None else CONNECT_SECONDS
        tools[name] = HostedTool(name=name, function=function, grace=grace, curriculum=curriculum, **limits)
    return Toolbox(tools, None if replay is None else Replay(replay), say)


def _curriculum(section: ToolSection, run: RunSection) -> Curriculum | None:
    """Return the curriculum of a tool; None if it gets no information on noise. A chat model always gets it."""
    if section.noise is None and section.chat_url is None:
        return None
    start, end = section.noise or (0.0, 0.0)
    return Curriculum(start=start, end=end, base=section.noise_base, steps=run.steps, seed=run.seed)


def _by_keyword(function: Callable[..., object], arguments: dict[str, Any]) -> object:
    return function(**arguments)


def _not_called(name: str, arguments: dict[str, Any]) -> object:
    raise AssertionError(f"{name} is called although its results are replayed")
