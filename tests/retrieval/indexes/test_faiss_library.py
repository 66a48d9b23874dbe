"""An installation without FAISS builds and searches flat, BM25 and hybrid indexes, and refuses the other kinds."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from thresher.common.errors import UserError
from thresher.retrieval.indexes import exact, faiss_library
from thresher.retrieval.indexes.exact import ExactRows

# Run the commands of stdin, each a list of words, in one interpreter that has no module `faiss`.
WITHOUT_FAISS = """
import json, sys
sys.modules["faiss"] = None
from thresher.cli.main import run
sys.exit(max(run(words) for words in json.load(sys.stdin)))
"""


def without_faiss(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_FAISS], input=json.dumps(commands), capture_output=True, text=True
    )


@pytest.mark.slow
def test_indexes_are_built_and_searched_without_faiss(tmp_path: Path) -> None:
    corpus, flat, words, both = (str(tmp_path / name) for name in ("corpus.jsonl", "flat", "words", "both"))
    texts = ("the mayor of Zamoth is Bel Dorin", "a river runs through it", "rain falls")
    lines = [json.dumps({"id": str(row), "title": "", "text": text}) for row, text in enumerate(texts)]
    Path(corpus).write_text("\n".join(lines))
    build, mayor = ["index", "build", "--corpus", corpus], ["--k", "1", "who is the mayor of Zamoth"]
    done = without_faiss(
        [*build, "--encoder", "lexical", "--dim", "64", "--out", flat],
        [*build, "--encoder", "bm25", "--out", words],
        ["index", "hybrid", flat, words, "--out", both],
        ["index", "plan", "--passages", "1000", "--kind", "bm25"],
        *(["index", "search", "--index", folder, *mayor] for folder in (flat, words, both)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Bel Dorin") == 3

    refused = without_faiss([*build, "--encoder", "lexical", "--dim", "64", "--kind", "HNSW32", "--out", both + "2"])
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "HNSW32 needs FAISS, which is not installed; pip install faiss-cpu" in refused.stderr
    assert not Path(both + "2.building").exists()


def test_the_exact_search_is_the_same_without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    vectors_ND = draw.integers(-2, 3, (200, 8)).astype(np.float32)  # many equal scores
    query_QD = draw.integers(-2, 3, (9, 8)).astype(np.float32)
    found = ExactRows(vectors_ND).top(query_QD, 5)
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert ExactRows(vectors_ND).top(query_QD, 5) == found


def test_a_name_of_faiss_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    faiss_library._module.cache_clear()
    with pytest.raises(UserError, match=r"pip install faiss-cpu .* extra \[cpu\] or \[gpu\]"):
        _ = exact.faiss.knn
