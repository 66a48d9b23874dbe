"""Stored results: a record of a finished run or evaluation is changed, lost or doubled, and a command reads it.

Every kind of stored file is read by each of its readers. A changed record must be refused, in a sentence that names
its file, or not be used at all: the result is then that of the unharmed files, pages included. `--unverified` reads
what was refused, where the command has the flag.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from thresher.bench.torture.attack import Field, Tried
from thresher.bench.torture.files import RECORD_DAMAGES, Readable, damage_all
from thresher.bench.torture.world import eval_words, train_words

MUTANTS, LEAST = 150, 2
DAMAGES = (*RECORD_DAMAGES, "one bit flipped", "a character changed", "cut short")
STEP = "trajectories/step_000002"

# Kind -> its file, and who reads it.
KINDS = {
    "metrics": ("done/metrics.jsonl", ("report", "report of two", "watch")),
    "trajectories": (f"done/{STEP}.jsonl", ("report", "report --tokens", "score of a run's")),
    "token statistics": (f"done/{STEP}.safetensors", ("report", "report --tokens")),
    "evaluations": ("done/evaluations/step_000002.jsonl", ("report", "report of two")),
    "summary": ("done/summary.json", ("report", "report of two", "watch")),
    "trajectories of eval": ("answers/trajectories.jsonl", ("compare", "score")),
    "measures of eval": ("answers/metrics.json", ("compare",)),
}

Words = Callable[[Path, Path], list[str]]
READERS: dict[str, Words] = {
    "report": lambda at, out: ["report", f"{at}/done", "--out", str(out)],
    "report --tokens": lambda at, out: ["report", f"{at}/done", "--tokens", "2", "--out", f"{out}.html"],
    "report of two": lambda at, out: ["report", f"{at}/done", f"{at}/done2", "--out", f"{out}.html"],
    "watch": lambda at, out: ["watch", f"{at}/done", "--tty"],
    "compare": lambda at, out: ["compare", f"{at}/answers", f"{at}/answers2", "--out", str(out)],
    "score": lambda at, out: scored(at, out, "answers/trajectories.jsonl"),
    "score of a run's": lambda at, out: scored(at, out, f"done/{STEP}.jsonl"),
}


def scored(at: Path, out: Path, file: str) -> list[str]:
    return ["score", "--system", f"{at}/letters.py", "--transcripts", f"{at}/{file}", "--out", f"{out}.jsonl"]


def _resumed(at: Path, out: Path) -> list[str]:
    return train_words(at, at / "done", "--resume")


def targets() -> dict[str, Readable]:
    """Every kind with every reader of it; a resume reads the metrics alone, and has --resume-from for --unverified."""
    resumed = Readable(("done/metrics.jsonl",), _resumed, "done")
    return {"metrics, train --resume": resumed} | {
        f"{kind}, {reader}": Readable(
            (file,), READERS[reader], pages=True, spoken=reader == "watch", anyway=RECORD_DAMAGES.__contains__
        )
        for kind, (file, readers) in KINDS.items()
        for reader in readers
    }


def attack(field: Field) -> Iterator[Tried]:
    """Every pair of a kind and a reader, by damages to records and to files."""
    for seed, end in (("0", ""), ("1", "2")):
        _must(field, train_words(field.at, field.at / f"done{end}", "--set", f"run.seed={seed}"))
        _must(field, [*eval_words(field.at, field.at / f"answers{end}"), "--seed", seed, "--temperature", "1"])
    found = targets()
    yield from damage_all(field, field.draw("stored"), found, DAMAGES, field.count(MUTANTS, LEAST))


def _must(field: Field, words: list[str]) -> None:
    ended = field.worker.preload(words)
    if ended.status != 0:
        raise RuntimeError(f"thresher {' '.join(words)}: {ended.err}")
