"""`thresher demo`: the whole way from nothing to a model that searches, as a chain of ordinary commands.

    data invent -> init -> index build -> sft -> train -> report

Every stage is a command that can be typed by hand; the demo prints it, runs it in this process, and writes all of it
into one folder. What is special to the demo is in recipes/demo and nowhere else.
"""

import json
import shlex
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from thresher.policy.files import atomic_write_text
from thresher.rewards.errors import UserError

RECIPES = Path(str(files("thresher.recipes"))) / "demo"


def stages(out: Path, seed: int, overrides: list[str]) -> list[list[str]]:
    """The commands of the demo, as argument lists of `thresher`."""
    data, model, warm = out / "data", out / "init", out / "warmup"
    sets = [
        f"data.train={data / 'train.jsonl'}",
        f"data.dev={data / 'test.jsonl'}",
        f"retrieval.index={out / 'index'}",
        f"sft.transcripts={data / 'warmup.jsonl'}",
        f"system.template={RECIPES / 'prompt.txt'}",
        f"run.seed={seed}",
        *overrides,
    ]
    recipe = [str(RECIPES / "recipe.toml"), *(part for text in sets for part in ("--set", text))]
    trained_on = [str(data / name) for name in ("corpus.jsonl", "train.jsonl", "warmup.jsonl")]
    make_model = ["init", "--config", str(RECIPES / "config.json"), "--train-tokenizer", *trained_on]
    make_index = ["index", "build", "--corpus", str(data / "corpus.jsonl"), "--encoder", "lexical"]
    return [
        ["data", "invent", "--out", str(data), "--seed", str(seed)],
        [*make_model, "--vocab-size", "800", "--seed", str(seed), "--out", str(model)],
        [*make_index, "--embed", "title+text", "--dim", "2048", "--out", str(out / "index")],
        ["sft", *recipe, "--set", f"model.path={model}", "--out", str(warm)],
        ["train", *recipe, "--set", f"model.path={warm}", "--out", str(out / "grpo")],
        ["report", str(out / "grpo"), "--out", str(out)],
    ]


def demo(
    out: Path, seed: int, overrides: list[str], run: Callable[[list[str]], None], say: Callable[[str], None]
) -> None:
    """Run the chain into `out`, which must not exist; `run` executes one command, `say` prints a line."""
    if out.exists():
        raise UserError(f"{out}: the run folder exists already; choose another with --out, or delete it")
    started = time.perf_counter()
    for arguments in stages(out, seed, overrides):
        if arguments[0] == "report":
            atomic_write_text(out / "notes.md", (RECIPES / "notes.md").read_text(encoding="utf-8"))
        say(f"$ thresher {shlex.join(arguments)}")
        run(arguments)
    summary = json.loads((out / "grpo" / "summary.json").read_text(encoding="utf-8"))
    summary["seconds"] = time.perf_counter() - started
    atomic_write_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")
