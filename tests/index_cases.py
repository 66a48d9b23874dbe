"""Shared by the tests of dense indexes: clustered vectors, an encoder that looks them up by number, small slices."""

from pathlib import Path

import numpy as np

from thresher.retrieval.building import build
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.indexes import structures, vector_file
from thresher.retrieval.passages import Passage

DIM = 16


class Clustered:
    """An encoder: passage "17" has row 17 of a fixed matrix; query "17" the same, rotated by about 25 degrees. The rows
    lie around `count` / 40 centres, of norm about 1, as neighbours of real text do."""

    name = "clustered"
    dim = DIM

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        centres_CD = draw.standard_normal((max(1, count // 40), DIM))
        rows_ND = centres_CD[draw.integers(len(centres_CD), size=count)] + 0.5 * draw.standard_normal((count, DIM))
        self.matrix_ND = (rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)).astype(np.float32)
        self.turned_ND = (self.matrix_ND + 0.12 * draw.standard_normal((count, DIM))).astype(np.float32)
        self.fingerprint = f"clustered {count} {seed}"

    def encode_passages(self, passages: list[str]) -> np.ndarray:
        return self.matrix_ND[[int(text) for text in passages]]

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self.turned_ND[[int(text) for text in queries]]

    def save(self, folder: Path) -> None:
        (folder / "clustered.json").write_text(self.fingerprint)


def numbered(count: int) -> Corpus:
    """Return passages "0", "1", .. with ids that are not their rows."""
    return Corpus([Passage(f"id{count - row}", "", str(row)) for row in range(count)])


# Slices of 300 rows, batches of 200, graphs saved every 600.
SMALL = ((vector_file, "SLICE_BYTES", 300 * DIM * 4), (build, "BUILD_BATCH", 200), (structures, "CHECKPOINT", 600))


def make_small() -> None:
    """Use SMALL in this process."""
    for module, name, value in SMALL:
        setattr(module, name, value)
