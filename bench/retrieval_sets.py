"""The vectors of `thresher bench retrieval`, in files that are kept, and the indexes built over them.

Each set has a folder, so that a second run repeats nothing, and a run may be killed at any time. Real passages are
drawn from the corpus with a fixed seed, so that a set of any size is a fair sample of it.

    synthetic-1000000x768/    vectors.npy, questions.npy, and a folder for each kind of index built over them
    real-10000x384/           vectors.npy and the folders; source.json names corpus and encoder

Axes: N passages, Q questions, B rows of a chunk, D dimension, R ranks.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object
from thresher.retrieval.corpus import open_corpus
from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.exact import Rows
from thresher.retrieval.indexes.faiss_library import faiss
from thresher.retrieval.indexes.kinds import INDEX_FILE, Kind, parse_kind
from thresher.retrieval.indexes.structures import SCRATCH, grow, read_structure
from thresher.retrieval.indexes.vector_file import VectorFile, sample_rows
from thresher.retrieval.questions import read_queries

QUESTIONS = 512
# Rows made between two checks of the clock, and synthetic rows between two writes.
ENCODED, WRITTEN = 256, 16_384
SOURCE_FILE, VECTORS_FILE, QUESTIONS_FILE = "source.json", "vectors.npy", "questions.npy"
RECORD, BEGUN = "built.json", "begun"
SEED = 0
CHUNK = 4096
RANKS = (1, 5, 10, 100)
PERCENTILES = (10, 50, 90)


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """The constants of synthetic vectors.

    words, shares: of the vocabularies, coarse to fine (shares of a vector's variance; the rest is individual). tied:
    probability that a fine word determines its coarse ones. zipf: exponent of their frequencies. mean: squared length
    of m. scale: deviation of the logarithm of a passage's own scale. loose: factor by which a question's noise is
    stronger. knee, power, end: of the spectrum (1 + i / knee)^-power exp(-(i / end)^2).
    """

    words: tuple[int, ...] = (35, 250, 4100)
    shares: tuple[float, ...] = (0.17, 0.09, 0.27)
    tied: float = 0.48
    zipf: float = 0.72
    mean: float = 0.027
    scale: float = 0.36
    loose: float = 1.22
    knee: float = 5.0
    power: float = 0.83
    end: float = 270.0

    def deviations(self, dim: int) -> Vectors:
        """Return the deviation of every coordinate of a word or noise, float32 [D]; their squares add up to 1."""
        place_D = np.arange(dim)
        variance_D = (1 + place_D / self.knee) ** -self.power * np.exp(-((place_D / self.end) ** 2))
        deviation_D: Vectors = np.sqrt(variance_D / variance_D.sum()).astype(np.float32)
        return deviation_D


class SyntheticVectors:
    """Passages and questions of `dim` dimensions with the neighbour distances of real ones.

    Independent random vectors are all equally far from each other, which no list or graph can exploit. Here a vector is
    a sum of shared parts and an individual part,

        passage     unit(m + word_1 + word_2 + word_3 + scale noise)
        question    unit(m + the words of a passage + loose scale' noise')

    with one word from each of three vocabularies, coarse to fine, some words far more frequent than others
    (Zipf-Mandelbrot). A fine word determines its coarse ones with the probability `tied`, else they are drawn freely,
    so that clusters nest and overlap and have all sizes. Words and noise are Gaussian with one falling spectrum; m is
    the mean that all embeddings of a model share; `scale` (log-normal) makes some passages outliers.

    The constants were fitted to all-MiniLM-L6-v2's vectors of 28,678 Wikipedia passages and HotpotQA's questions: to
    the similarities of neighbours, and to the recall of lists by their number. docs/retrieval.md has the comparison.
    Passage i is the same whatever else is drawn.
    """

    def __init__(self, dim: int, law: Law | None = None, seed: int = 0) -> None:
        self.dim, self.law, self.seed = dim, law or Law(), seed
        draw = np.random.default_rng([seed, 0])
        self._deviation_D = self.law.deviations(dim)
        self._mean_D = draw.standard_normal(dim, np.float32)
        self._mean_D *= np.sqrt(self.law.mean) / np.linalg.norm(self._mean_D)
        self._words = [
            draw.standard_normal((count, dim), np.float32) * (self._deviation_D * np.float32(np.sqrt(share)))
            for count, share in zip(self.law.words, self.law.shares, strict=True)
        ]
        self._own = float(np.sqrt(1 - sum(self.law.shares)))
        # Mandelbrot's shift limits the frequency of the first words.
        frequencies = [(np.arange(count) + 1 + count**0.3) ** -self.law.zipf for count in self.law.words]
        self._until = [np.cumsum(each / each.sum()) for each in frequencies]
        self._tied = [self._drawn(until_V, self.law.words[-1], draw) for until_V in self._until[:-1]]

    def passages(self, rows: int) -> Iterator[Vectors]:
        """Yield the first `rows` passages in chunks, float32 [B, D] of norm 1."""
        for start in range(0, rows, CHUNK):
            common_BD, noise_BD = self._chunk(start // CHUNK)
            yield _unit(common_BD + noise_BD)[: rows - start]

    def questions(self, count: int, rows: int) -> tuple[Vectors, Rows]:
        """Return `count` questions about the first `rows` passages, float32 [Q, D] of norm 1, and their rows [Q]."""
        draw = np.random.default_rng([self.seed, 2, rows])
        gold_Q = np.sort(draw.integers(rows, size=count))
        question_QD = np.empty((count, self.dim), np.float32)
        for chunk in np.unique(gold_Q // CHUNK):
            here = np.flatnonzero(gold_Q // CHUNK == chunk)
            common_BD, _ = self._chunk(int(chunk))
            other = np.float32(self.law.loose) * self._noise(len(here), draw)
            question_QD[here] = _unit(common_BD[gold_Q[here] % CHUNK] + other)
        order = draw.permutation(count)
        return question_QD[order], gold_Q[order]

    def _chunk(self, chunk: int) -> tuple[Vectors, Vectors]:
        """Return the shared part of a chunk's passages, and their own noise, [B, D] each."""
        draw = np.random.default_rng([self.seed, 1, chunk])
        common_BD = np.repeat(self._mean_D[None], CHUNK, axis=0)
        finest_B = self._drawn(self._until[-1], CHUNK, draw)
        common_BD += self._words[-1][finest_B]
        for word_VD, until_V, tied_V in zip(self._words, self._until, self._tied, strict=False):
            free_B = self._drawn(until_V, CHUNK, draw)
            common_BD += word_VD[np.where(draw.random(CHUNK) < self.law.tied, tied_V[finest_B], free_B)]
        return common_BD, self._noise(CHUNK, draw)

    def _drawn(self, until_V: npt.NDArray[np.float64], count: int, draw: np.random.Generator) -> Rows:
        """Draw `count` words of a vocabulary, by frequency."""
        word_B: Rows = np.minimum(np.searchsorted(until_V, draw.random(count)), len(until_V) - 1)
        return word_B

    def _noise(self, count: int, draw: np.random.Generator) -> Vectors:
        noise_BD = draw.standard_normal((count, self.dim), np.float32) * self._deviation_D
        # With this mean of the logarithm, the mean of scale^2 is 1.
        scale_B1 = np.exp(self.law.scale * draw.standard_normal((count, 1), np.float32) - self.law.scale**2)
        noise_BD *= np.float32(self._own) * scale_B1
        return noise_BD


def neighbours(query_QD: Vectors, vectors_ND: Vectors, ranks: Sequence[int] = RANKS) -> npt.NDArray[np.float64]:
    """Return the 10th, 50th and 90th percentile over the queries of the similarity at each rank, [R, 3]."""
    score_QF, _ = faiss.knn(query_QD, vectors_ND, max(ranks), metric=faiss.METRIC_INNER_PRODUCT)
    found: npt.NDArray[np.float64] = np.percentile(score_QF[:, np.array(ranks) - 1], PERCENTILES, axis=0).T
    return found


def _unit(rows_BD: Vectors) -> Vectors:
    rows_BD /= np.linalg.norm(rows_BD, axis=1, keepdims=True)
    return rows_BD


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorSet:
    """Vectors in a file, questions [Q, D] about them, and the folder for indexes built over them. made: synthetic or
    real."""

    made: str
    vectors: VectorFile
    question_QD: Vectors
    folder: Path

    @property
    def shape(self) -> dict[str, int | str]:
        return {
            "vectors": self.made,
            "passages": self.vectors.rows,
            "dim": self.vectors.dim,
            "questions": len(self.question_QD),
        }

    def near(self) -> npt.NDArray[np.float64]:
        """Return `neighbours` of up to 128 questions."""
        return neighbours(self.question_QD[:128], self.vectors.open())


@dataclass(frozen=True, kw_only=True, slots=True)
class PassageSource:
    """A real set to make: `passages` of the file `corpus`, encoded with the model in the folder `encoder`. questions: a
    file of queries; without one, runs of words from passages are used."""

    corpus: str
    encoder: str
    passages: int
    questions: str | None = None


def synthetic_set(rows: int, dim: int, folder: Path, deadline: float) -> VectorSet | None:
    """Make `rows` x `dim` synthetic vectors under `folder`; None if the clock (`time.monotonic`) passes `deadline`."""
    world = SyntheticVectors(dim)
    own = folder / f"synthetic-{rows}x{dim}"
    own.mkdir(parents=True, exist_ok=True)
    vectors = VectorFile(own / VECTORS_FILE, rows, dim)
    if vectors.done() < rows:
        vectors.remove()
        chunks = world.passages(rows)
        while parts := list(islice(chunks, WRITTEN // CHUNK)):  # each write waits for the disk
            if time.monotonic() >= deadline:
                return None
            vectors.append(np.concatenate(parts))
    asked = VectorFile(own / QUESTIONS_FILE, QUESTIONS, dim)
    if asked.done() < QUESTIONS:
        asked.remove()
        asked.append(world.questions(QUESTIONS, rows)[0])
    return VectorSet(made="synthetic", vectors=vectors, question_QD=np.array(asked.open()), folder=own)


def real_set(source: PassageSource, folder: Path, deadline: float) -> VectorSet | None:
    """Encode the passages of `source`; None if the clock passes `deadline` before (another run continues it). UserError
    from the corpus, the encoder and the questions, and for a set that was started with other ones."""
    from thresher.retrieval.building.build import sample_queries
    from thresher.retrieval.encoders.learned import load_encoder

    encoder = load_encoder(source.encoder)
    corpus = open_corpus(source.corpus, folder / "corpus")
    rows = min(source.passages, len(corpus))
    own = folder / f"real-{rows}x{encoder.dim}"
    own.mkdir(parents=True, exist_ok=True)
    _check_source(own, {"corpus": corpus.sha256, "encoder": encoder.fingerprint})
    vectors = VectorFile(own / VECTORS_FILE, rows, encoder.dim)
    chosen = np.random.default_rng(SEED).permutation(sample_rows(len(corpus), rows, SEED))
    for start in range(vectors.done(), rows, ENCODED):
        if time.monotonic() >= deadline:
            return None
        texts = [corpus[row].text for row in chosen[start : start + ENCODED].tolist()]
        vectors.append(encoder.encode_passages(texts))
    if source.questions is None:
        question_QD = sample_queries(corpus, encoder, "text", vectors)
    else:
        asked = [query.question for query in read_queries(source.questions)][:QUESTIONS]
        question_QD = encoder.encode_queries(asked)
    return VectorSet(made="real", vectors=vectors, question_QD=question_QD, folder=own)


def synthetic_near(real: VectorSet) -> npt.NDArray[np.float64]:
    """Return `near` of synthetic vectors of the same number and dimension."""
    world = SyntheticVectors(real.vectors.dim)
    vectors_ND = np.concatenate(list(world.passages(real.vectors.rows)))
    return neighbours(world.questions(128, real.vectors.rows)[0], vectors_ND)


def _check_source(folder: Path, wanted: dict[str, str]) -> None:
    path = folder / SOURCE_FILE
    if not path.is_file():
        atomic_write_text(path, json.dumps(wanted) + "\n")
        return
    begun = read_json_object(path)
    for name, value in wanted.items():
        if begun.get(name) != value:
            raise UserError(f"{folder}: holds vectors of another {name}; give another --work, or remove the folder")


# An index of bare vectors is built in a separate process, by the code of `thresher index build` between encoding and
# tuning. Its memory is VmHWM: the peak resident memory, including the mapped part of the vectors' file. An existing
# index is not rebuilt; an interrupted build is continued, and its figures say so.


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A structure on disk. It has seconds and bytes of memory of the process that finished it, bytes of the file, and
    whether it continued an interrupted build."""

    folder: Path
    seconds: float
    peak_bytes: int
    disk_bytes: int
    resumed: bool

    def read(self, kind: Kind, vectors: VectorFile) -> Any:
        """Read FAISS's index; a graph gets its vectors."""
        return read_structure(self.folder / INDEX_FILE, kind, vectors)


def built(kind: Kind, vectors: VectorFile, folder: Path, seconds: float) -> Built | None:
    """Build the structure of `kind` over `vectors` in `folder`, unless it exists; None if `seconds` did not suffice.
    RuntimeError, with its last line, if the process fails."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RECORD).is_file():
        arguments = [str(vectors.path), str(vectors.rows), str(vectors.dim), kind.name, str(folder)]
        command = [sys.executable, "-P", "-m", "thresher.bench.retrieval_sets", *arguments]
        try:
            subprocess.run(command, timeout=seconds, check=True, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            return None
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
            raise RuntimeError(f"{kind.name} over {vectors.rows} vectors was not built: {lines[-1]}") from None
    record = json.loads((folder / RECORD).read_text("utf-8"))
    return Built(folder=folder, disk_bytes=(folder / INDEX_FILE).stat().st_size, **record)


def _build(path: Path, rows: int, dim: int, name: str, folder: Path) -> None:
    resumed = (folder / BEGUN).exists()
    (folder / BEGUN).touch()
    started = time.perf_counter()
    grow(parse_kind(name, rows, dim), VectorFile(path, rows, dim), folder, lambda what, done, of: None)
    figures = {"seconds": time.perf_counter() - started, "peak_bytes": _peak_bytes(), "resumed": resumed}
    for scratch in SCRATCH:
        (folder / scratch).unlink(missing_ok=True)
    (folder / RECORD).write_text(json.dumps(figures) + "\n", "utf-8")


def _peak_bytes() -> int:
    """Return VmHWM of this process; unlike `ru_maxrss`, it does not include the parent's memory."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    _build(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
