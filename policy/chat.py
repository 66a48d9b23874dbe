"""Chat templates, filled by a process that may be stopped (chat_worker.py)."""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError

SECONDS = 10.0  # that a template may take


class TemplateError(UserError):
    """Error in a chat template or in what it was given; its message describes it."""


def fill_template(
    template: str, messages: list[dict[str, Any]], names: dict[str, str], add_generation_prompt: bool
) -> str:
    """The template filled with `messages` and `names`. TemplateError where it cannot be, takes longer than SECONDS, or
    more memory than the worker has."""
    request = {"template": template, "messages": messages, "names": names}
    found = _worker(os.getpid()).ask({**request, "add_generation_prompt": add_generation_prompt})
    if "text" not in found:
        raise TemplateError(found["error"])
    return found["text"]


class _Worker:
    """A process that answers line by line; one that does not is ended, and the next question starts another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        line = json.dumps(request)
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
                ready, _, _ = select.select([process.stdout], [], [], SECONDS)
                answer = process.stdout.readline() if ready else ""
            except BrokenPipeError:
                answer = ""
            if answer.endswith("\n"):
                found: dict[str, str] = json.loads(answer)
                return found
            ended = process.poll() is not None
            self.end()
        return {"error": "it ended the process that fills it" if ended else f"it takes longer than {SECONDS:g} s"}

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        # -P: the folder of the script, whose files have common names, is no place to import from.
        command = [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")


@cache
def _worker(process: int) -> _Worker:
    """This process's own: one that was forked off it would take its answers."""
    worker = _Worker()
    atexit.register(worker.end)
    return worker
