"""Test the flat index: exact order, ties by row, results that do not depend on the batch, and the refusal of another
corpus or encoder."""

import json
import os
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest

from thresher.common.errors import UserError
from thresher.retrieval import retriever as retriever_module
from thresher.retrieval.building.build import build_index
from thresher.retrieval.corpus import Corpus, embedded_text
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.retrieval.indexes.exact import ExactRows
from thresher.retrieval.indexes.load import Index, load_index, load_retriever
from thresher.retrieval.passages import Passage


class Numbers:
    """Encoder that reads a vector from its text, such as "1 0 .5", so that a test chooses the scores."""

    name = "numbers"
    fingerprint = "numbers"

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.calls: list[int] = []

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        self.calls.append(len(queries))
        return np.array([[float(x) for x in query.split()] for query in queries], np.float32)

    encode_passages = encode_queries

    def save(self, folder: Path) -> None:
        pass


def index_of(vectors: np.ndarray, corpus: Corpus | None = None) -> Index:
    corpus = corpus or Corpus([Passage(str(row), "", "x") for row in range(len(vectors))])
    return Index(corpus, Numbers(vectors.shape[1]), ExactRows(np.ascontiguousarray(vectors, np.float32)))


def spell(vector) -> str:
    return " ".join(repr(float(x)) for x in vector)


def rows(hits) -> list[int]:
    return [hit.row for hit in hits]


def truth(vectors: np.ndarray, query: np.ndarray, k: int) -> list[tuple[int, float]]:
    """Return the top k of all rows, scored in float64 and sorted by (-score, row)."""
    scores = (vectors.astype(np.float64) * query.astype(np.float64)).sum(axis=1).astype(np.float32)
    return sorted(enumerate(scores.tolist()), key=lambda pair: (-pair[1], pair[0]))[:k]


def lexical_corpus(count: int = 300) -> Corpus:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in rng.zipf(1.3, 12) % 500) for _ in range(count)]
    return Corpus([Passage(f"p{row}", f"title {row}", text) for row, text in enumerate(texts)])


def build_lexical(corpus: Corpus, folder: Path, embed: str = "text", dim: int = 128) -> Index:
    encoder = LexicalEncoder.fit((embedded_text(passage, embed) for passage in corpus), dim)
    return build_index(corpus, encoder, folder, embed)


@pytest.mark.parametrize("batch", [1, 19, 20, 64])
@pytest.mark.parametrize("k", [1, 3, 50])
def test_ties_go_by_row_even_across_the_kth_place(batch, k):
    # One row is better than 400 equal ones, of which FAISS alone returns any that its heap kept.
    vectors = np.ones((401, 8), np.float32)
    vectors[200] *= 2
    index = index_of(vectors)
    queries = [spell(np.full(8, 1 + n)) for n in range(batch)]
    for hits in index.search(queries, k):
        assert rows(hits) == [200, *range(k)][:k]
    # For k = 1 the margin proves the answer; otherwise the tie extends over the whole corpus.
    assert index._search.full_scans == (0 if k == 1 else batch)


def test_near_ties_are_ordered_by_the_exact_score():
    # The rows differ in the last bits only, and FAISS's own float32 sums put many of them in a wrong order.
    rng = np.random.default_rng(0)
    base = rng.standard_normal(512).astype(np.float32)
    vectors = (base * (1 + rng.integers(-4, 5, (3000, 1)) * 2**-23)).astype(np.float32)
    query = rng.standard_normal(512).astype(np.float32)
    index = index_of(vectors)
    for k in (1, 5, 100):
        assert [(h.row, h.score) for h in index.search([spell(query)], k)[0]] == truth(vectors, query, k)
    assert index._search.full_scans == 3


@pytest.fixture
def faiss_threads():
    before = faiss.omp_get_max_threads()
    yield faiss.omp_set_num_threads
    faiss.omp_set_num_threads(before)


