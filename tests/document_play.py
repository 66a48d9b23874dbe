"""How a document is played: what makes each command small and what it must leave behind, and the running itself.

The words are those of the text. What makes a command small is appended, from REDUCED and from nowhere else. A command
that names CUDA is first run as it stands and must refuse where there is none; so must one that asks a server where none
answers. A new command fails until it has a row in REDUCED; a file that a document names and nobody has made gets its
stand-in in document_world.py.

Deliberately absent: commands of prose in docs/internals/log.md, which were typed then.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any

import torch
from documents import Block, Command, blocks, commands, documents, mentions, to_be_added
from retrieval_server_cases import ask

from thresher.cli.main import build_parser, run
from thresher.common.errors import UserError

CUDA_HERE = torch.cuda.is_available()
NOBODY = "http://127.0.0.1:9"  # where no server answers
HISTORY = ("docs/internals/log.md",)  # says what was typed at the time


def sets(**keys: object) -> tuple[str, ...]:
    """section__key=value -> --set section.key=value"""
    return tuple(part for key, value in keys.items() for part in ("--set", f"{key.replace('__', '.')}={value}"))


ON_CPU = sets(model__device="cpu", model__dtype="float32")
BRIEF = sets(rollout__max_turn_tokens=12)
SHORT = (
    *ON_CPU,
    *sets(run__steps=1, run__eval_every=1, run__eval_questions=1, run__save_every=1),
    *sets(rollout__questions_per_step=2, rollout__group_size=2, rollout__max_turns=2, rollout__max_turn_tokens=12),
)
TRAIN = (*SHORT, *sets(data__limit=4))
REHEARSED = sets(optim__offload="none", sft__steps=1, sft__batch_size=2)
STUDIED = sets(run__steps=1, rollout__questions_per_step=2, rollout__group_size=2, rollout__max_turn_tokens=4)
GRPO_OF_DEMO = sets(run__steps=1, run__eval_questions=2, rollout__questions_per_step=1, rollout__max_turn_tokens=8)

STEPS_OF_PYTHON = re.compile(r"\bsteps=\d+")  # of a run that a Python block trains


@dataclass(frozen=True)
class Row:
    """What makes a command small, and what it leaves below its --out (or, without one, below the run it names)."""

    append: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    process: bool = False  # in one of its own: tests run Triton in its interpreter, and what is compiled must not be
    once: bool = False  # needs nothing of its document: run at the first place that shows it, and there alone
    gpu: bool = False  # wants one whatever is appended: without it must refuse
    anywhere: bool = False  # needs none, though its recipe is for one


REDUCED = {
    "init": Row(writes=("config.json", "model.safetensors", "tokenizer.json")),
    "import-gguf": Row(writes=("config.json", "model.safetensors", "tokenizer.json")),
    "sft": Row(writes=("model.safetensors", "sft.json", "metrics.jsonl")),
    "recipe": Row(),
    "train": Row(TRAIN, ("recipe.toml", "metrics.jsonl", "summary.json", "checkpoints", "trajectories")),
    "train --resume": Row(sets(run__steps=2), ("checkpoints/step_000002", "summary.json")),
    "train --url": Row((*TRAIN, "--set", "retrieval.url={url}"), ("summary.json",)),
    "eval": Row(BRIEF, ("table.md", "metrics.json", "trajectories.jsonl")),
    "compare": Row(writes=("compare.md", "compare.json")),
    "extract": Row(BRIEF, ("../evidence.json",)),
    "extract --refiner": Row(BRIEF),
    "score": Row(),
    "rollout": Row((*ON_CPU, *BRIEF)),
    "generate": Row(("--max-new-tokens", "8")),
    "index plan": Row(("--sample", "2000", "--dim", "32"), once=True),
    "index build": Row(writes=("manifest.json",)),
    "index build --device": Row(("--device", "cpu"), ("manifest.json",)),
    "index hybrid": Row(writes=("manifest.json",)),
    "index search": Row(),
    "index check": Row(),
    "serve-retriever": Row(("--port", "0")),
    "data convert": Row(),
    "data check": Row(),
    "data sft": Row(),
    "data sft --model": Row(("--max-tokens", "48")),
    "data sft recomp": Row(("--margin", "0")),
    "data sft --recipe": Row(
        (
            *sets(rollout__max_turn_tokens=400, rollout__max_policy_tokens=2000),
            *sets(rollout__max_context=9000, rollout__max_passage_tokens=900),
        )
    ),
    "train-encoder": Row(("--steps", "1"), ("model.safetensors", "modules.json")),
    "plan": Row(anywhere=True),
    "plan --chip": Row(anywhere=True),
    "plan --measure": Row(ON_CPU),
    "report": Row(writes=("report.html",)),
    "report --out": Row(),
    "report --tokens": Row(),
    "tokens": Row(),
    "watch": Row(("--tty",)),
    "demo": Row(
        (
            *sets(sft__steps=2, sft__min_steps=1, sft__gate_every=1, sft__max_restarts=0, sft__batch_size=2),
            *GRPO_OF_DEMO,
        ),
        ("report.html", "summary.json", "grpo/summary.json", "warmup/sft.json"),
    ),
    "demo --model": Row(
        (*SHORT, *sets(rollout__max_policy_tokens=12)),
        ("report.html", "summary.json", "grpo/summary.json", "notes.md"),
    ),
    "reproduce": Row(("--list",), once=True),  # what it runs is run where a rehearsal is shown
    "reproduce --limit": Row(("--limit", "1", *SHORT, *REHEARSED), ("runs", "evaluations")),
    "study kl": Row(("--start", "runs/demo", "--steps", "1", "--seeds", "0"), ("kl.json", "training.png"), once=True),
    "study kl --recipe": Row(
        (
            *("--model", "models/Qwen2.5-0.5B", "--steps", "1", *BRIEF),
            *sets(data__train="train.jsonl", data__dev="dev.jsonl", run__eval_questions=1),
            *sets(rollout__questions_per_step=2, rollout__group_size=2),
        ),
        ("kl.json", "training.png"),
        once=True,
    ),
    "study kl --run": Row(writes=("kl_run.json", "kl_run.png"), once=True),
    "study credit": Row(("--draws", "1"), ("credit.json", "credit.png"), once=True),
    "study mask": Row(("--limit", "2", "--repeats", "1"), ("mask.json", "mask.png"), once=True),
    "study mask --recipe": Row(
        # the shorter, the better: samples of a model that guesses differ in length, and a study of gradients needs some
        (*("--limit", "2", *BRIEF), *sets(rollout__max_policy_tokens=60, grpo__overlong_tokens=60)),
        ("mask.json", "mask.png"),
        once=True,
    ),
    "study leak": Row(
        (
            *("--recipe", "eviomni/laptop.toml", "--model", "models/eviomni"),
            *sets(system__template="short.txt", data__dev="dev.jsonl", run__eval_questions=2),
        ),
        ("leak.json", "rows.jsonl"),
        once=True,
    ),
    "study systems": Row(
        ("--system", "search_r1", "--system", "arena", "--seeds", "0", "--controls", "0", *STUDIED),
        ("table.md", "curves.png", "systems.json"),
        once=True,
    ),
    "compare-methods": Row(
        ("--finished", "--rows", "compared.jsonl"), ("rows.jsonl", "table.md", "curves.png", "methods.json"), once=True
    ),
    "compare-methods --rows": Row(("--finished",), ("rows.jsonl", "table.md", "curves.png", "methods.json")),
    "study partial": Row(("--seeds", "0", *STUDIED), ("table.md", "partial.json"), once=True),
    "bench step": Row(("--steps", "1", "--shape", "demo", "--peer", "none", "--out", "step.jsonl"), once=True),
    "bench train": Row(("--peer", "none"), once=True),
    "bench delta": Row(
        (
            *("--sequences", "2", "--length", "70", "--key-heads", "2", "--value-heads", "2", "--dim", "8"),
            "--rounds",
            "1",
        ),
        once=True,
    ),
    "bench rollout": Row(("--shape", "demo", "--rounds", "1", "--peer", "none"), once=True),
    "bench loss": Row(
        (
            *("--device", "cpu", "--hidden", "8", "--vocab", "40", "--tokens", "32", "--density", "50"),
            *("--peers", "none", "--budget", "30"),
        ),
        once=True,
    ),
    "bench retrieval": Row(
        (
            *("--sizes", "300", "--dim", "16", "--kinds", "ivf", "--batches", "1", "--server", "0", "--budget", "8"),
            *("--out", "rows.jsonl"),
        ),
        once=True,
    ),
    "bench compile": Row(("--target", "sm_80", "--module", "thresher.kernels.gate_triton"), once=True, process=True),
    "bench decode": Row(
        (*("--device", "cpu", "--model", "0.5B", "--batch", "8"), *("--own", "4", "--shared", "8", "--steps", "1")),
        once=True,
    ),
    "bench attention": Row(
        (
            *("--device", "cpu", "--model", "0.5B", "--trees", "1", "--group-size", "2"),
            *("--shared", "8", "--own", "4"),
        ),
        once=True,
    ),
    "bench gpu-check": Row(("--parts", "racecheck"), once=True, gpu=True),
    "bench roofline": Row(("--chip", "A100-80", "--model", "0.5B"), once=True),
}
FLAGS_OF_THEIR_OWN = (
    *("--refiner", "recomp", "--resume", "--model", "--chip", "--measure", "--tokens", "--limit", "--device", "--out"),
    *("--recipe", "--run", "--rows"),
)


@dataclass
class Play:
    """One document, played in `folder` from its top; a step is run once, and before it all that stand above it."""

    folder: Path
    steps: Sequence[Command | Block]
    ended: dict[int, BaseException | None] = field(default_factory=dict)
    server: subprocess.Popen[str] | None = None
    url: str = NOBODY

    def until(self, number: int) -> None:
        """Run what has not been run up to this step, and raise what this one ended with."""
        for step in range(number + 1):
            if step not in self.ended:
                try:
                    self.run(self.steps[step])
                    self.ended[step] = None
                except BaseException as error:
                    self.ended[step] = error
                    if isinstance(error, KeyboardInterrupt):
                        raise
        error = self.ended[number]
        if error is not None:
            raise error

    def run(self, step: Command | Block) -> None:
        if isinstance(step, Block):
            path = self.folder / f"block_{step.line}.py"
            path.write_text(STEPS_OF_PYTHON.sub("steps=2", step.text), encoding="utf-8")
            runpy.run_path(str(path))
            return
        step = replace(step, words=expanded(step.words))
        name = command_name(step.words)
        kind = entry_of(step.words)
        assert kind in REDUCED, f"{step.place}: thresher {name} has no row in REDUCED of tests/{Path(__file__).name}"
        row = REDUCED[kind]
        if to_be_added(step.document, " ".join(step.words)):
            build_parser().parse_args(step.words)
            return
        append = [word.format(url=self.url) for word in row.append]
        if name == "serve-retriever":
            self.serve([*step.words, *append])
            return
        prepare(step.words)
        if wants_cuda(step.words) and not CUDA_HERE and not row.anywhere:
            refused(step, list(step.words))
        if row.gpu and not CUDA_HERE:
            refused(step, list(step.words))
            return
        if kind == "train --url":
            refused(step, [*step.words, *ON_CPU, *sets(retrieval__url=NOBODY, retrieval__patience=0.1)])
        parsed = build_parser().parse_args([*step.words, *append])
        ended = in_a_process if row.process else status
        assert ended([*step.words, *append]) == 0, f"{step.place}: thresher {' '.join([*step.words, *append])}"
        for path in expected(vars(parsed), row):
            assert (path.is_file() and path.stat().st_size) or (path.is_dir() and any(path.iterdir())), (
                f"{step.place}: {path} was not written"
            )

    def serve(self, words: list[str]) -> None:
        """A server in a process of its own, for the commands that follow."""
        command = [sys.executable, "-P", "-m", "thresher.cli", *words]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", self.server.stdout.readline())
        assert found
        self.url = found[0]
        assert ask(self.url, "/health")[1]["passages"] > 0

    def end(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(30) == 0


def expanded(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words with patterns of existing files expanded, as a shell does."""
    return tuple(path for word in words for path in (sorted(glob(word)) if "*" in word else ()) or (word,))


