"""What a retrieval server counts, in the text format that Prometheus reads.

Deliberately absent: a client library for it; four counters, a gauge and a histogram are a page of text. All is counted
in the server's one event loop, so nothing is locked.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

# Seconds: from a cached answer to a search that is about to be given up.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Requests by path and status, and how long those that were served took."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.queries = 0
        self._buckets = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def count(self, path: str, status: int) -> None:
        """A request that was answered."""
        self.requests[path, status] += 1

    def served(self, queries: int, seconds: float) -> None:
        """A request whose queries were searched, and the time from its last byte to its answer."""
        self.queries += queries
        self._buckets[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def text(self, others: Iterable[tuple[str, str, str, float]]) -> str:
        """All of it; `others` are (name, type, help, value) of what is counted elsewhere."""
        lines = _header("requests_total", "counter", "requests by path and status")
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'thresher_requests_total{{path="{path}",code="{status}"}} {count}')
        lines += _header("request_seconds", "histogram", "time from a request's last byte to its answer")
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'thresher_request_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"thresher_request_seconds_sum {self._seconds:.9g}", f"thresher_request_seconds_count {total}"]
        for name, kind, text, value in (("queries_total", "counter", "queries served", self.queries), *others):
            lines += [*_header(name, kind, text), f"thresher_{name} {value:.12g}"]
        return "\n".join(lines) + "\n"


def _header(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP thresher_{name} {text}", f"# TYPE thresher_{name} {kind}"]