def test_independent_of_batch_composition_to_the_last_bit(tmp_path, faiss_threads):
    corpus = lexical_corpus()
    index = build_lexical(corpus, tmp_path / "ix")
    queries = [" ".join(passage.text.split()[:3]) for passage in corpus][:64]
    # FAISS uses BLAS for 20 queries or more, so the batch and the single query run different code.
    batched = index.search(queries, 5)
    for threads in (1, 2):
        faiss_threads(threads)
        alone = [load_index(tmp_path / "ix", corpus).search([query], 5)[0] for query in queries]
        assert alone == batched
        assert load_index(tmp_path / "ix", corpus).search(queries[::-1], 5)[::-1] == batched


def test_the_cache_changes_nothing_but_the_work():
    vectors = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    index = index_of(vectors)
    queries = ["1 0 0 0", "0 1 0 0", "1 0 0 0"]
    first = index.search(queries, 3)
    assert first[0] == first[2] and index.encoder.calls == [2]
    assert index.search([*queries, "0 0 1 0"], 3)[:3] == first and index.encoder.calls == [2, 1]
    assert rows(index.search(queries, 2)[0]) == rows(first[0])[:2] and index.encoder.calls == [2, 1, 2]
    stats = index.stats
    assert (stats.calls, stats.queries, stats.cached) == (3, 10, 1 + 3 + 1)


def test_the_cache_forgets_the_oldest_and_skips_the_long(monkeypatch):
    monkeypatch.setattr(retriever_module, "CACHE_QUERIES", 2)
    index = index_of(np.eye(4, dtype=np.float32))
    one, two, three = (spell(vector) for vector in np.eye(4)[:3])
    index.search([one], 1)
    index.search([two], 1)
    index.search([one], 1)  # used again, so two is now the oldest
    index.search([three], 1)
    assert index.encoder.calls == [1, 1, 1]
    index.search([one], 1)
    assert index.encoder.calls == [1, 1, 1]
    assert rows(index.search([two], 1)[0]) == [1] and index.encoder.calls == [1, 1, 1, 1]
    long = one + " " * 1_000
    assert rows(index.search([long], 1)[0]) == rows(index.search([long], 1)[0]) == [0]
    assert index.encoder.calls == [1] * 6


@pytest.mark.parametrize("query", ["", "  \n", "?!", "unheard words", "0 0"])
def test_a_query_with_nothing_in_it_has_no_hits(tmp_path, query):
    index = index_of(np.eye(2)) if query == "0 0" else build_lexical(lexical_corpus(), tmp_path / "ix")
    other = "1 0" if query == "0 0" else "w1"
    alone = index.search([other], 2)
    assert index.search([query], 2) == [[]]
    assert index.search([query, other, query], 2) == [[], *alone, []]
    assert index.search([], 2) == []


@pytest.mark.parametrize(("k", "message"), [(0, "at least 1"), (-3, "k is -3"), (5, "holds 4 passages; lower k")])
def test_k_out_of_range(k, message):
    index = index_of(np.eye(4))
    for call in (index.check_k, lambda k: index.search(["1 0 0 0"], k)):
        with pytest.raises(UserError, match=message):
            call(k)
    assert len(index.search(["1 0 0 0"], 4)[0]) == 4 == len(index)


def test_an_encoder_that_returns_nonsense_is_not_believed():
    index = index_of(np.eye(4))
    for query in ("1 0 0", "1 0 0 nan"):
        with pytest.raises(ValueError, match=r"expected finite \[1, 4\]"):
            index.search([query], 1)


