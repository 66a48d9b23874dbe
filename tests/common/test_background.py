"""Tests of background calls: their results, in order; and an interrupt that waits for none of them."""

import os
import signal
import threading
from typing import Any

import pytest
from rollout_cases import Make

from thresher.common.background import Background
from thresher.engine.rollout.rollout import Job
from thresher.retrieval.questions import Question


def test_results_and_failures_come_back_in_order() -> None:
    here, threads = threading.get_ident(), []

    def call(number: int) -> int:
        threads.append(threading.get_ident())
        return 10 // number

    with Background[int]() as background:
        futures = [background.submit(lambda number=number: call(number)) for number in (5, 0, 2)]
        assert futures[0].result(30) == 2 and futures[2].result(30) == 5
        with pytest.raises(ZeroDivisionError):
            futures[1].result(30)
    assert len(set(threads)) == 1 and here not in threads


def test_who_leaves_waits_for_no_call_and_begins_none() -> None:
    begun, go_on, made = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)
        made.append("slow")

    with Background[None]() as background:
        first = background.submit(slow)
        background.submit(lambda: made.append("next"))
        assert begun.wait(60)
    assert made == [], "it was left while the call was out"
    go_on.set()
    first.result(60)
    (thread,) = background._threads
    assert thread.daemon
    thread.join(60)
    assert made == ["slow"] and not thread.is_alive()


def test_an_interrupt_does_not_wait_for_a_search(
    script: Any, tiny_rollout: Make, tiny_questions: list[Question]
) -> None:
    class Away:
        """A retriever that is interrupted by Ctrl-C in a search and answers after the end of the rollout."""

        elsewhere = True

        def __init__(self) -> None:
            self.over, self.answered = threading.Event(), False

        def search(self, queries: list[str], k: int) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            self.answered = self.over.wait(60)
            return [[] for _ in queries]

    script({0: ["<search>mayor</search>"]})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    server = Away()
    try:
        with pytest.raises(KeyboardInterrupt):
            tiny_rollout(index=server).run([Job(tiny_questions[0], 0, 0, 0)], 1.0)
        assert not server.answered and not server.over.is_set()
    finally:
        server.over.set()
        signal.signal(signal.SIGINT, before)
