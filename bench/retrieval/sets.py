"""The vectors of `thresher bench retrieval`, in files that stay: synthetic ones, and real passages, encoded.

A folder for each set, so that a second run makes nothing twice and may be killed at any time:

    synthetic-1000000x768/    vectors.npy, questions.npy, and a folder for each kind that was built over them
    real-10000x384/           vectors.npy and the folders; source.json says of which corpus and encoder

Real passages are drawn from the corpus by a fixed seed, so that a set of any size is a fair sample of it.

Deliberately absent: the whole of a corpus. Encoding takes longer than all else; `thresher index build` does that.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thresher.bench.retrieval.vectors import SyntheticVectors, neighbours
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object
from thresher.retrieval.corpus import open_corpus
from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.vector_file import VectorFile, sample_rows
from thresher.retrieval.questions import read_queries

QUESTIONS = 512
# Rows that are made between two looks at the clock, and synthetic ones between two writes.
ENCODED, WRITTEN = 256, 16_384
SOURCE_FILE, VECTORS_FILE, QUESTIONS_FILE = "source.json", "vectors.npy", "questions.npy"
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorSet:
    """Vectors in a file, questions [Q, D] about them, and the folder for what is built over them. `made` is synthetic
    or real."""

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
        """How far the questions' neighbours are: `neighbours` of up to 128 of them."""
        return neighbours(self.question_QD[:128], self.vectors.open())


@dataclass(frozen=True, kw_only=True, slots=True)
class PassageSource:
    """A real set to be made: `passages` of the file `corpus`, under the model in the folder `encoder`. `questions`, a
    file, are asked; without one, runs of words out of passages."""

    corpus: str
    encoder: str
    passages: int
    questions: str | None = None


def synthetic_set(rows: int, dim: int, folder: Path, deadline: float) -> VectorSet | None:
    """`rows` x `dim` synthetic vectors under `folder`; None where the clock (`time.monotonic`) passes `deadline`."""
    world = SyntheticVectors(dim)
    own = folder / f"synthetic-{rows}x{dim}"
    own.mkdir(parents=True, exist_ok=True)
    vectors = VectorFile(own / VECTORS_FILE, rows, dim)
    if vectors.done() < rows:
        vectors.remove()
        for part_ND in _joined(world.passages(rows)):
            if time.monotonic() >= deadline:
                return None
            vectors.append(part_ND)
    asked = VectorFile(own / QUESTIONS_FILE, QUESTIONS, dim)
    if asked.done() < QUESTIONS:
        asked.remove()
        asked.append(world.questions(QUESTIONS, rows)[0])
    return VectorSet(made="synthetic", vectors=vectors, question_QD=np.array(asked.open()), folder=own)


def _joined(chunks: Iterator[Vectors]) -> Iterator[Vectors]:
    """Fewer and larger ones, for each that is written waits for the disk."""
    held: list[Vectors] = []
    for chunk_BD in chunks:
        held.append(chunk_BD)
        if sum(map(len, held)) >= WRITTEN:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


def real_set(source: PassageSource, folder: Path, deadline: float) -> VectorSet | None:
    """The passages of `source`, encoded; None where the clock passes `deadline` before (another run goes on with it).
    UserError as the corpus, the encoder and the questions raise it, and for a set that was begun with others."""
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
    """What `near` would be of synthetic vectors of the same number and width."""
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