def test_built_loaded_and_described(tmp_path):
    corpus = lexical_corpus(2500)
    seen: list[int] = []
    encoder = LexicalEncoder.fit((embedded_text(passage, "title+text") for passage in corpus), 64)
    built = build_index(corpus, encoder, tmp_path / "ix", "title+text", lambda stage, done, total: seen.append(done))
    assert seen == [1024, 2048, 2500]
    manifest = json.loads((tmp_path / "ix/manifest.json").read_text())
    assert manifest == {
        "format": 2,
        "kind": "flat",
        "factory": "flat",
        "passages": 2500,
        "dim": 64,
        "embed": "title+text",
        "encoder": "lexical",
        "encoder_fingerprint": encoder.fingerprint,
        "corpus_sha256": corpus.sha256,
        "corpus_paths": [],
        "dtype": "float32",
        "vectors_bytes": (tmp_path / "ix/vectors.npy").stat().st_size,
        "index_bytes": 0,
        "largest_norm": pytest.approx(1, abs=1e-6),
        "parameters": {},
        "recall": {},
        "reason": "",
        "hashed": True,
        "faiss_version": "",  # an exact index does not use FAISS
    }
    assert sorted(os.listdir(tmp_path / "ix")) == ["hashes.json", "lexical.json", "manifest.json", "vectors.npy"]
    stored_ND = np.load(tmp_path / "ix/vectors.npy")
    assert stored_ND.dtype == np.float32
    assert np.array_equal(stored_ND, encoder.encode_passages([embedded_text(p, "title+text") for p in corpus]))
    loaded = load_index(tmp_path / "ix", corpus)
    assert len(loaded) == 2500
    queries = ["title 17 w3", "w1 w2 w400"]
    assert loaded.search(queries, 10) == built.search(queries, 10)
    assert load_index(tmp_path / "ix", corpus, encoder).search(queries, 10) == built.search(queries, 10)
    # The titles were embedded, so a text's own title raises its score more than another's.
    own, other = (loaded.search([f"title {title} {corpus[1723].text}"], 1)[0][0] for title in (1723, 17))
    assert own.row == 1723 and own.score - other.score > 0.01


def write_corpus(path: Path, corpus: Corpus) -> None:
    lines = [json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in corpus]
    path.write_text("".join(lines))


def test_the_corpus_is_found_again_after_a_move(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write_corpus(run / "corpus.jsonl", lexical_corpus())
    corpus = Corpus(list(lexical_corpus()), run / "corpus.jsonl")
    expected = build_lexical(corpus, run / "index").search(["w1 w2"], 3)
    assert load_index(run / "index").search(["w1 w2"], 3) == expected
    run.rename(tmp_path / "moved")
    assert load_index(tmp_path / "moved/index").search(["w1 w2"], 3) == expected
    # If the index alone moves, the absolute path finds the corpus.
    build_lexical(Corpus(list(corpus), tmp_path / "moved/corpus.jsonl"), tmp_path / "here")
    (tmp_path / "far/away").mkdir(parents=True)
    (tmp_path / "here").rename(tmp_path / "far/away/index")
    assert load_index(tmp_path / "far/away/index").search(["w1 w2"], 3) == expected
    (tmp_path / "moved/corpus.jsonl").unlink()
    with pytest.raises(UserError, match=r"the corpus of this index is no longer at .*moved/corpus\.jsonl"):
        load_index(tmp_path / "far/away/index")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "ix"
    build_lexical(lexical_corpus(), folder)
    return folder


def edit_manifest(folder: Path, **changes: object) -> None:
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**record, **changes}))


