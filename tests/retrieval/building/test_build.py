"""Test killed builds: they resume to the same bytes, refuse other inputs, and leave a complete index or none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import faiss
import index_cases
import pytest
from index_cases import DIM, Clustered, numbered

from thresher.common.errors import UserError
from thresher.common.hashes import read_hashes
from thresher.common.locks import locked_file
from thresher.retrieval.building import build as build_module
from thresher.retrieval.building.build import BuildSettings, build_folder, work_folder
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.indexes import structures
from thresher.retrieval.indexes.kinds import parse_kind
from thresher.retrieval.indexes.manifest import read_manifest

COUNT = 1500
ROOT = Path(__file__).resolve().parents[3]
# The killed processes import the modules that this process imports, and the cases of these tests.
PATH = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))

# Build with small slices, and send SIGKILL to itself, which it cannot catch, at the given call of a stage. The seeds
# are those of the test's process; otherwise the two would build over different vectors.
KILLED = """
import os, signal, sys
import index_cases
from thresher.retrieval.building.build import BuildSettings, build_folder
from thresher.retrieval.indexes.kinds import parse_kind
folder, kind, keep, stage, call = sys.argv[1:]
calls = []
def on_stage(name, done, total):
    calls.append(name)
    if calls.count(stage) == int(call):
        os.kill(os.getpid(), signal.SIGKILL)
if seed := int(os.environ.get("THRESHER_TEST_SEED", "0")):
    import margins
    margins.shift_seeds(seed)
index_cases.make_small()
kind = parse_kind(kind, 1500, index_cases.DIM)
corpus, encoder = index_cases.numbered(1500), index_cases.Clustered(1500)
build_folder(corpus, encoder, folder, BuildSettings(kind=kind, keep=keep), on_stage)
"""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Apply what `make_small` does in the killed processes, and undo it after the test. Use one thread, because with
    more threads a graph of FAISS before 1.15.1 depends on their order."""
    for module, name, value in index_cases.SMALL:
        monkeypatch.setattr(module, name, value)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


def settings(kind: str, keep: str = "float32", **changes) -> BuildSettings:
    return BuildSettings(kind=parse_kind(kind, COUNT, DIM), keep=keep, **changes)


def run(folder: Path, kind: str, keep: str = "float32", **changes) -> list[tuple[str, int]]:
    """Build in this process; return the stages, each with its progress at the first call."""
    seen: list[tuple[str, int]] = []
    build_folder(
        changes.get("corpus", numbered(COUNT)),
        changes.get("encoder", Clustered(COUNT)),
        folder,
        settings(kind, keep, embed=changes.get("embed", "text")),
        lambda stage, done, total: None if stage in dict(seen) else seen.append((stage, done)),
    )
    return seen


def python(script: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, text=True, **options)


def killed(folder: Path, kind: str, keep: str, stage: str, call: int) -> None:
    assert python(KILLED, folder, kind, keep, stage, call).returncode == -signal.SIGKILL
    assert not folder.exists() and work_folder(folder).is_dir()


def content(folder: Path) -> dict[str, bytes]:
    """Check the hashes; return the bytes of each other file, and of the manifest the fields without times."""
    hashes = read_hashes(folder, expected=True)
    assert hashes is not None
    hashes.check_all()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "hashes.json"}
    manifest = read_manifest(folder)
    assert manifest.recall == {} or manifest.recall["queries_per_second"] > 0
    record = str({key: value for key, value in manifest.recall.items() if key != "queries_per_second"})
    named = f"{manifest.factory} {manifest.parameters} {manifest.largest_norm} {manifest.dtype} {record}"
    return {**files, "manifest.json": named.encode()}


@pytest.mark.parametrize(
    ("kind", "keep", "kills", "first"),
    [
        # A kill in every stage, one after the other, on the same folder; then the first stage of the last build.
        ("flat", "float32", [("encoding", 1), ("encoding", 3)], ("encoding", 1000)),
        ("flat16", "float32", [("encoding", 2), ("rounding to float16", 2)], ("rounding to float16", 900)),
        (
            "OPQ4,IVF8,PQ4",
            "float16",
            [("training", 1), ("training", 2), ("assigning to lists", 2), ("filling lists", 3), ("tuning", 1)],
            ("exact answers", 300),
        ),
        ("IVF8,Flat", "none", [("encoding", 7), ("assigning to lists", 3)], ("assigning to lists", 1200)),
        # The last checkpoint of the graph is at 1,200; the fifth slice had been linked, and is linked again.
        ("HNSW8", "float32", [("linking", 3), ("linking", 3)], ("linking", 1500)),
        ("PCA6,HNSW8", "float16", [("linking", 3), ("linking", 3)], ("linking", 1500)),
        ("HNSW8_SQ8", "none", [("linking", 3), ("linking", 3)], ("linking", 1500)),
        ("PCA6,HNSW8_SQ8", "float16", [("linking", 3), ("linking", 3)], ("linking", 1500)),
        ("PCA6,IVF8,Flat", "float32", [("training", 2), ("assigning to lists", 3)], ("assigning to lists", 1200)),
    ],
)
@pytest.mark.fast_cases(2)
def test_killed_and_resumed_to_the_same_bytes(tmp_path, kind, keep, kills, first):
    run(tmp_path / "whole", kind, keep)
    for stage, call in kills:
        killed(tmp_path / "ix", kind, keep, stage, call)
    assert run(tmp_path / "ix", kind, keep)[0] == first
    assert content(tmp_path / "ix") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ix", "whole"]


