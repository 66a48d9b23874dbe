"""The bases in the invented world: the commands that make one, and what a system reads of it.

    data invent --forms -> index build        world/data, index          once
    data judge                                world/judge                once: EviNote's judge of entailment
    init -> sft -> sft                        world/init0, recite0, base0, then init1 ..
    sft -> sft -> init -> sft -> sft -> sft   world/numbers-1-0 .. numbered0, of the base "numbered" alone

The base "shared" knows the form of all protocols and hardly what to look for (warmup_transcripts.py). Bases of
different seeds differ in their first weights and in the order of their warm-up, not in the world, so that questions are
the same for all. `study systems` and `reproduce --scale world` train from them. The base "numbered" is made of it, with
one layer more: it can name a passage by its number, and knows the protocols of ARENA and naive GRPO (number_forms.py).
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from thresher.engine.synthetic.number_forms import NUMBERED_FORMAT, STAGES
from thresher.engine.synthetic.warmup_transcripts import GIVEN, GIVEN_FORMAT

RECIPES = Path(str(files("thresher.recipes")))
RECIPE = RECIPES / "world" / "recipe.toml"
WARMUP_TRANSCRIPTS = 3200  # transcripts of each protocol in the base's warm-up
JUDGED = ("evinote",)  # systems whose reward asks the judge


@dataclass(frozen=True, slots=True)
class WorldBase:
    """A base: its folder's name, to which a seed is put, and the retrieval.passage_format of given passages."""

    folder: str
    passage_format: str


NUMBERED = ("arena",)  # systems whose own claim needs a base that names passages by their numbers
BASES = {"shared": WorldBase("base", GIVEN_FORMAT), "numbered": WorldBase("numbered", NUMBERED_FORMAT)}


def world_stages(world: Path, seed: int = 0, judged: bool = True, base: str = "shared") -> list[list[str]]:
    """The commands that make the world and the base of this seed, each of which writes one folder whole or not at all.
    judged: whether a judge of entailment will be asked."""
    data = world / "data"
    model, recite, shared = (world / f"{name}{seed}" for name in ("init", "recite", "base"))
    sft = ["sft", str(RECIPES / "world" / "base.toml"), "--set", f"run.seed={seed}", "--set"]
    copy_task = ["--set", f"sft.transcripts={data / 'recitals.jsonl'}", "--out", str(recite)]
    warmup = ["--set", f"sft.transcripts={data / 'forms.jsonl'}", "--out", str(shared)]
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
        *(_numbered(world, seed) if base == "numbered" else []),
    ]


def _numbered(world: Path, seed: int) -> list[list[str]]:
    """From the shared base to the one that names passages by their numbers."""
    commands, model = [], world / f"base{seed}"
    for stage, layer in zip(STAGES, (False, False, True, False), strict=True):
        if layer:
            higher = world / f"higher{seed}"
            commands.append(
                ["init", "--model", str(model), "--add-layers", "1", "--seed", str(seed), "--out", str(higher)]
            )
            model = higher
        commands.append(_sft(world, "numbers.toml", model, stage, world / f"{stage}-{seed}", seed))
        model = world / f"{stage}-{seed}"
    return [*commands, _sft(world, "numbered.toml", model, "numbered", world / f"numbered{seed}", seed)]


def _sft(world: Path, recipe: str, model: Path, transcripts: str, out: Path, seed: int) -> list[str]:
    sets = [f"run.seed={seed}", f"model.path={model}", f"sft.transcripts={world / 'data' / transcripts}.jsonl"]
    words = [word for text in sets for word in ("--set", text)]
    return ["sft", str(RECIPES / "world" / recipe), *words, "--out", str(out)]


def world_questions(world: Path, system: str, split: str) -> Path:
    """The questions of a split, train, dev or test, as a system is asked them."""
    return world / "data" / f"{'given_' if system in GIVEN else ''}{split}.jsonl"


def base_folder(world: Path, base: str, seed: int) -> str:
    return f"{world / BASES[base].folder}{seed}"


def world_paths(world: Path, system: str, base: str = "shared") -> list[str]:
    """What a system reads of the world, as overrides of a recipe: an index to search, or questions that bring their
    passages, shown as this base knows them; and the judge, where its reward asks one."""
    data = [f"data.{split}={world_questions(world, system, split)}" for split in ("train", "dev")]
    if system in GIVEN:
        return [*data, f'retrieval.passage_format="{BASES[base].passage_format}"']
    judge = [f"judge.entailment={world / 'judge'}"] if system in JUDGED else []
    return [*data, f"retrieval.index={world / 'index'}", *judge]
