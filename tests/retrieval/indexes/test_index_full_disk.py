"""Libraries that write an index: room that lacks for a file's last byte ends in a sentence, and leaves nothing."""

from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest
from full_disk import files_of_at_most

from thresher.common.errors import UserError
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.indexes import structures
from thresher.retrieval.indexes.bm25 import build_bm25
from thresher.retrieval.passages import Passage

CORPUS = Corpus([Passage(str(n), "T", f"w{n % 2} w{n % 3} w{n % 5}") for n in range(400)])


def graph(path: Path) -> None:
    path.mkdir()
    index = faiss.index_factory(8, "HNSW4")
    index.add(np.random.default_rng(0).standard_normal((40, 8), np.float32))
    structures.write(index, path / "faiss.index")


@pytest.mark.parametrize("build", [lambda path: build_bm25(CORPUS, path), graph], ids=["BM25", "a graph"])
def test_the_last_byte_of_a_file_is_missed(build: Callable[[Path], object], tmp_path: Path) -> None:
    build(tmp_path / "whole")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    for name, size in sizes.items():
        out = tmp_path / f"without-{name}"
        with pytest.raises((OSError, UserError), match=str(out)), files_of_at_most(size - 1):
            build(out)
        assert not [path for path in out.rglob("*") if path.is_file()]
