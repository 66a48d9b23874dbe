"""Calls that run in daemon threads, in the order in which they were submitted."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread, current_thread
from threading import enumerate as enumerate_threads
from typing import Generic, TypeVar

T = TypeVar("T")


class _Worker(Thread):
    busy = False


def still_busy() -> bool:
    """Return whether any submitted call is still running."""
    return any(isinstance(thread, _Worker) and thread.busy for thread in enumerate_threads())


class Background(Generic[T]):
    """Run `submit`ted calls, at most `threads` at a time: `with Background() as background: background.submit(call)`.

    An interrupt leaves the `with` at once: running calls continue, later ones are dropped. With a ThreadPoolExecutor,
    Python would wait at the end of the `with` and of the program.
    """

    def __init__(self, threads: int = 1, name: str = "background") -> None:
        self._calls: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self._most, self._name = threads, name
        self._threads: list[_Worker] = []
        self._over = False

    def __enter__(self) -> "Background[T]":
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        for _ in self._threads:
            self._calls.put(None)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call and return the future of its result or exception."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        if len(self._threads) < self._most:
            self._threads.append(_Worker(target=self._work, name=self._name, daemon=True))
            self._threads[-1].start()
        return future

    def _work(self) -> None:
        worker = current_thread()
        assert isinstance(worker, _Worker)
        while (asked := self._calls.get()) is not None and not self._over:
            future, call = asked
            worker.busy = True
            try:
                future.set_result(call())
            except BaseException as error:  # raised by `future.result()`
                future.set_exception(error)
            worker.busy = False
