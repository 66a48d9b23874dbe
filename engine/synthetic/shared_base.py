"""The bases that all systems share in the invented world: the commands that make one, and what a system reads of it.

    data invent --forms -> index build        world/data, index          once
    data judge                                world/judge                once: EviNote's judge of entailment
    init -> sft -> sft                        world/init0, recite0, base0, then init1 ..

A base knows the form of all protocols and hardly what to look for (warmup_transcripts.py). Bases of different seeds
differ in their first weights and in the order of their warm-up, not in the world, so that questions are the same for
all. `study systems` and `reproduce --scale world` train from them.
"""

from importlib.resources import files
from pathlib import Path

from thresher.engine.synthetic.warmup_transcripts import GIVEN, GIVEN_FORMAT

RECIPES = Path(str(files("thresher.recipes")))
RECIPE = RECIPES / "world" / "recipe.toml"
WARMUP_TRANSCRIPTS = 3200  # transcripts of each protocol in the base's warm-up
JUDGED = ("evinote",)  # systems whose reward asks the judge


def world_stages(world: Path, seed: int = 0, judged: bool = True) -> list[list[str]]:
    """The commands that make the world and the base of this seed, each of which writes one folder whole or not at all.
    judged: whether a judge of entailment will be asked."""
    data = world / "data"
    model, recite, base = (world / f"{name}{seed}" for name in ("init", "recite", "base"))
    sft = ["sft", str(RECIPES / "world" / "base.toml"), "--set", f"run.seed={seed}", "--set"]
    copy_task = ["--set", f"sft.transcripts={data / 'recitals.jsonl'}", "--out", str(recite)]
    warmup = ["--set", f"sft.transcripts={data / 'forms.jsonl'}", "--out", str(base)]
    trained_on = [str(data / name) for name in ("corpus.jsonl", "train.jsonl", "warmup.jsonl")]
    make_model = ["init", "--config", str(RECIPES / "world" / "config.json"), "--train-tokenizer", *trained_on]
    make_model += ["--vocab-size", "800", "--embedding-std", "0.4", "--zero-outputs", "--seed", str(seed)]
    make_index = ["index", "build", "--corpus", str(data / "corpus.jsonl"), "--encoder", "lexical"]
    return [
        ["data", "invent", "--forms", str(WARMUP_TRANSCRIPTS), "--out", str(data)],
        [*make_index, "--embed", "title+text", "--dim", "2048", "--out", str(world / "index")],
        *([["data", "judge", "--out", str(world / "judge")]] if judged else []),
        [*make_model, "--out", str(model)],
        [*sft, f"model.path={model}", *copy_task],
        [*sft, f"model.path={recite}", *warmup],
    ]


def world_paths(world: Path, system: str, seed: int = 0) -> list[str]:
    """What a system reads of the world and of the base of this seed, as overrides of a recipe: an index to search, or
    questions that bring their passages; and the judge, where its reward asks one."""
    model = f"model.path={world / f'base{seed}'}"
    given = "given_" if system in GIVEN else ""
    data = [
        f"data.{key}={world / 'data' / f'{given}{name}.jsonl'}" for key, name in (("train", "train"), ("dev", "test"))
    ]
    if given:
        return [model, *data, f'retrieval.passage_format="{GIVEN_FORMAT}"']
    judge = [f"judge.entailment={world / 'judge'}"] if system in JUDGED else []
    return [model, *data, f"retrieval.index={world / 'index'}", *judge]
