"""How many searches a running server answers, and how long each waits, under many connections at once.

Every connection asks one query at a time, the next when the answer is there, as the samples of a training run do that
search each for itself. Latency is from the first byte of a request to the last of its answer. A second of warm-up is
not counted, and nothing outlasts the time given by more than the slowest answer.

The generator is one event loop that knows just enough HTTP, so that it needs less of the machine than what it measures;
where both share a few cores, the figure is still a lower bound of what the server can do.

Deliberately absent: other servers to compare with, which would need a library of their own each.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

WARM_UP = 1.0


@dataclass(slots=True)
class _Tally:
    counted_from: float
    until: float
    seconds: list[float] = field(default_factory=list)
    failed: int = 0


def measure_server(
    url: str, queries: Sequence[str], connections: int = 64, seconds: float = 10.0, k: int = 3
) -> dict[str, Any]:
    """Asks the server at `url` for `queries`, over and over, from so many connections for so many seconds.

    Returns connections, seconds, k, requests, failed (answers other than 200), requests_per_s, and p50_ms, p99_ms and
    largest_ms of a request. Raises OSError when there is no server.
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
            # Everyone begins somewhere else, and all come past every query.
            first = number * len(requests) // connections
            group.create_task(_ask(reader, writer, requests[first:] + requests[:first], tally))
    took = np.array(tally.seconds or [float("nan")]) * 1000
    return {
        "connections": connections,
        "seconds": seconds,
        "k": k,
        "requests": len(tally.seconds),
        "failed": tally.failed,
        "requests_per_s": len(tally.seconds) / seconds,
        "p50_ms": float(np.percentile(took, 50)),
        "p99_ms": float(np.percentile(took, 99)),
        "largest_ms": float(took.max()),
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
