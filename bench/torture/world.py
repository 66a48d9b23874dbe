"""What is attacked: a small model, its data, an index of each kind, runs finished and unfinished; made by the commands.

    model/ model2/                      random weights; the second another's, of the same shape
    corpus.jsonl questions.jsonl ..     data, and its second version
    flat/ hnsw/ ivf/ bm25/ hybrid/      indexes; flat2/ .. of the other corpus
    recipe.toml                         with a system of one's own, whose reward any text may earn, so that weights move
    run/                                 a training run that was killed after its second step; run2/ with another seed
    evaluation/ evidence.jsonl           unfinished too

The reward is the share of the letter e in what was written: a model that knows nothing has rewards that differ within
a group, hence gradients, hence weights and moments that a resume must bring back to the bit.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thresher.bench.torture.worker import Started, Worker

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 999,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
FIRST = ("Anna", "Carl", "Eva", "Gil", "Ida", "Karl", "Mia", "Otto")
LAST = ("Bell", "Dorn", "Frost", "Hart", "Jones", "Lund", "Noor", "Pike")
SYSTEM = '''"""The share of the letter e in what was written."""

from dataclasses import dataclass

from thresher.engine.episode import Generate, Prompt, System, pair_tags
from thresher.rewards.measures import answer_measures
from thresher.rewards.result import RewardResult
from thresher.rewards.transcript import Source


@dataclass(frozen=True, kw_only=True)
class Options:
    pass


def episode(question, tools):
    yield Prompt(tools.template, question.question, question.passages)
    yield Generate(stop=("</answer>",))
    return "ended"


def reward(attempt):
    text = b"".join(piece.text for piece in attempt.pieces if piece.source == Source.POLICY)
    share = text.lower().count(b"e") / max(len(text), 1)
    return RewardResult(share, answer_measures(None, attempt.golds), None)


def system(options):
    template = "Q: {question}\\n{passages}\\nA:"
    return System(
        name="letters", tags=pair_tags("answer"), episode=episode, reward=reward, template=template,
        given_passages=True,
    )
'''
RECIPE = """
[model]
path = "{at}/model"
[data]
train = "{at}/questions.jsonl"
dev = "{at}/dev.jsonl"
[retrieval]
index = "{at}/flat"
k = 2
passage_format = "{{text}}"
[system]
name = "{at}/letters.py"
template = "{at}/prompt.txt"
[rollout]
group_size = 3
questions_per_step = 2
max_turn_tokens = 8
max_context = 128
max_passage_tokens = 40
max_num_seqs = 6
[optim]
lr = 1e-2
schedule = "constant"
[run]
steps = 4
save_every = 1
eval_every = 2
keep_checkpoints = 9
[sft]
transcripts = "{at}/transcripts.jsonl"
steps = 8
batch_size = 2
"""
PROMPT = "Q: {question}\n{passages}\nA:"
INDEXES = {
    "flat": ("--dim", "64"),
    "hnsw": ("--dim", "64", "--kind", "HNSW8", "--recall", "0.1"),
    "ivf": ("--dim", "64", "--kind", "IVF4,Flat", "--recall", "0.1"),
    "bm25": ("--encoder", "bm25"),
}


def write_lines(path: Path, records: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def train_words(at: Path, out: Path, *more: str) -> list[str]:
    return ["train", str(at / "recipe.toml"), "--out", str(out), *more]


def sft_words(at: Path, out: Path, *sets: str) -> list[str]:
    overrides = [word for text in sets for word in ("--set", text)]
    return ["sft", str(at / "recipe.toml"), *overrides, "--out", str(out)]


def eval_words(at: Path, out: Path) -> list[str]:
    return ["eval", str(at / "recipe.toml"), "--questions", str(at / "questions.jsonl"), "--out", str(out)]


def extract_words(at: Path, out: Path) -> list[str]:
    small = [word for key in ("turn_tokens=6", "passage_tokens=20") for word in ("--set", f"rollout.max_{key}")]
    words = ["extract", "--model", str(at / "model"), "--questions", str(at / "questions.jsonl"), "--k", "1"]
    template = ["--template", str(at / "prompt.txt"), "--index", str(at / "flat"), "--batch", "2"]
    return [*words, *template, *small, "--out", str(out)]


def index_words(at: Path, out: Path, kind: str, corpus: str = "corpus.jsonl") -> list[str]:
    return ["index", "build", "--corpus", str(at / corpus), *INDEXES[kind], "--out", str(out)]


def search_words(at: Path, index: str, out: Path) -> list[str]:
    words = ["index", "search", "--index", str(at / index), "--queries", str(at / "questions.jsonl")]
    return [*words, "--k", "3", "--out", str(out)]


def make_world(at: Path, worker: Worker) -> None:
    """Everything above, into the folder `at`. RuntimeError where a command of it fails."""
    at.mkdir(parents=True)
    _write_data(at)
    place_recipe(at)
    init = ["init", "--config", str(at / "config.json"), "--train-tokenizer", str(at / "corpus.jsonl")]
    _must(worker, [*init, "--vocab-size", "300", "--out", str(at / "model")])
    again = ["init", "--config", str(at / "config.json"), "--train-tokenizer", str(at / "corpus.jsonl"), "--seed", "1"]
    _must(worker, [*again, "--vocab-size", "300", "--out", str(at / "model2")])
    for kind in INDEXES:
        _must(worker, index_words(at, at / kind, kind))
        _must(worker, index_words(at, at / f"{kind}2", kind, "corpus2.jsonl"))
    _must(worker, ["index", "hybrid", str(at / "flat"), str(at / "bm25"), "--out", str(at / "hybrid")])
    for kind in (*INDEXES, "hybrid"):
        _must(worker, search_words(at, kind, at / "found.jsonl"))
    (at / "found.jsonl").unlink()
    _must(worker, train_words(at, at / "whole"))
    shutil.rmtree(at / "whole")
    _must(worker, sft_words(at, at / "warm"))
    _left(worker, train_words(at, at / "run"), lambda: (at / "run/checkpoints/step_000002").is_dir())
    seeded = train_words(at, at / "run2", "--set", "run.seed=1")
    _left(worker, seeded, lambda: (at / "run2/checkpoints/step_000002").is_dir())
    _left(worker, extract_words(at, at / "evidence.jsonl"), lambda: _lines(at / "evidence.jsonl") >= 4)
    _make_evaluation(at, worker)


def _make_evaluation(at: Path, worker: Worker) -> None:
    """An evaluation is written part by part, and so small a one has a single part: it is stopped behind that."""
    generated = at / "evaluation" / "generated.jsonl"
    started = _left(worker, eval_words(at, at / "evaluation"), lambda: _lines(generated) >= 4, pause=0.0)
    if not generated.exists():
        raise RuntimeError(f"the evaluation was over before it could be stopped: {started.wait().err}")


def place_recipe(at: Path) -> None:
    """The recipe of a folder that was copied, which names the copy."""
    (at / "recipe.toml").write_text(RECIPE.format(at=at))


def _write_data(at: Path) -> None:
    (at / "config.json").write_text(json.dumps(CONFIG))
    (at / "letters.py").write_text(SYSTEM)
    (at / "prompt.txt").write_text(PROMPT)
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    for name, verb in (("corpus", "lives in"), ("corpus2", "left")):
        facts = [
            {"id": f"p{n}", "title": who, "text": f"{who} {verb} the house of {names[(7 * n + 3) % len(names)]}."}
            for n, who in enumerate(names)
        ]
        write_lines(at / f"{name}.jsonl", facts)
    asked = [
        {"id": f"q{n}", "question": f"Where does {who} live?", "golden_answers": [who]}
        for n, who in enumerate(names[::5])
    ]
    write_lines(at / "questions.jsonl", asked)
    write_lines(at / "dev.jsonl", asked[:3])
    write_lines(at / "questions2.jsonl", [{**one, "golden_answers": ["nobody"]} for one in asked])
    said = [
        {
            "question": one["question"],
            "passages": [],
            "segments": [{"source": "policy", "text": one["golden_answers"][0]}],
        }
        for one in asked
    ]
    write_lines(at / "transcripts.jsonl", said)
    answer = {"segments": [{"source": "policy", "text": "<answer>Anna Bell</answer>"}], "golden_answers": ["Anna Bell"]}
    write_lines(at / "scored.jsonl", [{"id": f"{n}", **answer} for n in range(4)])


def _must(worker: Worker, words: list[str]) -> None:
    ended = worker.preload(words)
    if ended.status != 0:
        raise RuntimeError(f"thresher {' '.join(words)}: status {ended.status}, signal {ended.signal}: {ended.err}")


def _left(worker: Worker, words: list[str], until: Callable[[], bool], pause: float = 0.002) -> Started:
    """A command that is killed once `until` holds."""
    started = worker.start(words)
    while started.running() and not until():
        time.sleep(pause)
    started.kill(signal.SIGKILL)
    ended = started.wait()
    if ended.signal != signal.SIGKILL:
        raise RuntimeError(f"thresher {' '.join(words)}: was over before it could be stopped: {ended.err}")
    return started


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
