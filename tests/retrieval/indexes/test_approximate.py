"""Test approximate indexes: the recall of every kind on clustered vectors, exact scores, results that do not depend on
the batch, and the refusal of damaged or foreign folders."""

import json
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
from index_cases import DIM, Clustered, numbered

from thresher.common.errors import UserError
from thresher.retrieval.building.build import BuildSettings, build_folder, tune
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.indexes import load as dense_module
from thresher.retrieval.indexes.approximate import (
    ApproximateSearch,
    FlatShards,
    GraphCandidates,
    ListCandidates,
    Projection,
    candidates_of,
)
from thresher.retrieval.indexes.exact import RowScores
from thresher.retrieval.indexes.kinds import parse_kind
from thresher.retrieval.indexes.load import ApproximateIndex, load_index, load_retriever
from thresher.retrieval.indexes.manifest import read_manifest
from thresher.retrieval.indexes.structures import inner, read_structure
from thresher.retrieval.indexes.vector_file import VectorFile

COUNT = 4000
LISTS = ("IVF64,Flat", "IVF64,SQfp16", "IVF64,SQ8", "OPQ4,IVF64,PQ4", "PCA12,IVF64,SQfp16")
GRAPHS = ("HNSW16", "HNSW16_SQ8", "HNSW16_SQfp16", "PCA12,HNSW16", "PCA12,HNSW16_SQ8")
KINDS = (*LISTS, *GRAPHS)
# Four bytes per vector and no kept vectors, and a recall that this cannot reach.
UNSCORED = ("IVF64,PQ4", "none", 0.999)
QUERIES = [str(number) for number in range(3, COUNT, 57)]


@pytest.fixture(scope="module")
def world() -> tuple[Corpus, Clustered]:
    return numbered(COUNT), Clustered(COUNT)