def scramble(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f), "no such folder; build the index first"),
        (lambda f: (f / "manifest.json").unlink(), r"has no manifest\.json, so it is not a finished index"),
        (lambda f: (f / "manifest.json").write_text("{"), r"manifest\.json: line 1 is not valid JSON"),
        (lambda f: edit_manifest(f, format=3), '"format" is 3, expected 2'),
        (lambda f: edit_manifest(f, dim="128"), '"dim" is missing or of the wrong kind'),
        (lambda f: edit_manifest(f, corpus_paths=[1]), '"corpus_paths" is missing or of the wrong kind'),
        (lambda f: edit_manifest(f, embed="title"), "expected one of text, title"),
        (lambda f: edit_manifest(f, encoder="e5"), "built with the encoder 'e5', expected one of lexical, learned"),
        (lambda f: edit_manifest(f, dim=64), "another encoder"),
        (lambda f: edit_manifest(f, encoder_fingerprint="0" * 64), "another encoder"),
        (lambda f: (f / "lexical.json").unlink(), r"lexical\.json: no such file"),
        (lambda f: edit_manifest(f, kind="ivy"), "kind 'ivy', expected flat or flat16"),
        (lambda f: edit_manifest(f, recall={"recall_at_5": "1"}), '"recall" is missing or of the wrong kind'),
        (lambda f: (f / "vectors.npy").unlink(), r"vectors\.npy: expected \d+ bytes, found 0"),
        (lambda f: os.truncate(f / "vectors.npy", 200), r"vectors\.npy: expected \d+ bytes, found 200"),
        (lambda f: scramble(f / "vectors.npy"), r"vectors\.npy: NumPy cannot read it"),
        (lambda f: np.save(f / "vectors.npy", np.zeros((150, 256), np.float32)), "holds 150 x 256 vectors in float32"),
        (lambda f: np.save(f / "vectors.npy", np.zeros((300, 128), np.int32)), "holds 300 x 128 vectors in int32, exp"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused(tmp_path, finished, damage, message):
    folder = shutil.copytree(finished, tmp_path / "ix")
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_index(folder, lexical_corpus(), verify=False)
    assert "\n" not in str(caught.value)


def test_a_folder_of_the_first_format_is_still_read(tmp_path, finished):
    folder = shutil.copytree(finished, tmp_path / "ix")
    corpus = lexical_corpus()
    flat = faiss.IndexFlatIP(128)
    flat.add(np.load(folder / "vectors.npy"))
    faiss.write_index(flat, str(folder / "vectors.faiss"))
    (folder / "vectors.npy").unlink()
    record = json.loads((folder / "manifest.json").read_text())
    young = ("factory", "dtype", "index_bytes", "largest_norm", "parameters", "recall", "reason", "hashed")
    (folder / "hashes.json").unlink()  # the first format has none
    old = {key: value for key, value in record.items() if key not in young} | {"format": 1}
    (folder / "manifest.json").write_text(json.dumps(old))
    edit_manifest(folder, vectors_bytes=(folder / "vectors.faiss").stat().st_size)
    queries = ["w1 w2", "w17 w3 w3"]
    expected = load_index(finished, corpus).search(queries, 5)
    assert load_retriever(folder, corpus).search(queries, 5) == expected
    scramble(folder / "vectors.faiss")
    with pytest.raises(UserError, match=r"vectors\.faiss: FAISS cannot read it; build the index again"):
        load_index(folder, corpus)


def test_another_corpus_or_encoder_is_refused(finished):
    corpus = lexical_corpus()
    with pytest.raises(UserError, match=r"built from another corpus \(300 passages, .*\(299 passages"):
        load_index(finished, Corpus(corpus[:-1]))
    renamed = [Passage(p.id, p.title, p.text + "." if row == 17 else p.text) for row, p in enumerate(corpus)]
    with pytest.raises(UserError, match="another corpus"):
        load_index(finished, Corpus(renamed))
    other = LexicalEncoder.fit((passage.text for passage in corpus), 64)
    with pytest.raises(UserError, match=r"another encoder \(lexical, 128 dim.*\(lexical, 64 dim"):
        load_index(finished, corpus, other)
    with pytest.raises(UserError, match="was never a file"):
        load_index(finished)


def test_a_build_that_fails_leaves_nothing(tmp_path):
    corpus = Corpus([Passage("0", "", "1 2"), Passage("1", "", "nan 2")])
    with pytest.raises(ValueError, match="expected finite"):
        build_index(corpus, Numbers(2), tmp_path / "ix")
    with pytest.raises(ValueError, match=r"expected finite \[2, 3\]"):
        build_index(corpus, Numbers(3), tmp_path / "ix")
    with pytest.raises(UserError, match="embed is 'both'"):
        build_index(corpus, Numbers(2), tmp_path / "ix", "both")

    def killed(*stage: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(Corpus(corpus[:1]), Numbers(2), tmp_path / "ix", on_stage=killed)
    assert list(tmp_path.iterdir()) == []
    build_index(Corpus(corpus[:1]), Numbers(2), tmp_path / "ix")
    with pytest.raises(UserError, match="ix: exists already"):
        build_index(Corpus(corpus[:1]), Numbers(2), tmp_path / "ix")
