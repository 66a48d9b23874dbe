"""Requests that wait are searched together: in their order, by k, up to a size; and only the guilty one fails."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest
from retrieval_server_cases import until

from thresher.retrieval.data.corpus import Passage
from thresher.retrieval.retriever import Hit
from thresher.retrieval.serving.batcher import Batcher, Full


def searching(log: list[tuple[list[str], int]], gate: threading.Event) -> Callable[[list[str], int], list[list[Hit]]]:
    def search(queries: list[str], k: int) -> list[list[Hit]]:
        gate.wait(20)
        log.append((queries, k))
        if "bad" in queries:
            raise ValueError("bad")
        return [[Hit(0, Passage(query, "", "x"), float(k))] for query in queries]

    return search


def ids(future: "Future[list[list[Hit]]]") -> list[str]:
    return [hit.passage.id for hits in future.result(20) for hit in hits]


def test_requests_that_wait_are_searched_together_in_their_order() -> None:
    log: list[tuple[list[str], int]] = []
    gate = threading.Event()
    batcher = Batcher(searching(log, gate), max_batch=4, max_wait=0.0, max_waiting=100)
    first = batcher.submit(["first"], 1)
    until(lambda: batcher.waiting == 0)  # the thread is at it, and the rest will wait
    asked = [(["a"], 2), (["b", "c"], 2), (["d"], 3), (["e", "f"], 2), (["g"], 3), (["h"] * 9, 2)]
    futures = [batcher.submit(queries, k) for queries, k in asked]
    given_up = batcher.submit(["nobody waits for this"], 2)
    assert given_up.cancel() and batcher.waiting == 17
    gate.set()
    assert ids(first) == ["first"]
    for future, (queries, k) in zip(futures, asked, strict=True):
        assert ids(future) == queries and {hit.score for hits in future.result() for hit in hits} == {float(k)}
    batcher.close()
    expected = [["first"], ["a", "b", "c"], ["d", "g"], ["e", "f"], ["h"] * 4, ["h"] * 4, ["h"]]
    assert [queries for queries, _ in log] == expected and batcher.batches == len(log)
    with pytest.raises(CancelledError):
        given_up.result()


def test_a_batch_waits_for_others_but_not_once_it_is_full() -> None:
    log: list[tuple[list[str], int]] = []
    gate = threading.Event()
    gate.set()
    batcher = Batcher(searching(log, gate), max_batch=2, max_wait=30.0, max_waiting=100)
    futures = [batcher.submit([query], 1) for query in "abcd"]
    assert [ids(future) for future in futures] == [["a"], ["b"], ["c"], ["d"]]
    assert log == [(["a", "b"], 1), (["c", "d"], 1)]
    last = batcher.submit(["e"], 1)
    time.sleep(0.05)
    assert not last.done()
    batcher.close()  # whoever still waits is answered, and nobody new
    assert ids(last) == ["e"]
    with pytest.raises(Full):
        batcher.submit(["f"], 1)


def test_who_asks_alone_does_not_wait() -> None:
    log: list[tuple[list[str], int]] = []
    gate = threading.Event()
    gate.set()
    batcher = Batcher(searching(log, gate), max_batch=2, max_wait=60.0, max_waiting=100)
    for queries in (["a", "b"], ["c"], ["d"]):  # the first fills a batch
        assert ids(batcher.submit(queries, 1)) == queries
    batcher.close()


def test_only_the_guilty_request_fails() -> None:
    log: list[tuple[list[str], int]] = []
    gate = threading.Event()
    batcher = Batcher(searching(log, gate), max_batch=8, max_wait=0.0, max_waiting=4)
    first = batcher.submit(["bad"], 1)
    until(lambda: batcher.waiting == 0)
    futures = [batcher.submit([query], 1) for query in ("a", "bad", "b")]
    with pytest.raises(Full):
        batcher.submit(["c", "d"], 1)
    gate.set()
    assert [isinstance(future.exception(20), ValueError) for future in (first, *futures)] == [True, False, True, False]
    assert ids(futures[0]) == ["a"] and ids(futures[2]) == ["b"]
    batcher.close()