@pytest.fixture(scope="module", autouse=True)
def known_encoder(world):
    """Register a loader for the encoder, so that a folder names what to load, as with learned encoders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dense_module.LOADERS, Clustered.name, lambda folder: world[1])
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory, world):
    """Return build(kind, keep="float32", recall=.9) -> folder, which builds each index once."""
    root = tmp_path_factory.mktemp("indexes")
    made: dict[tuple, Path] = {}

    def build(kind: str, keep: str = "float32", recall: float = 0.9) -> Path:
        key = (kind, keep, recall)
        if key not in made:
            made[key] = root / f"ix{len(made)}"
            settings = BuildSettings(kind=parse_kind(kind, COUNT, DIM), keep=keep, recall=recall)
            build_folder(*world, made[key], settings, lambda *stage: None)
        return made[key]

    return build


@pytest.fixture(scope="module")
def truth(tmp_path_factory, world):
    """Build the exact index of the same vectors."""
    folder = tmp_path_factory.mktemp("exact") / "ix"
    build_folder(*world, folder, BuildSettings(kind=parse_kind("flat", COUNT, DIM)), lambda *stage: None)
    return load_index(folder, *world)


def overlap(found, exact) -> float:
    """Return the recall of rows, averaged over queries."""
    shares = [len({h.row for h in a} & {h.row for h in b}) / len(b) for a, b in zip(found, exact, strict=True)]
    return float(np.mean(shares))


def scores(truth, k: int) -> dict[tuple[str, int], float]:
    """Return the scores of the exact top k, by query and row."""
    answers = zip(QUERIES, truth.search(QUERIES, k), strict=True)
    return {(query, hit.row): hit.score for query, hits in answers for hit in hits}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast_cases(2)
def test_every_kind_reaches_its_recall_and_scores_exactly(world, folders, truth, kind):
    folder = folders(kind)
    index = load_retriever(folder, world[0])
    assert isinstance(index, ApproximateIndex) and len(index) == COUNT
    manifest = read_manifest(folder)
    assert (manifest.factory, manifest.parameters) == (kind, index.parameters)
    assert min(manifest.recall["recall_at_5"], manifest.recall["recall_at_10"]) >= 0.9  # bound: tuned until it is so
    found, exact = index.search(QUERIES, 5), truth.search(QUERIES, 5)
    # These queries are not those that it was tuned on.
    assert overlap(found, exact) >= 0.82  # bound: .9, less five deviations of 350 hits
    known = scores(truth, 50)
    for query, hits in zip(QUERIES, found, strict=True):
        assert len(hits) == 5 and [hit.score for hit in hits] == sorted((h.score for h in hits), reverse=True)
        for hit in hits:
            assert hit.passage.id == f"id{COUNT - hit.row}" and hit.passage.text == str(hit.row)
            assert known.get((query, hit.row), hit.score) == hit.score


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast_cases(4)
def test_independent_of_batch_composition_to_the_last_bit(world, folders, kind):
    batched = load_retriever(folders(kind), world[0]).search(QUERIES, 5)
    other = load_retriever(folders(kind), world[0])
    assert [other.search([query], 5)[0] for query in QUERIES] == batched
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    again = load_retriever(folders(kind), world[0]).search(QUERIES[::-1], 5)[::-1]
    faiss.omp_set_num_threads(threads)
    assert again == batched


@pytest.mark.parametrize("kind", ["IVF64,Flat", "OPQ4,IVF64,PQ4", *GRAPHS])
@pytest.mark.fast_cases(2)
def test_the_highest_parameter_and_all_candidates_are_the_exact_answer(world, folders, truth, kind):
    folder = folders(kind)
    parameter = {"efSearch": COUNT} if "HNSW" in kind else {"nprobe": 64}
    index = load_retriever(folder, world[0], {**parameter, "candidates": COUNT // 5})
    assert index.parameters == {**parameter, "candidates": COUNT // 5}
    assert index.search(QUERIES[:20], 5) == truth.search(QUERIES[:20], 5)


def test_a_higher_parameter_is_taken_where_the_first_finds_too_few(world, folders, truth):
    index = load_retriever(folders("IVF64,Flat"), world[0], {"nprobe": 1})
    (hits,) = index.search(["7"], COUNT)
    assert [hit.row for hit in hits] == [hit.row for hit in truth.search(["7"], COUNT)[0]]
    for k, message in ((COUNT + 1, "holds 4000 passages; lower k"), (0, "at least 1")):
        with pytest.raises(UserError, match=message):
            index.search(["7"], k)


@pytest.mark.slow
def test_what_is_kept_of_the_vectors(world, folders, truth):
    half, none = (load_retriever(folders(*each), world[0]) for each in (("IVF64,SQfp16", "float16"), UNSCORED))
    names = [{path.name for path in folders(*each).iterdir()} for each in (("IVF64,SQfp16", "float16"), UNSCORED)]
    assert names[0] - names[1] == {"vectors16.npy"} and "vectors.npy" not in names[0] | names[1]
    exact = scores(truth, 500)
    structure = faiss.read_index(str(folders(*UNSCORED) / "index.faiss"))
    structure.make_direct_map()
    gaps, estimates = [], []
    for index in (half, none):
        found = [(query, hit) for query, hits in zip(QUERIES, index.search(QUERIES, 5), strict=True) for hit in hits]
        gaps.append(max(abs(hit.score - exact.get((query, hit.row), hit.score)) for query, hit in found))
        estimates = [world[1].encode_queries([query])[0] @ structure.reconstruct(hit.row) for query, hit in found]
    assert 0 < gaps[0] < 2e-3 < gaps[1]  # rounding to float16, and to 4 bytes per vector
    np.testing.assert_allclose([hit.score for _, hit in found], estimates, rtol=0, atol=2**-19)  # 32 roundings of 1
    # Four bytes cannot reach the wanted recall, so the manifest holds the best setting found.
    manifest = read_manifest(folders(*UNSCORED))
    assert none.parameters == manifest.parameters and none.parameters["candidates"] == 1 < none.parameters["nprobe"]
    assert 0.3 < manifest.recall["recall_at_5"] < 0.999


def test_flat16_measures_what_rounding_costs(world, folders):
    folder = folders("flat16")
    recall = read_manifest(folder).recall
    assert 0 <= 1 - recall["recall_at_10"] <= 0.02 and recall["queries"] == 200
    index = load_retriever(folder, world[0])
    rounded = np.load(folder / "vectors16.npy")
    assert rounded.dtype == np.float16
    query = world[1].encode_queries(["5"])[0].astype(np.float64)
    scores = (rounded.astype(np.float64) * query).sum(axis=1).astype(np.float32)
    assert [(h.row, h.score) for h in index.search(["5"], 20)[0]] == [
        (row, float(scores[row])) for row in np.lexsort((np.arange(COUNT), -scores))[:20]
    ]


class Steps:
    """Search whose recall, at any k, is read from a table by factor and value of nprobe or efSearch."""

    most = 6

    def __init__(self, table):
        self.table, self.candidates, self.ks, self.asked = table, self, (5,), []
        self.value = self.factor = 1

    def span(self, k):
        return 1, self.most

    def top(self, *_):
        raise AssertionError("only its recall is asked for")

    def recall(self, top, k):
        self.asked.append((self.factor, self.value))
        return self.table[self.factor].get(self.value, 0.99)


@pytest.mark.parametrize(
    ("table", "wanted", "chosen", "asked"),
    [
        # The first value that reaches the recall is chosen.
        ({1: {1: 0.5, 2: 0.9, 3: 0.96}}, 0.95, (1, 3), 3),
        # There is no gain from 2 to 3, so more candidates are tried, from the lowest value again.
        ({4: {1: 0.5, 2: 0.7, 3: 0.701}, 16: {1: 0.6, 2: 0.97}}, 0.95, (16, 2), 5),
        # The last number of candidates is tried up to the largest value, and the best of all is kept.
        ({4: {1: 0.5, 2: 0.8, 3: 0.8}, 16: {1: 0.6, 2: 0.7, 3: 0.7, 4: 0.7, 6: 0.7}}, 0.95, (4, 2), 8),
    ],
)
def test_tuning_raises_the_parameter_until_it_pays_no_more(table, wanted, chosen, asked):
    search = Steps(table)
    tune(search, search, wanted, tuple(table), lambda *stage: None)
    assert (search.factor, search.value) == chosen and len(search.asked) == asked


def test_a_graph_is_tried_from_what_is_fetched_to_what_may_pay(world, folders):
    """Below the range, all values of efSearch give one search; up to the last vector, one over 10^6 took minutes."""
    file = VectorFile(folders("HNSW16_SQ8") / "vectors.npy", COUNT, DIM)
    kind = parse_kind("HNSW16_SQ8", COUNT, DIM)
    graph = candidates_of(kind, read_structure(folders("HNSW16_SQ8") / "index.faiss", kind, file))
    search = ApproximateSearch(graph, RowScores(file.take), COUNT, 1, 2)
    assert search.span(10) == (28, COUNT)
    graph.most = 10**6
    assert search.span(10) == (28, 4096)
    search.factor = 1000
    assert search.span(10) == (COUNT, 4096)
    graph.most = COUNT
    # An efSearch beyond a C integer searches the whole graph.
    assert len(search.top(file.open()[:1], COUNT)[0]) == COUNT
    search.value, search.factor = 10**11, 1
    assert [row for row, _ in search.top(file.open()[:1], 1)[0]] == [0]


def test_equal_vectors_count_for_each_other(tmp_path):
    """Recall compares scores: finding another one of forty equal passages counts as finding the passage."""
    encoder = Clustered(400)
    encoder.matrix_ND[:] = np.repeat(encoder.matrix_ND[:10], 40, axis=0)
    encoder.turned_ND[:] = encoder.matrix_ND
    settings = BuildSettings(kind=parse_kind("IVF10,Flat", 400, DIM))
    manifest = build_folder(numbered(400), encoder, tmp_path / "ix", settings, lambda *stage: None)
    assert manifest.recall["recall_at_10"] == 1 and manifest.parameters["nprobe"] == 1


def edit_manifest(folder: Path, **changes: object) -> None:
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**record, **changes}))


def scramble(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def swap_index(folder: Path, index) -> None:
    faiss.write_index(index, str(folder / "index.faiss"))
    edit_manifest(folder, index_bytes=(folder / "index.faiss").stat().st_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "index.faiss").unlink(), r"index\.faiss: expected \d+ bytes, found 0"),
        (lambda f: scramble(f / "index.faiss"), r"index\.faiss: FAISS cannot read it"),
        (lambda f: swap_index(f, faiss.IndexFlatIP(DIM)), "holds 0 x 16 vectors in a IndexFlat"),
        (lambda f: swap_index(f, faiss.index_factory(DIM, "IVF2,Flat")), "holds 0 x 16 vectors in a IndexIVFFlat"),
        (lambda f: edit_manifest(f, factory="LSH"), "kind is 'LSH'; expected one of"),
        (lambda f: edit_manifest(f, dtype="int8"), "'int8', which is not a dtype of vectors"),
        (lambda f: edit_manifest(f, kind="tree"), "kind 'tree', which this version does not know"),
        (lambda f: edit_manifest(f, parameters={"nprobe": 0}), "nprobe is 0; expected a whole number of at least 1"),
        (lambda f: edit_manifest(f, corpus_sha256="0" * 64), "built from another corpus"),
        (lambda f: edit_manifest(f, encoder_fingerprint="0" * 64), "built with another encoder"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused(tmp_path, world, folders, damage, message):
    folder = shutil.copytree(folders("IVF64,Flat"), tmp_path / "ix")
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_retriever(folder, world[0], verify=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("IVF64,Flat", {"efSearch": 9}, "no search parameter 'efSearch'; this index has nprobe, candidates"),
        ("IVF64,Flat", {"nprobe": "9"}, "nprobe is '9'; expected a whole number"),
        ("HNSW16", {"candidates": 0}, "candidates is 0; expected a whole number of at least 1"),
        ("flat16", {"nprobe": 9}, "has no search parameters; leave them out"),
    ],
)
def test_parameters_that_an_index_does_not_have(world, folders, kind, parameters, message):
    with pytest.raises(UserError, match=message):
        load_retriever(folders(kind), world[0], parameters)


def test_gpus_that_are_not_there(world, folders):
    if hasattr(faiss, "StandardGpuResources"):
        pytest.skip("this FAISS knows GPUs")
    for kind in ("IVF64,Flat", "flat16"):
        with pytest.raises(UserError, match="this FAISS sees no GPU"):
            load_retriever(folders(kind), world[0], gpu=True)
    with pytest.raises(UserError, match="has no form for GPUs"):
        load_retriever(folders("HNSW16"), world[0], gpu=True)


@pytest.mark.parametrize("count", [1, 3])
def test_shards_of_a_flat_index_answer_as_one(world, folders, truth, count):
    """The rows are divided as over several GPUs, but on the CPU."""
    file = VectorFile(folders("HNSW16") / "vectors.npy", COUNT, DIM)
    shards = [faiss.IndexFlatIP(DIM) for _ in range(count)]
    search = ApproximateSearch(FlatShards(file, shards), RowScores(file.take), COUNT, 1, 1)
    assert sum(shard.ntotal for shard in shards) == COUNT
    found = search.top(world[1].encode_queries(QUERIES), 7)
    assert found == [[(hit.row, hit.score) for hit in hits] for hits in truth.search(QUERIES, 7)]


def test_more_lists_than_a_gpu_searches_are_refused(world, folders, monkeypatch):
    monkeypatch.setattr(ListCandidates, "most_fetched", 32)
    assert load_retriever(folders("IVF64,Flat"), world[0], {"nprobe": 32}).parameters["nprobe"] == 32
    with pytest.raises(UserError, match="nprobe is 33; a GPU searches at most 32 lists, so set fewer"):
        load_retriever(folders("IVF64,Flat"), world[0], {"nprobe": 33})


def test_a_gpu_is_asked_for_no_more_than_it_can_choose(world, folders, truth, monkeypatch):
    monkeypatch.setattr(FlatShards, "most_fetched", 48)
    file, shard = VectorFile(folders("HNSW16") / "vectors.npy", COUNT, DIM), faiss.IndexFlatIP(DIM)
    search = ApproximateSearch(FlatShards(file, [shard]), RowScores(file.take), COUNT, 1, 4)
    asked = []
    monkeypatch.setattr(
        shard,
        "search",
        lambda query_QD, fetch: (
            asked.append(fetch) or faiss.knn(query_QD, file.take(np.arange(COUNT)), fetch, faiss.METRIC_INNER_PRODUCT)
        ),
    )
    query_QD = world[1].encode_queries(QUERIES)
    assert [len(best) for best in search.top(query_QD, 10)] == [10] * len(QUERIES) and asked == [48]
    with pytest.raises(
        UserError, match="k 11 with 4 candidates for each needs 52 candidates, but a GPU finds at most 48"
    ):
        search.top(query_QD, 11)


def test_a_graph_keeps_links_alone_on_the_disk(folders):
    folder = folders("HNSW16")
    manifest = read_manifest(folder)
    assert manifest.index_bytes == (folder / "index.faiss").stat().st_size < 0.8 * COUNT * 16 * 14
    assert manifest.vectors_bytes == 128 + COUNT * DIM * 4


@pytest.mark.slow
def test_lists_are_the_ones_that_faiss_makes(tmp_path, world, folders):
    """Lists that our code assigns, sizes and fills are byte for byte those of FAISS's own `add`."""
    index = faiss.read_index(str(folders("OPQ4,IVF64,PQ4") / "index.faiss"))
    mine = faiss.serialize_index(index)
    index.reset()
    index.add(world[1].matrix_ND)
    assert np.array_equal(faiss.serialize_index(index), mine)
    assert inner(index).ntotal == COUNT