def command_name(words: tuple[str, ...]) -> str:
    """The words that choose a command: `index build`, `train`."""
    known = sorted(REDUCED, key=len, reverse=True)
    said = " ".join(words) + " "
    return next((name for name in known if "--" not in name and said.startswith(f"{name} ")), " ".join(words[:2]))


def entry_of(words: tuple[str, ...]) -> str:
    """The row of REDUCED: some flags have one of their own, and so has a recipe that asks a server."""
    name = command_name(words)
    for flag in FLAGS_OF_THEIR_OWN:
        if flag in words and f"{name} {flag}" in REDUCED:
            return f"{name} {flag}"
    return (
        "train --url" if name == "train" and any(re.search(r"^url = ", text, re.M) for text in tomls(words)) else name
    )


def tomls(words: tuple[str, ...]) -> list[str]:
    return [Path(word).read_text("utf-8") for word in words if word.endswith(".toml") and Path(word).is_file()]


def wants_cuda(words: tuple[str, ...]) -> bool:
    return "cuda" in words or any('device = "cuda"' in text for text in tomls(words))


def prepare(words: tuple[str, ...]) -> None:
    """A run of one step has no checkpoint of step 200: it gets one under that name. The index that stands in for one
    that is built now gives way."""
    if words[:2] == ("index", "build"):
        shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
    for word in words:
        if found := re.search(r"=(\S+/checkpoints)/(step_\d+)$", word):
            checkpoints = Path(found[1])
            if not (checkpoints / found[2]).exists():
                shutil.copytree(max(path for path in checkpoints.iterdir() if path.is_dir()), checkpoints / found[2])