@pytest.mark.parametrize("when", ["write_index_hashes", "_publish"])
def test_a_kill_between_manifest_and_rename_loses_nothing(tmp_path, monkeypatch, when):
    run(tmp_path / "whole", "flat16")
    build_killed(tmp_path / "ix", monkeypatch, when)
    # The float32 vectors are already deleted, so the resumed build must not read them.
    assert not (work_folder(tmp_path / "ix") / "vectors.npy").exists()
    with pytest.raises(UserError, match="unfinished index over another corpus"):
        run(tmp_path / "ix", "flat16", corpus=Corpus(numbered(COUNT + 1)[1:]))
    assert run(tmp_path / "ix", "flat16") == []
    assert content(tmp_path / "ix") == content(tmp_path / "whole")


@pytest.mark.parametrize("when", ["write_index_hashes", "_publish"])
def test_another_kind_after_such_a_kill(tmp_path, monkeypatch, when):
    run(tmp_path / "whole", "flat")
    build_killed(tmp_path / "ix", monkeypatch, when)
    run(tmp_path / "ix", "flat")
    assert content(tmp_path / "ix") == content(tmp_path / "whole")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def build_killed(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Interrupt a build of flat16 when it calls a function of the module."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_module, when, interrupt)
        run(folder, "flat16")


@pytest.fixture
def begun(tmp_path, monkeypatch) -> Path:
    """Interrupt a build of IVF8,Flat while it fills its lists; return its folder."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(structures, "_fill", interrupt)
        run(tmp_path / "ix", "IVF8,Flat")
    return tmp_path / "ix"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": Corpus(numbered(COUNT + 1)[1:])}, r"unfinished index over another corpus \(\w{12}, now \w{12}\)"),
        ({"encoder": Clustered(COUNT, seed=1)}, "unfinished index over another encoder"),
        ({"embed": "title+text"}, r"another embed \(text, now title\+text\)"),
    ],
)
def test_other_vectors_are_refused_while_a_build_is_unfinished(begun, changes, message):
    before = {path: path.read_bytes() for path in work_folder(begun).iterdir()}
    with pytest.raises(UserError, match=message + ".*finish it with the command that started it, or remove the folder"):
        run(begun, "IVF8,Flat", **changes)
    assert {path: path.read_bytes() for path in work_folder(begun).iterdir()} == before


def test_another_kind_keeps_the_vectors_and_nothing_else(tmp_path, begun):
    assert {"trained.faiss", "lists.npy"} < {path.name for path in work_folder(begun).iterdir()}
    (work_folder(begun) / ".index.faiss.0123abcd.tmp").write_text("a file that a kill left on its way")
    run(tmp_path / "whole", "IVF4,SQfp16")
    assert run(begun, "IVF4,SQfp16")[0] == ("training", 0)
    assert content(begun) == content(tmp_path / "whole")


def test_a_folder_is_built_by_one_process_at_a_time(begun):
    with locked_file(work_folder(begun)), pytest.raises(UserError, match=r"process \d+ is writing to this index"):
        run(begun, "IVF8,Flat")
    assert run(begun, "IVF8,Flat")[0] == ("filling lists", 300)
    with pytest.raises(UserError, match="ix: exists already"):
        run(begun, "IVF8,Flat")


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    free = type("Free", (), {"free": 100_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(UserError, match=r"HNSW8 over 1,500 x 16 needs 2\d\d kB of disk, .* 100 kB are free"):
        run(tmp_path / "ix", "HNSW8")
    assert list(work_folder(tmp_path / "ix").iterdir()) == []


def test_vectors_beyond_float16_are_refused(tmp_path):
    encoder = Clustered(COUNT)
    encoder.matrix_ND[777] *= 1e6
    with pytest.raises(UserError, match=r"beyond float16's 65,504"):
        run(tmp_path / "ix", "flat16", encoder=encoder)


# 12,288 x 512 float32 is 25 MB; the RAM of a tiny build, for the interpreter and its libraries, is subtracted.
MEASURED = r"""
import re, sys
from pathlib import Path
import numpy as np
import index_cases
from thresher.retrieval.building.build import BuildSettings, build_folder
from thresher.retrieval.indexes.kinds import parse_kind
from thresher.retrieval.indexes import structures
from thresher.retrieval.indexes import vector_file as vectors
folder, kind, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
vectors.SLICE_BYTES = 2**19
structures.EF_CONSTRUCTION = 8  # for speed; it is the graph's time, not its size
class Wide(index_cases.Clustered):
    dim = 512
    def __init__(self):
        self.fingerprint = "wide"
    def encode_passages(self, texts):
        draw = np.random.default_rng(int(texts[0]))
        return draw.standard_normal((len(texts), 512)).astype(np.float32)
    def encode_queries(self, texts):
        return self.encode_passages(texts)
settings = BuildSettings(kind=parse_kind(kind, count, 512), recall=.01)
build_folder(index_cases.numbered(count), Wide(), folder, settings, lambda *stage: None)
# Not getrusage: its peak is inherited from the process that started this one.
print(1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


@pytest.fixture(scope="module")
def least(tmp_path_factory) -> int:
    """Return the peak RAM of a tiny build, in bytes."""
    return measured(tmp_path_factory.mktemp("least") / "ix", "IVF4,Flat", 64)


# Shares of the vectors' size, of which the passages take a tenth: flat holds slices, lists and graphs hold the vectors.
# If they grew by doubling, lists would reach 1.5 and graphs 1.65 here.
@pytest.mark.parametrize(("kind", "share"), [("flat", 0.35), ("IVF4,Flat", 1.3), ("HNSW4", 1.45)])
@pytest.mark.fast_cases(1)
def test_ram_while_building_stays_below_its_bound(tmp_path, least, kind, share):
    count = 12_288
    assert measured(tmp_path / "ix", kind, count) - least <= share * count * 512 * 4


def measured(folder: Path, kind: str, count: int) -> int:
    return int(python(MEASURED, folder, kind, count, capture_output=True, check=True).stdout)
