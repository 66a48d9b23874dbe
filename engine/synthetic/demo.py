"""`thresher demo`: the whole way from nothing to a model that searches, as a chain of ordinary commands.

    data invent -> init -> index build -> sft -> train -> report

Every stage is a command that can be typed by hand; the demo prints it, runs it in this process, and writes all of it
into one folder. What is special to the demo is in recipes/demo and nowhere else.

Run again into the same folder it goes on: a stage whose folder is there is done, for each appears whole, an index
resumes by itself, and a training or fine-tuning by --resume. demo.json holds what the folder was begun with.
"""

import json
import shlex
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object, staged_folder
from thresher.common.records import read_object, write_object
from thresher.engine.store.run_folder import to_be_resumed

RECIPES = Path(str(files("thresher.recipes"))) / "demo"
BEGUN = "demo.json"


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
    """Run the chain into `out`, or what of it is not finished there; `run` executes one command, `say` prints a line.
    UserError for a folder that is something else, of another seed or other overrides, or finished."""
    before = begin(out, seed, overrides)
    started = time.perf_counter()
    for arguments in stages(out, seed, overrides):
        into = Path(arguments[arguments.index("--out") + 1])
        if arguments[0] == "report":
            atomic_write_text(out / "notes.md", (RECIPES / "notes.md").read_text(encoding="utf-8"))
        elif (into / "summary.json" if arguments[0] == "train" else into).exists():
            say(f"{into} is finished")
            continue
        elif to_be_resumed(arguments[0], into):
            arguments = [*arguments, "--resume"]
        say(f"$ thresher {shlex.join(arguments)}")
        run(arguments)
        _write_begun(out, seed, overrides, before + time.perf_counter() - started)
    summary = read_object(out / "grpo" / "summary.json")
    summary.pop("metrics", None)  # the mark of a file that lies elsewhere
    summary["seconds"] = before + time.perf_counter() - started
    write_object(out / "summary.json", summary)


def begin(out: Path, seed: int, overrides: list[str]) -> float:
    """Make the demo's folder, or take up one that is unfinished; the seconds that its finished stages took."""
    file = out / BEGUN
    if not file.exists():
        if out.exists():
            raise UserError(f"{out}: exists already, and is no demo's folder; choose another with --out, or delete it")
        with staged_folder(out) as staged:
            _write_begun(staged, seed, overrides, 0.0)
        return 0.0
    begun = read_json_object(file)
    if (out / "summary.json").exists():
        raise UserError(f"{out}: holds a demo that is finished; choose another folder with --out, or delete it")
    if (begun.get("seed"), begun.get("set")) != (seed, overrides):
        words = shlex.join(
            ["--seed", str(begun.get("seed")), *(w for text in begun.get("set", ()) for w in ("--set", text))]
        )
        raise UserError(f"{out}: holds a demo that was begun with {words}; give the same, or choose another --out")
    return float(begun.get("seconds", 0.0))


def _write_begun(out: Path, seed: int, overrides: list[str], seconds: float) -> None:
    """seconds: of the stages that are finished."""
    record = {"seed": seed, "set": overrides, "seconds": seconds}
    atomic_write_text(out / BEGUN, json.dumps(record, indent=2) + "\n")