def test_fewer_candidates_than_hits_are_ordered_and_passed_on(world):
    """A graph may reach fewer than k passages; those that it reaches are returned."""
    index = faiss.IndexHNSWFlat(DIM, 4, faiss.METRIC_INNER_PRODUCT)
    index.add(world[1].matrix_ND[:6])
    query_QD = world[1].encode_queries(["1", "2"])
    search = ApproximateSearch(GraphCandidates(index), None, 6, 1, 1)
    for found in search.top(query_QD, 20):
        assert sorted(row for row, _ in found) == list(range(6))
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    lists = faiss.index_factory(DIM, "IVF2,Flat", faiss.METRIC_INNER_PRODUCT)
    lists.train(world[1].matrix_ND[:100])
    lists.add(world[1].matrix_ND[:3])
    found = ApproximateSearch(ListCandidates(lists), None, 3, 1, 1).top(query_QD, 3)
    assert [sorted(row for row, _ in hits) for hits in found] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(("directions", "dim"), [(3, 5), (192, 768), (40, 3000)])
def test_queries_are_turned_alone_as_in_a_crowd(directions, dim):
    draw = np.random.default_rng(0)
    rotation_PD, query_QD = (draw.standard_normal((count, dim), np.float32) for count in (directions, 21))
    turn = Projection(rotation_PD)
    turned_QP = turn(query_QD)
    wanted_QP = query_QD.astype(np.float64) @ rotation_PD.T.astype(np.float64)
    assert turned_QP.dtype == np.float32 and turned_QP.shape == (21, directions)
    error = np.abs(turned_QP - wanted_QP).max()
    assert error <= 2.0**-24 * np.abs(wanted_QP).max()  # bound: float64, rounded once
    assert (np.concatenate([turn(query_QD[place : place + 1]) for place in range(21)]) == turned_QP).all()
    assert Projection(None)(query_QD) is query_QD


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_structure_of_another_kind_is_refused(folders, kind):
    file = VectorFile(folders("flat") / "vectors.npy", COUNT, DIM)
    for other in KINDS:
        path = folders(other) / "index.faiss"
        if other == kind:
            assert read_structure(path, parse_kind(kind, COUNT, DIM), file).ntotal == COUNT
        else:
            with pytest.raises(UserError, match=r"index\.faiss: (holds|FAISS cannot read it).*build the index again"):
                read_structure(path, parse_kind(kind, COUNT, DIM), file)
