"""A search of the invented world as a tool with `noise`: useful or noisy results, without a chat model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from thresher.engine.protocol.prompts import passage_lines
from thresher.retrieval.corpus import read_corpus
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.rewards.text import contains_answer

K, DIM = 3, 2048  # of searches in the invented world: as many passages as the demo's recipe shows
# The Python file of the tool, which `thresher data invent` writes next to the corpus.
TOOL_FILE = """from pathlib import Path

from thresher.engine.world.simulated_search import SimulatedSearch

search = SimulatedSearch(Path(__file__).with_name("corpus.jsonl"), {passage_format!r})
"""


class SimulatedSearch:
    """A search that returns the best `k` passages of a corpus, in lines of `passage_format`. As noise it returns the
    next best ones without a gold answer."""

    def __init__(self, corpus: Path, passage_format: str, k: int = K) -> None:
        self.passages, self.passage_format, self.k = read_corpus(corpus), passage_format, k
        texts = [f"{passage.title} {passage.text}" for passage in self.passages]
        self.encoder = LexicalEncoder.fit(texts, DIM)
        self.vectors_ND = self.encoder.encode_passages(texts)

    def __call__(self, query: str, noisy: bool, question: str, golds: Sequence[str]) -> str:
        scores_N = self.vectors_ND @ self.encoder.encode_queries([query])[0]
        ranked = (self.passages[int(row)] for row in np.argsort(-scores_N, kind="stable")[self.k * noisy :])
        fit = (one for one in ranked if not (noisy and contains_answer(one.text, golds)))
        return passage_lines([one for one, _ in zip(fit, range(self.k), strict=False)], self.passage_format)
