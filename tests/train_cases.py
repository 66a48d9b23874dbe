"""A small training run: the policy, questions and recipe of it, and comparisons of two runs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model_cases import make_config
from stored_cases import stored

from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import OptimSection, SftSection
from thresher.engine.config.tables import from_dict
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.training import sft as sft_module
from thresher.engine.training.partial import FILE
from thresher.engine.training.sft import encode_transcript
from thresher.engine.training.train import Progress, train
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question

Make = Callable[..., Recipe]
NAMES = ["Anna Bell", "Carl Dorn", "Eva Frost", "Gil Hart", "Ida Jones", "Karl Lund", "Mia Noor", "Otto Pike"]
STEPS, GROUPS, SAMPLES, DEV = 4, 3, 4, 5
# Also digests of data that contains timings.
TIMINGS = {"rollout_tokens_per_s", "train_tokens_per_s", "search_share", "sha256", "digest"}
# The number of tokens per forward depends on the drafts, and a resumed run has no history to draft from; it also
# depends on when a server answered.
FORWARDS = {"forwards", "forward_rows", "drafted_tokens", "accepted_tokens", "search_calls", "slots_busy"}
# Counts that depend on when tools answer: a sample shares the prefixes that are cached by then.
PREFILLS = {"prefilled_tokens", "shared_tokens", "tokens_spent"}


@contextmanager
def single_threaded() -> Iterator[None]:
    """Use one thread, because sums depend on the number of threads, and a subprocess must use the same number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drilled(tokenizer: Tokenizer, template: str) -> Policy:
    """Return a small policy that knows only the form of an episode: it answers with any of the eight names."""
    config = make_config(
        vocab_size=tokenizer.vocab_size + 4, eos_token_ids=tuple(tokenizer.encode_template("<|endoftext|>"))
    )
    renderer = Renderer(tokenizer=tokenizer, tags=(), k=1, chat=False, max_passage_tokens=9, passage_format="{text}")
    draw, transcripts = Random(0), []
    for _ in range(200):
        one, other, third = (draw.choice(NAMES) for _ in range(3))
        answer = {"source": "policy", "text": f"<evaluate>{other}</evaluate><answer>{one}</answer>"}
        search = [
            {"source": "policy", "text": f"<search>spouse of {other}</search>"},
            {"source": "retrieved", "text": f"\n\n<information>{other} has spouse {third}.</information>\n\n"},
        ]
        record = {"question": f"What is the mayor of {third}?", "segments": [*search * draw.randrange(2), answer]}
        transcripts.append(encode_transcript(record, tokenizer, renderer, template))
    policy = init_policy(config, 0).requires_grad_(True)
    sft = SftSection(transcripts="none", steps=70, batch_size=16, lr=2e-2, schedule="linear", held_out=0.0)
    drill = sft_module.SftTrainer(MasterWeights(policy), transcripts, sft, OptimSection(), tokenizer.vocab_size, 0)
    assert drill.run(lambda record: None).loss < 1
    return policy


def write_inputs(folder: Path, tokenizer: Tokenizer, questions: list[Question]) -> None:
    """Write the files that `recipe_tables` names. Half of the names are right, for any question, so that rewards differ
    within a group."""
    (folder / "prompt.txt").write_text("Question: {question}\n")
    with single_threaded():
        drilled(tokenizer, "Question: {question}\n").save(folder / "model")
    tokenizer.save(folder / "model")
    for name, part in (("train", questions[DEV:]), ("dev", questions[:DEV])):
        records = [{"id": q.id, "question": q.question, "golden_answers": NAMES[::2]} for q in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def recipe_tables(folder: Path, index: Path) -> dict[str, dict[str, Any]]:
    """Return the recipe of a run of four steps on the folder's inputs, as tables."""
    return {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "dev": str(folder / "dev.jsonl")},
        "retrieval": {"index": str(index), "k": 2, "passage_format": "{text}"},
        "system": {"name": "eval_rar", "template": str(folder / "prompt.txt")},
        "rollout": {
            "group_size": SAMPLES,
            "questions_per_step": GROUPS,
            "max_turns": 3,
            "max_turn_tokens": 40,
            "max_policy_tokens": 80,
            "max_context": 240,
            "max_passage_tokens": 40,
            "max_num_seqs": 8,
        },
        "grpo": {"kl_value": "k2", "beta": 0.02},
        "optim": {"lr": 1e-3, "warmup_ratio": 0.25, "micro_batch_tokens": 400},
        "run": {"steps": STEPS, "seed": 3, "eval_every": 2, "save_every": 2},
    }


