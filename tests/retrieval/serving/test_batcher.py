"""Test that waiting requests are searched together, in order, by k, up to a size, and that only a faulty one fails."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest
from retrieval_server_cases import until

from thresher.retrieval.passages import Passage
from thresher.retrieval.retriever import Hit
from thresher.retrieval.serving.app import Batcher, Full


def searching(log: list[tuple[list[str], int]], gate: threading.Event) -> Callable[[list[str], int], list[list[Hit]]]:
    def search(queries: list[str], k: int) -> list[list[Hit]]:
        gate.wait(20)
        log.append((queries, k))
        if "bad" in queries:
            raise ValueError("bad")
        return [[Hit(0, Passage(query, "", "x"), float(k))] for query in queries]

    return search


Held = tuple[list[tuple[list[str], int]], threading.Event, Batcher, "Future[list[list[Hit]]]"]


def held(max_batch: int, max_waiting: int, first: str = "first") -> Held:
    """Return the log of searches, the event that releases them, a batcher that holds the first, and its future."""
    log: list[tuple[list[str], int]] = []
    gate = threading.Event()
    batcher = Batcher(searching(log, gate), max_batch=max_batch, max_wait=0.0, max_waiting=max_waiting)
    future = batcher.submit([first], 1, "z")
    until(lambda: batcher.waiting == 0)  # the thread has taken it, and later requests wait
    return log, gate, batcher, future


def ids(future: "Future[list[list[Hit]]]") -> list[str]:
    return [hit.passage.id for hits in future.result(20) for hit in hits]


def test_requests_that_wait_are_searched_together_in_their_order() -> None:
    log, gate, batcher, first = held(4, 100)
    asked = [(["a"], 2), (["b", "c"], 2), (["d"], 3), (["e", "f"], 2), (["g"], 3), (["h"] * 9, 2)]
    futures = [batcher.submit(queries, k, client) for client, (queries, k) in enumerate(asked)]
    given_up = batcher.submit(["nobody waits for this"], 2, "y")
    assert given_up.cancel() and batcher.waiting == 17
    gate.set()
    assert ids(first) == ["first"]
    for future, (queries, k) in zip(futures, asked, strict=True):
        assert ids(future) == queries and {hit.score for hits in future.result() for hit in hits} == {float(k)}
    batcher.close()
    expected = [["first"], ["a", "b", "c", "e"], ["d", "g"], ["f"] + ["h"] * 3, ["h"] * 4, ["h"] * 2]
    assert [queries for queries, _ in log] == expected and batcher.batches == len(log)
    with pytest.raises(CancelledError):
        given_up.result()


def test_a_batch_waits_for_others_but_not_once_it_is_full() -> None:
    log: list[tuple[list[str], int]] = []
    gate = threading.Event()
    gate.set()
    batcher = Batcher(searching(log, gate), max_batch=2, max_wait=30.0, max_waiting=100)
    futures = [batcher.submit([query], 1, query) for query in "abcd"]
    assert [ids(future) for future in futures] == [["a"], ["b"], ["c"], ["d"]]
    assert log == [(["a", "b"], 1), (["c", "d"], 1)]
    last = batcher.submit(["e"], 1, "e")
    time.sleep(0.05)
    assert not last.done()
    batcher.close()  # waiting requests are answered, new ones are refused
    assert ids(last) == ["e"]
    with pytest.raises(Full):
        batcher.submit(["f"], 1, "f")


def test_only_the_guilty_request_fails() -> None:
    _, gate, batcher, first = held(8, 4, "bad")
    futures = [batcher.submit([query], 1, query) for query in ("a", "bad", "b")]
    with pytest.raises(Full):
        batcher.submit(["c", "d"], 1, "c")
    gate.set()
    assert [isinstance(future.exception(20), ValueError) for future in (first, *futures)] == [True, False, True, False]
    assert ids(futures[0]) == ["a"] and ids(futures[2]) == ["b"]
    batcher.close()


def test_who_asks_little_is_in_the_next_batch_whatever_others_ask() -> None:
    """Four clients send many queries, one of them with another k; a fifth sends one when a search of theirs begins."""
    log: list[list[str]] = []
    asked: list[int] = []
    waited: list[int] = []

    def search(queries: list[str], k: int) -> list[list[Hit]]:
        ready.wait(20)
        log.append(queries)
        if "lone" in queries:
            waited.append(len(log) - asked[-1])
        elif len(waited) == len(asked) < 30:
            asked.append(len(log))
            batcher.submit(["lone"], 1, "lone")
        return [[] for _ in queries]

    ready = threading.Event()
    batcher = Batcher(search, max_batch=32, max_wait=0.0, max_waiting=10_000)
    greedy = [batcher.submit([f"{client}"] * 500, 1 + client // 3, client) for client in range(4)]
    ready.set()
    assert [len(future.result(20)) for future in greedy] == [500] * 4
    batcher.close()
    assert waited == [1] * 30  # in the next batch, and alone in it
    assert [queries for queries in log if "lone" in queries] == [["lone"]] * 30
    # While the fifth client asks, the other batches are half as long; the four have equal shares of all batches.
    sizes = [len(queries) for queries in log if "lone" not in queries]
    assert set(sizes[1:29]) == {16} and sizes[35:45] == [32] * 10
    taken = [sum(queries.count(f"{client}") for queries in log[:80]) for client in range(4)]
    assert max(taken) - min(taken) <= 32


def test_many_short_requests_do_not_keep_a_long_one_waiting_for_ever() -> None:
    log, gate, batcher, first = held(4, 1000)
    long = batcher.submit(["long"] * 9, 1, "long")
    short = [batcher.submit([f"s{turn}"], 1, client) for turn in range(20) for client in range(4)]
    gate.set()
    assert ids(first) == ["first"] and len(ids(long)) == 9 and all(ids(one) for one in short)
    served = [query for queries, _ in log for query in queries]
    assert len(served) - 1 - served[::-1].index("long") < 50
    batcher.close()


def test_a_full_queue_refuses_the_longest_and_not_the_shortest() -> None:
    _, gate, batcher, first = held(4, 20)
    longs = [batcher.submit([name] * size, 1, name) for name, size in (("a", 12), ("b", 8))]
    lone = batcher.submit(["lone"], 1, "lone")
    assert isinstance(longs[0].exception(20), Full) and batcher.waiting == 9
    with pytest.raises(Full):
        batcher.submit(["c"] * 12, 1, "c")
    gate.set()
    assert ids(first) == ["first"] and ids(lone) == ["lone"] and ids(longs[1]) == ["b"] * 8
    until(lambda: batcher.waiting == 0)
    assert ids(batcher.submit(["d"] * 30, 1, "d")) == ["d"] * 30  # where none waits, the length does not matter
    batcher.close()


def test_thousands_that_gave_up_cost_the_next_one_nothing() -> None:
    log, gate, batcher, first = held(4, 20_000)
    gone = [batcher.submit(["gone"], 1, number) for number in range(5000)]
    assert all(future.cancel() for future in gone)
    started = time.process_time()
    last = batcher.submit(["last"], 1, "last")
    gate.set()
    assert ids(first) == ["first"] and ids(last) == ["last"] and len(log) == 2
    assert time.process_time() - started < 1.0
    batcher.close()
