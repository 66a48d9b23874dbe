"""The base that all systems share in the invented world: the commands that make it, and what a system reads of it.

    data invent --forms -> init -> index build -> sft -> sft     world/data, init, index, recite, base

The base knows the form of all protocols and hardly what to look for (warmup_transcripts.py). `study systems` and
`reproduce --scale world` train from it.
"""

from importlib.resources import files
from pathlib import Path

from thresher.engine.synthetic.warmup_transcripts import GIVEN, GIVEN_FORMAT

RECIPES = Path(str(files("thresher.recipes")))
RECIPE = RECIPES / "world" / "recipe.toml"
WARMUP_TRANSCRIPTS = 3200  # transcripts of each protocol in the base's warm-up


def world_stages(world: Path) -> list[list[str]]:
    """The commands that make the shared base, each of which writes one folder whole or not at all."""
    data, model = world / "data", world / "init"
    sft = ["sft", str(RECIPES / "world" / "base.toml"), "--set"]
    copy_task = ["--set", f"sft.transcripts={data / 'recitals.jsonl'}", "--out", str(world / "recite")]
    warmup = ["--set", f"sft.transcripts={data / 'forms.jsonl'}", "--out", str(world / "base")]
    trained_on = [str(data / name) for name in ("corpus.jsonl", "train.jsonl", "warmup.jsonl")]
    make_model = ["init", "--config", str(RECIPES / "world" / "config.json"), "--train-tokenizer", *trained_on]
    make_index = ["index", "build", "--corpus", str(data / "corpus.jsonl"), "--encoder", "lexical"]
    return [
        ["data", "invent", "--forms", str(WARMUP_TRANSCRIPTS), "--out", str(data)],
        [*make_model, "--vocab-size", "800", "--embedding-std", "0.4", "--zero-outputs", "--out", str(model)],
        [*make_index, "--embed", "title+text", "--dim", "2048", "--out", str(world / "index")],
        [*sft, f"model.path={model}", *copy_task],
        [*sft, f"model.path={world / 'recite'}", *warmup],
    ]


def world_paths(world: Path, system: str) -> list[str]:
    """What of the world a system reads, as overrides of a recipe: an index to search, or questions that bring their
    passages."""
    model = f"model.path={world / 'base'}"
    given = "given_" if system in GIVEN else ""
    data = [
        f"data.{key}={world / 'data' / f'{given}{name}.jsonl'}" for key, name in (("train", "train"), ("dev", "test"))
    ]
    if given:
        return [model, *data, f'retrieval.passage_format="{GIVEN_FORMAT}"']
    return [model, *data, f"retrieval.index={world / 'index'}"]
