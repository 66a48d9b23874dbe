"""Test the kinds of index: parsing of their names, their estimated sizes, and the choice for a memory size."""

import pytest

from thresher.common.errors import UserError
from thresher.common.files import show_bytes
from thresher.retrieval.indexes.kinds import (
    choose_kind,
    default_lists,
    estimate,
    parse_kind,
    parse_memory,
)

WIKI = (21_015_324, 768)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("flat", "flat"),
        ("Flat", "flat"),
        ("flat16", "flat16"),
        ("SQfp16", "flat16"),
        ("IVF100,Flat", "IVF100,Flat"),
        ("ivf100,sqfp16", "IVF100,SQfp16"),
        ("IVF,Flat", "IVF4096,Flat"),
        ("IVF16,PQ48", "IVF16,PQ48"),
        ("OPQ96,IVF4096,PQ96", "OPQ96,IVF4096,PQ96"),
        ("HNSW", "HNSW32"),
        ("HNSW16", "HNSW16"),
        ("HNSW16_Flat", "HNSW16"),
        ("hnsw_sq8", "HNSW32_SQ8"),
        ("HNSW_sqfp16", "HNSW32_SQfp16"),
        ("ivf100,sq8", "IVF100,SQ8"),
        ("ivf", "IVF4096,Flat"),
        ("ivfpq", "OPQ96,IVF4096,PQ96"),
        ("hnsw", "HNSW32"),
        ("pca192,hnsw", "PCA192,HNSW32"),
        ("PCA192,hnsw_sq8", "PCA192,HNSW32_SQ8"),
        ("PCA64,IVF,SQfp16", "PCA64,IVF4096,SQfp16"),
    ],
)
def test_a_kind_is_read_and_its_own_name_reads_the_same(text, name):
    kind = parse_kind(text, 10**6, 768)
    assert kind.name == name and parse_kind(name, 10**6, 768) == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one of flat, flat16"),
        ("IVF4096", "expected one of flat"),
        ("LSH", "expected one of flat"),
        ("BM25", "no vectors; build it with --encoder bm25"),
        ("IVF1001,Flat", "1001 lists for 1000 passages; IVF16 would be usual"),
        ("IVF0,Flat", "0 lists"),
        ("IVF16,PQ50", "50 does not divide 768 dimensions; these work well: 192, 128, 96, 64, 48, 32, 24"),
        ("IVF16,PQ0", "0 does not divide"),
        ("OPQ32,IVF16,PQ64", "the same number in OPQ and PQ"),
        ("OPQ32,IVF16,Flat", "OPQ goes with PQ only"),
        ("HNSW2", "expected 4 to 128"),
        ("PCA768,HNSW32", "768 directions of 768 dimensions; expected 1 to 767"),
        ("PCA0,HNSW32", "0 directions"),
        ("HNSW32_PQ8", "expected one of flat"),
        ("PCA64,flat", "PCA can precede only graphs and lists of scalars"),
        ("PCA64,IVF16,PQ48", "PCA can precede only"),
        ("PCA64,PCA32,HNSW32", "PCA can precede only"),
        ("PCA64,LSH", "expected one of flat"),
    ],
)
def test_a_kind_that_does_not_fit_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_kind(text, 1000, 768)


def test_pq_needs_vectors_to_be_trained_on():
    lists = {1: 1, 50: 1, 5000: 128, 50_271: 1024, 10**6: 4096, 21_015_324: 16_384}
    assert {passages: default_lists(passages) for passages in lists} == lists
    with pytest.raises(UserError, match="at least 256 vectors, but there are 255 passages"):
        parse_kind("IVF4,PQ4", 255, 16)
    assert parse_kind("IVF4,PQ4", 256, 16).pq == 4