def status(words: list[str]) -> object:
    """The exit status."""
    return run(words)


def in_a_process(words: list[str]) -> int:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-P", "-m", "thresher.cli", *words], env=environment).returncode


def refused(step: Command, words: list[str]) -> None:
    """Status 2, one sentence, and nothing written."""
    parsed = vars(build_parser().parse_args(words))
    read, write = os.pipe()
    kept = sys.stderr
    with os.fdopen(write, "w") as pipe:
        sys.stderr = pipe
        try:
            code = status(words)
        finally:
            sys.stderr = kept
    with os.fdopen(read) as said:
        message = said.read()
    assert code == 2, f"{step.place}: expected a refusal, got {code}"
    assert message.startswith("thresher: ") and message.count("\n") == 1, f"{step.place}: {message}"
    if parsed.get("out"):
        assert not Path(parsed["out"]).exists()


def expected(parsed: dict[str, Any], row: Row) -> list[Path]:
    """What the command has to leave behind: a listing nothing."""
    if parsed.get("list"):
        return []
    tables = [f"{parsed['paper']}-{table}.{kind}" for table in parsed.get("tables") or [] for kind in ("md", "json")]
    named = [Path(str(parsed[key])) for key in ("out", "corpus", "plot") if parsed.get(key)]
    runs = parsed.get("runs")
    out = parsed.get("out") or (runs[0] if isinstance(runs, list) else None)
    return [*named, *(Path(os.path.normpath(Path(str(out)) / name)) for name in (*row.writes, *tables) if out)]


