"""Interface of a search, which is answered by an index in this process, by several of them, or by a server.

A `Retriever` answers all waiting queries in one call, best hits first; no query changes another's result. It caches
answers and searches for equal queries once; `_find` searches for those that remain.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import ClassVar

from thresher.common.errors import UserError
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.passages import Passage

CACHE_QUERIES = 16_384
# A longer query is not cached, because the cache would keep all of its text.
CACHE_CHARACTERS = 1_000


class Unanswered(UserError):
    """Error for searches that a server did not answer, or not usably, and may answer later. Callers should save their
    work."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One passage found: its row in the corpus (-1 if only a server knows it), the passage, and its score."""

    row: int
    passage: Passage
    score: float


@dataclass(slots=True)
class SearchStats:
    """Counts since creation: calls of `search`, queries, and queries answered from the cache or by an equal one."""

    calls: int = 0
    queries: int = 0
    cached: int = 0


class Retriever(ABC):
    """Answers searches from any thread, one at a time. identity: of a server's index, if the server reports one.
    elsewhere: another process does the work, so the caller can do other work meanwhile. samples: a search is a rollout
    itself, and on a GPU it must not run in parallel with another."""

    elsewhere: ClassVar[bool] = False
    samples: ClassVar[bool] = False

    def __init__(self) -> None:
        self.identity: str | None = None
        self.stats = SearchStats()
        self._cache: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._lock = Lock()

    @abstractmethod
    def check_k(self, k: int) -> None:
        """Raise UserError unless `k` passages can be found."""

    @abstractmethod
    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return what `search` returns, for queries that are not blank and differ from each other."""

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return the `k` best passages for each query, best first; fewer where fewer match, none for a blank query."""
        with self._lock:
            return self._search_all(queries, k)

    def _search_all(self, queries: list[str], k: int) -> list[list[Hit]]:
        self.check_k(k)
        found: dict[str, list[Hit]] = {query: self._cache[query, k] for query in queries if (query, k) in self._cache}
        fresh = [query for query in dict.fromkeys(queries) if query not in found]
        self.stats.calls += 1
        self.stats.queries += len(queries)
        self.stats.cached += len(queries) - len(fresh)
        found.update({query: [] for query in fresh})
        asked = [query for query in fresh if query.strip()]
        if asked:
            found.update(zip(asked, self._find(asked, k), strict=True))
        self._remember(found, k)
        return [list(found[query]) for query in queries]

    def _remember(self, found: dict[str, list[Hit]], k: int) -> None:
        for query, hits in found.items():
            if len(query) <= CACHE_CHARACTERS:
                self._cache[query, k] = hits
                self._cache.move_to_end((query, k))
        while len(self._cache) > CACHE_QUERIES:
            self._cache.popitem(last=False)


class LocalRetriever(Retriever):
    """An index in this process, of the passages in `corpus`."""

    corpus: Corpus

    def __len__(self) -> int:
        return len(self.corpus)

    def check_k(self, k: int) -> None:
        """Raise UserError unless `k` is from 1 to the number of passages."""
        check_positive(k, len(self))


def check_positive(k: int, passages: int) -> None:
    """Raise UserError unless 1 <= k <= passages."""
    if k < 1:
        raise UserError(f"k is {k}; expected at least 1 passage per search")
    if k > passages:
        raise UserError(f"k is {k}, but the corpus holds {passages} passages; lower k")
