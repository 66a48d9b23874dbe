"""Test damaged indexes: with any bit flipped in any file, a search raises an error that names the file, or returns the
same hits, bit for bit; and test which damage is found without hashes."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np
import pytest
from full_disk import files_of_at_most
from index_cases import DIM, Clustered, numbered

from thresher.common import hashes as hashes_module
from thresher.common.errors import UserError
from thresher.common.hashes import Damaged, read_hashes
from thresher.retrieval.building.build import BuildSettings, build_folder
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.indexes import load as dense_module
from thresher.retrieval.indexes import structures
from thresher.retrieval.indexes.bm25 import build_bm25
from thresher.retrieval.indexes.hybrid import build_hybrid
from thresher.retrieval.indexes.kinds import parse_kind
from thresher.retrieval.indexes.load import load_retriever
from thresher.retrieval.indexes.structures import _bounded_reading, _in_range, behind
from thresher.retrieval.indexes.vector_file import VectorFile
from thresher.retrieval.passages import Passage

COUNT = 600
KINDS = {
    "flat": "flat",
    "flat16": "flat16",
    "hnsw": "HNSW8",
    "sq8": "HNSW8_SQ8",
    "ivf": "IVF8,Flat",
    "pq": "OPQ4,IVF8,PQ4",
}
EVERY = (*KINDS, "bm25", "hybrid")
QUERIES = [str(number) for number in range(0, COUNT, 40)]


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[Corpus, Clustered]]:
    made = numbered(COUNT), Clustered(COUNT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dense_module.LOADERS, Clustered.name, lambda folder: made[1])
        patch.setattr(hashes_module, "BLOCK", 1000)
        yield made


@pytest.fixture(scope="module")
def built(tmp_path_factory, world) -> Path:
    """Build a folder of each kind; flat and bm25 are the members of the hybrid."""
    root = tmp_path_factory.mktemp("built")
    for name, kind in KINDS.items():
        settings = BuildSettings(kind=parse_kind(kind, COUNT, DIM), recall=0.5)
        build_folder(*world, root / name, settings, lambda *stage: None)
    build_bm25(world[0], root / "bm25")
    load = lambda folder, corpus: load_retriever(folder, corpus or world[0])  # noqa: E731
    build_hybrid([root / "flat", root / "bm25"], root / "hybrid", load)
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """Return a copy of the folders for a test to damage."""
    return shutil.copytree(built, tmp_path / "indexes")


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", EVERY)
def test_every_flip_ends_in_a_sentence_or_changes_nothing(world, built, root, name) -> None:
    expected = load_retriever(built / name, world[0]).search(QUERIES, 5)
    draw = np.random.default_rng(sum(map(ord, name)))
    found = 0
    for path in files_of(root / name):
        whole = path.read_bytes()
        for bit in [*draw.integers(8 * len(whole), size=6).tolist(), 8 * len(whole) - 1]:
            flip(path, bit)
            try:
                assert load_retriever(root / name, world[0]).search(QUERIES, 5) == expected, (path, bit)
            except UserError as error:
                assert f"{path}: " in str(error), (path, bit, error)
                found += 1
            path.write_bytes(whole)
        for data in (whole + b"x", whole[:-2], b""):
            path.write_bytes(data)
            with pytest.raises(UserError) as caught:
                load_retriever(root / name, world[0]).search(QUERIES, 5)
            assert f"{path}: " in str(caught.value)
        path.write_bytes(whole)
    assert found >= 6 * (len(files_of(root / name)) - 1)


@pytest.mark.parametrize("name", ["flat", "ivf", "hnsw", "bm25"])
def test_files_of_another_index_of_the_same_kind_are_refused(world, root, name) -> None:
    """The other index has other vectors or texts of the same shape, which lengths and headers do not show."""
    other = numbered(COUNT)[:], Clustered(COUNT, seed=1)
    if name == "bm25":
        build_bm25(Corpus(other[0][::-1]), root / "other")
    else:
        settings = BuildSettings(kind=parse_kind(KINDS[name], COUNT, DIM), recall=0.5)
        build_folder(world[0], other[1], root / "other", settings, print)
    swapped = 0
    for path in files_of(root / name):
        theirs = root / "other" / path.relative_to(root / name)
        whole = path.read_bytes()
        if theirs.read_bytes() == whole:
            continue
        shutil.copy(theirs, path)
        with pytest.raises(UserError) as caught:
            load_retriever(root / name, world[0]).search(QUERIES, 5)
        assert str(root / name) in str(caught.value)
        path.write_bytes(whole)
        swapped += 1
    assert swapped >= 3


def test_a_list_that_was_written_and_is_gone_is_missed(world, root) -> None:
    for name in EVERY:
        (root / name / "hashes.json").unlink()
        with pytest.raises(Damaged, match=r"hashes\.json: no such file, though one was written with the folder"):
            load_retriever(root / name, world[0])
        load_retriever(root / name, world[0], verify=False)


@pytest.mark.parametrize("name", ["flat", "flat16", "ivf", "hnsw", "sq8"])
def test_off_is_a_choice(world, built, root, name) -> None:
    """A flipped bit of a vector is refused; without verification the vector is used as it is."""
    path = root / name / ("vectors16.npy" if name == "flat16" else "vectors.npy")
    row, width = 17, 2 if name == "flat16" else 4
    flip(path, 8 * (128 + width * DIM * row) + 8 * width - 2)  # the highest bit of an exponent
    query = [str(row)]
    with pytest.raises(Damaged, match=path.name):
        load_retriever(root / name, world[0]).search(query, COUNT)
    hits, expected = (load_retriever(at / name, world[0], verify=False).search(query, COUNT)[0] for at in (root, built))
    assert [(hit.row, hit.score) for hit in hits] != [(hit.row, hit.score) for hit in expected]


def test_kept_vectors_are_verified_where_they_are_read(world, root) -> None:
    """A search that reads the damaged block fails; one whose candidates are in other blocks does not."""
    index = load_retriever(root / "ivf", world[0], {"nprobe": 1})
    near = {query: {hit.row for hit in index.search([query], 30)[0]} for query in QUERIES}
    path = root / "ivf" / "vectors.npy"
    row = max(set().union(*near.values()))
    flip(path, 8 * (128 + 4 * DIM * row))
    block = lambda row: {(128 + 4 * DIM * row) // 1000, (128 + 4 * DIM * row + 4 * DIM - 1) // 1000}  # noqa: E731
    index = load_retriever(root / "ivf", world[0], {"nprobe": 1})
    (bad,) = {(128 + 4 * DIM * row) // 1000}
    refused = 0
    for query, rows in near.items():
        if any(bad in block(each) for each in rows):
            with pytest.raises(Damaged, match=r"vectors\.npy: damaged or changed, its bytes"):
                index.search([query], 30)
            refused += 1
        elif refused == 0:
            index.search([query], 30)
    assert refused


def test_several_threads_read_rows_of_one_file(world, root) -> None:
    hashes = read_hashes(root / "ivf")
    assert hashes is not None
    file = VectorFile(root / "ivf/vectors.npy", COUNT, DIM, blocks=hashes.blocks("vectors.npy"))
    wrong: list[int] = []

    def read(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(40):
            rows = draw.integers(COUNT, size=int(draw.integers(1, 400)))
            wrong.extend(rows[(file.take(rows) != world[1].matrix_ND[rows]).any(axis=1)])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# without hashes


def unhashed(folder: Path) -> Path:
    """Change a folder to the form that an earlier version wrote, without hashes."""
    (folder / "hashes.json").unlink()
    record = json.loads((folder / "manifest.json").read_text())
    del record["hashed"]
    (folder / "manifest.json").write_text(json.dumps(record))
    return folder


def test_a_folder_of_an_earlier_version_is_read(world, built, root) -> None:
    for name in (*KINDS, "bm25"):
        old = load_retriever(unhashed(root / name), world[0])
        assert old.search(QUERIES, 5) == load_retriever(built / name, world[0]).search(QUERIES, 5)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("indices", 5, COUNT),
        ("indices", 7, -1),
        ("indices", 0, 2**30),
        ("indptr", 3, 10**6),
        ("indptr", 0, 1),
        ("indptr", -1, 5),
    ],
)
def test_bm25_arrays_out_of_range(world, root, name: str, place: int, value: int) -> None:
    folder = unhashed(root / "bm25")
    array = np.load(folder / f"scores/{name}.csc.index.npy", mmap_mode="r+")
    array[place] = value
    array.flush()
    with pytest.raises(UserError, match="scores: damaged, its arrays do not fit each other"):
        load_retriever(folder, world[0])


def test_a_length_that_asks_for_too_much_memory(world, root) -> None:
    """A file of a megabyte names 2^38 levels; FAISS would allocate memory for them before it reads on."""
    for name in ("hnsw", "ivf"):
        path = unhashed(root / name) / "index.faiss"
        data, refused = path.read_bytes(), 0
        for place in range(min(len(data), 400) - 8):
            if 8 <= int.from_bytes(data[place : place + 8], "little") <= COUNT * 8:
                path.write_bytes(data[:place] + (2**38).to_bytes(8, "little") + data[place + 8 :])
                try:
                    load_retriever(root / name, world[0])
                except UserError as error:
                    assert f"{path}: " in str(error)
                    refused += 1
        assert refused
        path.write_bytes(data)
        before = faiss.get_deserialization_vector_byte_limit()
        with _bounded_reading(path):
            assert faiss.get_deserialization_vector_byte_limit() == len(data)
        assert faiss.get_deserialization_vector_byte_limit() == before


@pytest.mark.parametrize(
    ("array", "place", "value"), [("neighbors", 3, COUNT), ("neighbors", 0, -2), ("levels", 9, 99)]
)
def test_links_that_point_beside_the_vectors(world, root, array: str, place: int, value: int) -> None:
    path = unhashed(root / "sq8") / "index.faiss"
    index = faiss.read_index(str(path))
    assert _in_range(index)
    vector = getattr(behind(index).hnsw, array)
    faiss.rev_swig_ptr(vector.data(), vector.size())[place] = value
    assert not _in_range(index)
    faiss.write_index(index, str(path))
    with pytest.raises(UserError, match=r"index\.faiss: (damaged, its numbers are outside|FAISS cannot read it)"):
        load_retriever(root / "sq8", world[0])


def test_rows_in_lists_that_are_none(world, root) -> None:
    path = unhashed(root / "ivf") / "index.faiss"
    index = faiss.read_index(str(path))
    lists = faiss.downcast_InvertedLists(index.invlists)
    number = int(np.argmax([lists.list_size(number) for number in range(index.nlist)]))
    faiss.rev_swig_ptr(lists.get_ids(number), lists.list_size(number))[1] = COUNT
    faiss.write_index(index, str(path))
    with pytest.raises(UserError, match=r"index\.faiss: damaged, its numbers are outside its 600 vectors"):
        load_retriever(root / "ivf", world[0])


# full disks: a library that writes an index leaves no file if there is no room for the last byte of one


REPEATED = Corpus([Passage(str(n), "T", f"w{n % 2} w{n % 3} w{n % 5}") for n in range(400)])


def graph(path: Path) -> None:
    path.mkdir()
    index = faiss.index_factory(8, "HNSW4")
    index.add(np.random.default_rng(0).standard_normal((40, 8), np.float32))
    structures.write(index, path / "faiss.index")


@pytest.mark.parametrize("build", [lambda path: build_bm25(REPEATED, path), graph], ids=["BM25", "a graph"])
def test_the_last_byte_of_a_file_is_missed(build: Callable[[Path], object], tmp_path: Path) -> None:
    build(tmp_path / "whole")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    for name, size in sizes.items():
        out = tmp_path / f"without-{name}"
        with pytest.raises((OSError, UserError), match=str(out)), files_of_at_most(size - 1):
            build(out)
        assert not [path for path in out.rglob("*") if path.is_file()]
