"""The world that is attacked: a small model, its data, an index of each kind, runs finished and unfinished.

model/ model2/                      random weights, of the same shape but different
corpus.jsonl questions.jsonl ..     data, and its second version
flat/ hnsw/ ivf/ bm25/ hybrid/      indexes; flat2/ .. of the other corpus
run/ run2/ partial/ evaluation/ evidence.jsonl     killed before their end
"""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torture.harness import ASYNC, Campaign

FIXTURES = Path(__file__).with_name("fixtures")  # a config, a recipe, a prompt, and a custom system
FIRST = ("Anna", "Carl", "Eva", "Gil", "Ida", "Karl", "Mia", "Otto")
LAST = ("Bell", "Dorn", "Frost", "Hart", "Jones", "Lund", "Noor", "Pike")
INDEXES = {
    "flat": "--dim 64",
    "hnsw": "--dim 64 --kind HNSW8 --recall 0.1",
    "ivf": "--dim 64 --kind IVF4,Flat --recall 0.1",
    "bm25": "--encoder bm25",
}

# Commands in the form that Campaign.words reads.
TRAIN = "train {at}/recipe.toml --out {out}"
# Modes of a step of `train`, as settings.
MODES = {
    "": (),
    "two updates a step": ("rollout.questions_per_step=4", "grpo.updates_per_batch=2"),
    "partial rollouts": ("rollout.partial=true", "rollout.max_num_seqs=4"),
    "one step of asynchrony": (ASYNC,),
}
SFT = "sft {at}/recipe.toml --out {out}"
EVAL = "eval {at}/recipe.toml --questions {at}/questions.jsonl --out {out}"
ROLLOUT = "rollout --recipe {at}/recipe.toml --questions {at}/questions.jsonl --out {out}.jsonl"
EXTRACT = (
    "extract --model {at}/model --questions {at}/questions.jsonl --k 1 --template {at}/prompt.txt --index {at}/flat "
    "--batch 2 --set rollout.max_turn_tokens=6 --set rollout.max_passage_tokens=20 --out {out}.jsonl"
)
GENERATE = "generate --model {at}/model --max-new-tokens 8"


def train_words(mode: str, words: str = TRAIN) -> str:
    return with_settings(words, *MODES[mode])


def build_words(kind: str, corpus: str = "corpus.jsonl") -> str:
    return f"index build --corpus {{at}}/{corpus} {INDEXES[kind]} --out {{out}}"


def search_words(kind: str) -> str:
    return f"index search --index {{at}}/{kind} --queries {{at}}/questions.jsonl --k 3 --out {{out}}.jsonl"


def score_words(file: str, system: str = "search_r1") -> str:
    return f"score --system {system} --transcripts {{at}}/{file} --out {{out}}.jsonl"


def with_settings(words: str, *settings: str) -> str:
    return " ".join([words, *(f"--set {setting}" for setting in settings)])


def make_world(campaign: Campaign) -> None:
    """Make the world with the program's own commands."""
    at = campaign.world
    shutil.copytree(FIXTURES, at)
    _write_data(at)
    place_recipe(at)

    def make(words: str, name: str) -> None:
        campaign.must(campaign.words(words, at / name))

    init = "init --config {at}/config.json --train-tokenizer {at}/corpus.jsonl --vocab-size 300 --out {out}"
    make(init, "model")
    make(f"{init} --seed 1", "model2")
    for kind in INDEXES:
        make(build_words(kind), kind)
        make(build_words(kind, "corpus2.jsonl"), f"{kind}2")
    make("index hybrid {at}/flat {at}/bm25 --out {out}", "hybrid")
    for kind in (*INDEXES, "hybrid"):
        make(search_words(kind), "found")
    make(TRAIN, "whole")
    make(SFT, "warm")
    (at / "found.jsonl").unlink()
    shutil.rmtree(at / "whole")
    _kill_when(campaign, TRAIN, "run", lambda: (at / "run/checkpoints/step_000002").is_dir())
    other = with_settings(TRAIN, "run.seed=1")
    _kill_when(campaign, other, "run2", lambda: (at / "run2/checkpoints/step_000002").is_dir())
    partial = train_words("partial rollouts")
    _kill_when(campaign, partial, "partial", lambda: (at / "partial/checkpoints/step_000002").is_dir())
    _kill_when(campaign, EXTRACT, "evidence", lambda: _lines_of(at / "evidence.jsonl") >= 4)
    # Such a small evaluation is written in one part, so the kill falls between that and its end.
    _kill_when(campaign, EVAL, "evaluation", lambda: _lines_of(at / "evaluation" / "generated.jsonl") >= 4, pause=0.0)
    if not (at / "evaluation" / "generated.jsonl").exists():
        raise RuntimeError("the evaluation was over before it could be stopped")


def place_recipe(at: Path) -> None:
    """Write the recipe of a world, which names its folder."""
    (at / "recipe.toml").write_text((FIXTURES / "recipe.toml").read_text().replace("{at}", str(at)))


def write_lines(path: Path, records: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _write_data(at: Path) -> None:
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    for name, verb in (("corpus", "lives in"), ("corpus2", "left")):
        owners = [names[(7 * number + 3) % len(names)] for number in range(len(names))]
        facts = [f"{who} {verb} the house of {owner}." for who, owner in zip(names, owners, strict=True)]
        passages = zip(names, facts, strict=True)
        write_lines(at / f"{name}.jsonl", [{"id": f"p{n}", "title": t, "text": x} for n, (t, x) in enumerate(passages)])
    asked = [
        {"id": f"q{n}", "question": f"Where does {who} live?", "golden_answers": [who]}
        for n, who in enumerate(names[::5])
    ]
    write_lines(at / "questions.jsonl", asked)
    write_lines(at / "dev.jsonl", asked[:3])
    write_lines(at / "questions2.jsonl", [{**one, "golden_answers": ["nobody"]} for one in asked])
    said = [(one["question"], [{"source": "policy", "text": one["golden_answers"][0]}]) for one in asked]
    write_lines(at / "transcripts.jsonl", [{"question": q, "passages": [], "segments": s} for q, s in said])
    answer = {"segments": [{"source": "policy", "text": "<answer>Anna Bell</answer>"}], "golden_answers": ["Anna Bell"]}
    write_lines(at / "scored.jsonl", [{"id": f"{n}", **answer} for n in range(4)])


def _kill_when(campaign: Campaign, words: str, name: str, condition: Callable[[], bool], pause: float = 0.002) -> None:
    started = campaign.start(campaign.words(words, campaign.world / name))
    started.wait_until(condition, pause)
    started.kill(signal.SIGKILL)
    ended = started.wait()
    if ended.signal != signal.SIGKILL:
        raise RuntimeError(f"thresher {words}: was over before it could be stopped: {ended.err}")


def _lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