@lru_cache(maxsize=1)
def shown() -> dict[str, list[Command | Block]]:
    """The steps of every document; what needs nothing of its document is taken once."""
    found: dict[str, list[Command | Block]] = {}
    seen: set[tuple[str, ...]] = set()
    for document in documents():
        found[document] = []
        for step in steps_of(document):
            if isinstance(step, Command) and (row := REDUCED.get(command_name(step.words))) and row.once:
                if step.words in seen:
                    continue
                seen.add(step.words)
            found[document].append(step)
    return found


def steps_of(document: str) -> list[Command | Block]:
    """Commands, Python blocks that are no file, and complete commands of the prose, from the top down."""
    found: list[Command | Block] = [
        *commands(document),
        *filter(lambda b: b.is_python and not b.file, blocks(document)),
    ]
    if document not in HISTORY:
        found += [command for command in mentions(document) if complete(command.words)]
    return sorted(found, key=lambda step: step.line)


def complete(words: tuple[str, ...]) -> bool:
    """Whether the prose shows a whole command and not its name alone: nothing is missing, and nothing in capitals
    stands for something."""
    if " ".join(words) in REDUCED or "--help" in words or any(re.fullmatch(r"[A-Z]+", word) for word in words):
        return False
    try:
        build_parser().parse_args(words)
    except (SystemExit, UserError):  # --help and --version; what is missing
        return False
    return True
