"""The server under load, for `thresher bench retrieval`: started as a user starts it, in a process of its own.

It serves a flat lexical index of 5,000 passages, the first of the corpus that was given or made-up ones, so that no
encoder takes the time that is measured. 64 connections ask runs of words out of the passages: once all of them
different, then the same few again and again, which come from the server's cache.

Deliberately absent: large indexes behind the server. What a search takes is measured without it; this is the rest.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from thresher.bench.retrieval.load_generator import measure_server
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


def unavailable() -> str | None:
    """Why there is no server to measure; None where there is one."""
    return None if find_spec("aiohttp") else "aiohttp is not installed; the extra [serve] brings it"


def measure_service(corpus: str | None, folder: Path, seconds: float, passages: int = PASSAGES) -> list[dict[str, Any]]:
    """Figures of `measure_server` for different and for repeated queries, `seconds` each, with what was served. Works
    in `folder`. RuntimeError when the server does not start."""
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
    """Words w0, w1, .. as often as words are (Zipf)."""
    draw = np.random.default_rng(SEED)
    frequency_V = 1 / (np.arange(VOCABULARY) + 3)
    word_PW = draw.choice(VOCABULARY, (passages, WORDS), p=frequency_V / frequency_V.sum())
    for number, word_W in enumerate(word_PW.tolist()):
        yield {"id": str(number), "title": f"passage {number}", "text": " ".join(f"w{word}" for word in word_W)}


def _queries(corpus: Corpus, count: int) -> list[str]:
    """Runs of words, in random order, each different from the others where the corpus is large enough for that."""
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
    """The address of a server that ends with the `with`."""
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
