"""The server under load, for `thresher bench retrieval`: started as a user starts it, in its own process.

It serves a flat lexical index of 5,000 passages, the first of the given corpus or made-up ones, so that no encoder is
part of the measured time. 64 connections query with runs of words from the passages: first all different, then a few
repeatedly, which the server answers from its cache. The load generator is one event loop with a minimal HTTP client, so
that it needs less of the machine than the server; the figure is a lower bound.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from thresher.common.jsonl import write_jsonl
from thresher.retrieval.building.build import build_index
from thresher.retrieval.corpus import Corpus, open_corpus, read_corpus
from thresher.retrieval.encoders.lexical import DEFAULT_DIM, LexicalEncoder

CONNECTIONS = 64
PASSAGES, WORDS, VOCABULARY = 5000, 80, 20_000
# More different queries than can be answered in the time, and few enough to be in the cache after the warm-up.
DIFFERENT, REPEATED = 60_000, 64
QUERY_WORDS = 12
SEED = 0
WARM_UP = 1.0  # uncounted seconds


def measure_service(corpus: str | None, folder: Path, seconds: float, passages: int = PASSAGES) -> list[dict[str, Any]]:
    """Return figures of `measure_server` for different and for repeated queries, with a description of the index.
    seconds: for each. The index is built in `folder`. RuntimeError if the server does not start."""
    folder.mkdir(parents=True)
    path = folder / "corpus.jsonl"
    write_jsonl(path, _given(corpus, folder / "given", passages) if corpus else _made_up(passages))
    served = read_corpus(path)
    encoder = LexicalEncoder.fit(passage.text for passage in served)
    build_index(served, encoder, folder / "index")
    different = _queries(served, DIFFERENT)
    with _server(folder / "index") as url:
        return [
            {
                "queries": name,
                "passages": len(served),
                "dim": DEFAULT_DIM,
                **measure_server(url, queries, CONNECTIONS, seconds),
            }
            for name, queries in (("different", different), ("repeated", different[:REPEATED]))
        ]


def _given(corpus: str, cache: Path, passages: int) -> Iterator[dict[str, str]]:
    for passage in islice(open_corpus(corpus, cache), passages):
        yield {"id": passage.id, "title": passage.title, "text": passage.text}


def _made_up(passages: int) -> Iterator[dict[str, str]]:
    """Yield passages of words w0, w1, .. with natural word frequencies (Zipf)."""
    draw = np.random.default_rng(SEED)
    frequency_V = 1 / (np.arange(VOCABULARY) + 3)
    word_PW = draw.choice(VOCABULARY, (passages, WORDS), p=frequency_V / frequency_V.sum())
    for number, word_W in enumerate(word_PW.tolist()):
        yield {"id": str(number), "title": f"passage {number}", "text": " ".join(f"w{word}" for word in word_W)}


def _queries(corpus: Corpus, count: int) -> list[str]:
    """Return runs of words, in random order, all different if the corpus is large enough for that."""
    draw = np.random.default_rng(SEED)
    found: dict[str, None] = {}
    for row in draw.integers(len(corpus), size=2 * count).tolist():
        words = corpus[row].text.split()
        first = int(draw.integers(max(1, len(words) - QUERY_WORDS + 1)))
        found[" ".join(words[first : first + QUERY_WORDS])] = None
        if len(found) == count:
            break
    return list(found)


@contextmanager
def _server(index: Path) -> Iterator[str]:
    """Yield the address of a server that is stopped at the end of the `with`."""
    arguments = ["serve-retriever", "--index", str(index), "--port", "0"]
    command = [sys.executable, "-P", "-m", "thresher.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r" at (http://\S+?);", said)
            if not found:
                raise RuntimeError(f"the server did not start: {said.strip() or 'it printed nothing'}")
            yield found[1]
        finally:
            process.terminate()


@dataclass(slots=True)
class _Tally:
    counted_from: float
    until: float
    seconds: list[float] = field(default_factory=list)
    failed: int = 0


def measure_server(
    url: str, queries: Sequence[str], connections: int = 64, seconds: float = 10.0, k: int = 3
) -> dict[str, Any]:
    """Query the server at `url` with `queries`, cyclically, from `connections` connections for `seconds` seconds.

    Each connection sends one query at a time, the next after the answer. Latency is from the first byte of a request to
    the last of its answer. Returns connections, seconds, k, requests, failed (answers other than 200), requests_per_s,
    and p50_ms, p99_ms and largest_ms of a request (None without requests). Raises OSError if there is no server.
    """
    return asyncio.run(_measure(urlsplit(url), list(queries), connections, seconds, k))


async def _measure(parts: Any, queries: list[str], connections: int, seconds: float, k: int) -> dict[str, Any]:
    head = f"POST /retrieve HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
    bodies = [json.dumps({"queries": [query], "topk": k, "return_scores": True}).encode("ascii") for query in queries]
    requests = [head.encode("ascii") + str(len(body)).encode("ascii") + b"\r\n\r\n" + body for body in bodies]
    start = time.perf_counter() + WARM_UP
    tally = _Tally(start, start + seconds)
    streams = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(connections)]
    async with asyncio.TaskGroup() as group:
        for number, (reader, writer) in enumerate(streams):
            # Each connection starts at another query, and all go through every query.
            first = number * len(requests) // connections
            group.create_task(_ask(reader, writer, requests[first:] + requests[:first], tally))
    took = 1000 * np.array(tally.seconds)
    return {
        "connections": connections,
        "seconds": seconds,
        "k": k,
        "requests": len(tally.seconds),
        "failed": tally.failed,
        "requests_per_s": len(tally.seconds) / seconds,
        "p50_ms": float(np.percentile(took, 50)) if tally.seconds else None,
        "p99_ms": float(np.percentile(took, 99)) if tally.seconds else None,
        "largest_ms": float(took.max()) if tally.seconds else None,
    }


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: list[bytes], tally: _Tally
) -> None:
    number = 0
    while (started := time.perf_counter()) < tally.until:
        writer.write(requests[number % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]))
        if tally.counted_from <= started:
            if head.startswith(b"HTTP/1.1 200 "):
                tally.seconds.append(time.perf_counter() - started)
            else:
                tally.failed += 1
        number += 1
    writer.close()