def recipe_maker(tables: dict[str, dict[str, Any]]) -> Make:
    """Return make(grpo={..}, ..) -> Recipe: the tables with some keys changed or added."""

    def make(**changes: dict[str, Any]) -> Recipe:
        names = {**tables, **changes}
        return from_dict(Recipe, {name: tables.get(name, {}) | changes.get(name, {}) for name in names}, "test")

    return make


def metrics(run: Path) -> list[dict[str, Any]]:
    return stored(run / "metrics.jsonl")


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps, without those of its evaluations."""
    return [record for record in metrics(run) if "eval" not in record]


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())


def untimed(record: dict[str, Any], but: Set[str] = frozenset()) -> dict[str, Any]:
    return {
        key: untimed(value, but) if isinstance(value, dict) else value
        for key, value in record.items()
        if not key.endswith("seconds") and key not in TIMINGS | FORWARDS | but
    }


def what_happened(run: Path, but: Set[str] = frozenset()) -> dict[str, Any]:
    """Return all that a run wrote, except for timings in a state and therefore in its hash, and the metrics `but`."""
    files = [*run.glob("trajectories/*"), *run.glob("evaluations/*"), *run.glob("checkpoints/*/**/*.*")]
    return {
        "metrics": [untimed(record, but) for record in metrics(run)],
        "summary": untimed(json.loads((run / "summary.json").read_text()), but),
        "recipe": (run / "recipe.toml").read_bytes(),
        **{
            str(path.relative_to(run)): groups_in(path) if path.name == FILE else path.read_bytes()
            for path in files
            if path.name not in ("state.json", "hashes.json")
        },
    }


def groups_in(path: Path) -> list[dict[str, Any]]:
    """Return what a checkpoint keeps of groups, without the counts of their rollout, which include its seconds."""
    return [{key: value for key, value in record.items() if key != "counted"} for record in stored(path)]


def assert_same_run(one: Path, other: Path, but: Set[str] = frozenset()) -> None:
    first, second = what_happened(one, but), what_happened(other, but)
    assert first.keys() == second.keys()
    differ = [key for key in first if first[key] != second[key]]
    assert not differ, differ


def sampled(run: Path, step: int) -> list[dict[str, Any]]:
    path = run / "trajectories" / f"step_{step:06d}.jsonl"
    return stored(path)


class Killed(BaseException):
    """Stands for a kill: no handler of the product catches it."""


def die_after(step: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.step == step:
            raise Killed

    return watch


KILLED = """
import os, signal, sys
from importlib import import_module
from pathlib import Path
import torch
from thresher.cli.commands.training import run_sft
from thresher.engine.config.recipe import load_recipe
from thresher.engine.training.train import train

torch.set_num_threads(1)
module, name, call, command, recipe, out = sys.argv[1:]
owner, calls = import_module(f"thresher.engine.{module}"), []
wanted = getattr(owner, name)

def fatal(*arguments, **options):
    calls.append(name)
    if len(calls) == int(call):
        os.kill(os.getpid(), signal.SIGKILL)
    return wanted(*arguments, **options)

setattr(owner, name, fatal)
{"train": train, "sft": run_sft}[command](load_recipe(recipe), Path(out))
"""
SAVE = ("store.checkpoint", "save_tensors", 2)  # the second checkpoint, after its model is written


def sigkill(command: str, recipe: Recipe, out: Path, module: str, name: str, call: int) -> None:
    """Run `thresher train` or `sft` in a process that is killed at the call of the function with this number."""
    file = out.with_name("recipe.toml")
    recipe.write(file)
    words = [sys.executable, "-P", "-c", KILLED, module, name, str(call), command, str(file), str(out)]
    killed = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def train_killed(recipe: Recipe, out: Path, step: int, **options: Any) -> None:
    """Train until this step is recorded, where a simulated kill ends the run."""
    with pytest.raises(Killed):
        train(recipe, out, watch=die_after(step), **options)