def test_sizes_of_the_case_everyone_has():
    flat = estimate("flat", *WIKI)
    assert flat.disk_bytes == 21_015_324 * 768 * 4 == 64_559_075_328
    assert estimate("flat16", *WIKI).disk_bytes * 2 == flat.disk_bytes
    # A streamed build holds slices, so its RAM does not depend on the corpus.
    assert flat.build_ram_bytes == estimate("flat", 1000, 768).build_ram_bytes < 600e6
    graph = estimate("HNSW32", *WIKI)
    assert graph.disk_bytes == flat.disk_bytes + 21_015_324 * (4 * 66 + 12) and graph.gpu_bytes == 0
    seen = estimate("PCA192,HNSW32", *WIKI)
    assert seen.ram_bytes == 21_015_324 * (4 * 192 + 4 * 66 + 12) + 200_000_000
    assert seen.disk_bytes == flat.disk_bytes + 21_015_324 * (4 * 192 + 4 * 66 + 12)
    # For a small set, finding the PCA directions takes more memory than the graph.
    assert estimate("PCA8,HNSW4", 65_536, 768).build_ram_bytes == 65_536 * 3072 + 2 * 64 * 2**20 + 200_000_000
    # One byte per coordinate, or two in fp16, for the graph's own vectors next to the kept ones.
    for kind, width in (("HNSW32_SQ8", 768), ("PCA192,HNSW32_SQ8", 192), ("HNSW32_SQfp16", 2 * 768)):
        coded = estimate(kind, *WIKI)
        assert coded.ram_bytes == 21_015_324 * (width + 4 * 66 + 12) + 200_000_000
        assert coded.disk_bytes == flat.disk_bytes + coded.ram_bytes - 200_000_000 and coded.gpu_bytes == 0
    codes = estimate("OPQ96,IVF16384,PQ96", *WIKI)
    centroids = 16_384 * 768 * 4
    assert codes.ram_bytes == 21_015_324 * (96 + 8) + centroids + 200_000_000
    assert codes.disk_bytes == flat.disk_bytes + 21_015_324 * 104 + centroids
    # Training on 819,200 vectors takes three copies of them, more than filling does.
    assert codes.build_ram_bytes == 3 * 819_200 * 768 * 4 + 2 * 64 * 2**20 + 200_000_000


def test_a_million_vectors_are_built_in_less_than_their_own_size_and_a_fifth():
    own = 10**6 * 768 * 4
    graphs = ("hnsw", "HNSW32_SQ8", "HNSW32_SQfp16", "PCA192,HNSW32", "PCA192,HNSW32_SQ8")
    for kind in ("flat", "flat16", "ivf", "IVF4096,SQfp16", "IVF4096,SQ8", "ivfpq", "PCA192,IVF,Flat", *graphs):
        assert estimate(kind, 10**6, 768).build_ram_bytes <= 1.2 * own, kind


@pytest.mark.parametrize(
    ("passages", "dim", "memory", "kind"),
    [
        (5_000, 384, "1GB", "flat"),
        (200_000, 768, "2GB", "flat"),
        (200_001, 768, "2GB", "HNSW32_SQ8"),
        (10**6, 768, "16GB", "HNSW32_SQ8"),
        (10**6, 768, "1.2GB", "IVF4096,SQ8"),
        (*WIKI, "128GB", "HNSW32_SQ8"),
        (*WIKI, "64GB", "HNSW32_SQ8"),
        (*WIKI, "20GB", "IVF16384,SQ8"),
        (*WIKI, "16GB", "OPQ192,IVF16384,PQ192"),
        (*WIKI, "8GB", "OPQ192,IVF16384,PQ192"),
    ],
)
def test_what_a_memory_picks(passages, dim, memory, kind):
    picked, reason = choose_kind(passages, dim, parse_memory(memory))
    assert picked == kind
    assert f"{passages:,} x {dim}" in reason and show_bytes(parse_memory(memory)) in reason
    needed = estimate(kind, passages, dim)
    most = max(needed.ram_bytes, needed.build_ram_bytes)
    assert most <= parse_memory(memory) and show_bytes(most) in reason


def test_the_reason_is_a_sentence():
    assert choose_kind(*WIKI, 20 * 10**9)[1] == (
        "21,015,324 x 768 and 20.0 GB of memory: IVF16384,SQ8 needs 16.8 GB and is the most precise that fits; "
        "HNSW32_SQ8 would need 22.3 GB"
    )
    with pytest.raises(UserError, match=r"not enough for any index, the smallest being .* with 7\.9 GB; give more"):
        choose_kind(*WIKI, 2 * 10**9)
    assert choose_kind(400, 2048, 4 * 10**9)[1] == "400 x 2048 and 4.0 GB of memory: flat needs 334 MB and is exact"
    assert choose_kind(10**6, 768, 16 * 10**9)[1] == (
        "1,000,000 x 768 and 16.0 GB of memory: HNSW32_SQ8 needs 1.4 GB and is the fastest over all dimensions"
    )
    passed_over = choose_kind(200_000, 768, 600 * 10**6)[1]
    assert passed_over.endswith("HNSW32_SQ8 needs 543 MB and is the most precise that fits; flat would need 814 MB")


def test_sizes_are_read_or_refused():
    sizes = {"16GB": 16 * 10**9, "16 gb": 16 * 10**9, "1.5G": 1_500_000_000, "512MiB": 2**29, "7": 7, "2T": 2e12}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "0", "16 bits", "1e9", "nan"):
        with pytest.raises(UserError, match="expected a size such as 16GB"):
            parse_memory(text)
