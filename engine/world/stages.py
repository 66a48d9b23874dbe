"""The commands that make the demo and the bases in the invented world, and the run of the demo.

    data invent -> init -> index build -> sft -> train -> report     `thresher demo`
    data invent --articles -> train -> report                        `thresher demo --model FOLDER`

    data invent --forms -> index build        world/data, index          once
    data judge                                world/judge                once: EviNote's judge of entailment
    init -> sft -> sft                        world/init0, recite0, base0, then init1 ..
    sft -> sft -> init -> sft -> sft -> sft   world/numbers-1-0 .. numbered0, only for the base "numbered"

The base "shared" knows the format of all protocols but hardly what to search for. Bases of different seeds differ in
their initial weights and in the order of their warm-up, not in the world, so all have the same questions. The base
"numbered" continues from it with one more layer: it can name a passage by its number, and knows the protocols of ARENA
and naive GRPO (files.py). `study systems` and `reproduce --scale world` train from these bases.
"""

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object, staged_folder
from thresher.common.machine import cpu_dtype
from thresher.common.records import read_object, write_object
from thresher.engine.config.recipe import load_recipe
from thresher.engine.store.run_folder import to_be_resumed
from thresher.engine.systems import preset_of
from thresher.engine.world.before_after import FIRST_QUESTIONS, HELD_OUT, split_questions, transcripts
from thresher.engine.world.files import GIVEN, GIVEN_FORMAT, NUMBERED_FORMAT, STAGES
from thresher.engine.world.simulated_search import DIM
from thresher.policy.config import read_config

RECIPES = Path(str(files("thresher.recipes")))
RECIPE = RECIPES / "world" / "recipe.toml"
DEMO = RECIPES / "demo"
DEMO_CONFIGS = {"qwen2": "config.json", "qwen3_5": "qwen3_5.json"}  # with about the same number of parameters
READING = RECIPES / "smollm2" / "read.toml"
BEGUN = "demo.json"  # the plan that a demo's folder was started with
WARMUP_TRANSCRIPTS = 3200  # transcripts of each protocol in the base's warm-up
JUDGED = ("evinote",)  # systems whose reward calls the judge


@dataclass(frozen=True, slots=True)
class WorldBase:
    """A base model. folder: name, completed by a seed. passage_format: retrieval.passage_format of given passages."""

    folder: str
    passage_format: str


NUMBERED = ("arena",)  # systems that need a base that names passages by their numbers
BASES = {"shared": WorldBase("base", GIVEN_FORMAT), "numbered": WorldBase("numbered", NUMBERED_FORMAT)}


def sets_of(*texts: str) -> list[str]:
    """Return recipe overrides as command-line words."""
    return [word for text in texts for word in ("--set", text)]


def _init(config: Path, data: Path, seed: int, out: Path, *more: str) -> list[str]:
    trained_on = [str(data / name) for name in ("corpus.jsonl", "train.jsonl", "warmup.jsonl")]
    words = ["init", "--config", str(config), "--train-tokenizer", *trained_on, "--vocab-size", "800", *more]
    return [*words, "--seed", str(seed), "--out", str(out)]


def _index(data: Path, out: Path) -> list[str]:
    words = ["index", "build", "--corpus", str(data / "corpus.jsonl"), "--encoder", "lexical", "--embed", "title+text"]
    return [*words, "--dim", str(DIM), "--out", str(out)]


# Bases


def world_stages(world: Path, seed: int = 0, judged: bool = True, base: str = "shared") -> list[list[str]]:
    """Return the commands that make the world and the base of this seed; each writes one folder. judged: whether to
    make the judge of entailment."""
    data = world / "data"

    def sft(recipe: str, model: Path, transcripts: str, out: Path) -> list[str]:
        sets = [f"run.seed={seed}", f"model.path={model}", f"sft.transcripts={data / transcripts}.jsonl"]
        return ["sft", str(RECIPES / "world" / recipe), *sets_of(*sets), "--out", str(out)]

    model, recite, shared = (world / f"{name}{seed}" for name in ("init", "recite", "base"))
    commands = [
        ["data", "invent", "--forms", str(WARMUP_TRANSCRIPTS), "--out", str(data)],
        _index(data, world / "index"),
        *([["data", "judge", "--out", str(world / "judge")]] if judged else []),
        _init(RECIPE.with_name("config.json"), data, seed, model, "--embedding-std", "0.4", "--zero-outputs"),
        sft("base.toml", model, "recitals", recite),
        sft("base.toml", recite, "forms", shared),
    ]
    if base != "numbered":
        return commands
    model = shared
    for stage, layer in zip(STAGES, (False, False, True, False), strict=True):
        if layer:
            words = ["init", "--model", str(model), "--add-layers", "1", "--seed", str(seed)]
            model = world / f"higher{seed}"
            commands.append([*words, "--out", str(model)])
        out = world / f"{stage}-{seed}"
        commands.append(sft("numbers.toml", model, stage, out))
        model = out
    return [*commands, sft("numbered.toml", model, "numbered", world / f"numbered{seed}")]


def below_gate(folder: Path) -> str:
    """Return in words by how much a fine-tuned model missed its gate, such as "base0 (79% of names copied right, gate
    97%)". It is empty if there was no gate, if it was reached, and for a folder without a finished fine-tuning."""
    file = folder / "sft.json"
    record = read_json_object(file) if file.is_file() else {}
    if record.get("passed", True):
        return ""
    return f"{folder.name} ({record['names copied right']:.0%} of names copied right, gate {record['gate']:.0%})"


def world_questions(world: Path, system: str, split: str) -> Path:
    """Return the question file of a split (train, dev or test) for a system."""
    return world / "data" / f"{'given_' if system in GIVEN else ''}{split}.jsonl"


def base_folder(world: Path, base: str, seed: int) -> str:
    return f"{world / BASES[base].folder}{seed}"


def world_paths(world: Path, system: str, base: str = "shared") -> list[str]:
    """Return recipe overrides for the files of the world that a system reads.

    These are the questions, with an index to search or with passages in the base's format, and the judge if the reward
    calls one.
    """
    data = [f"data.{split}={world_questions(world, system, split)}" for split in ("train", "dev")]
    if system in GIVEN:
        return [*data, f'retrieval.passage_format="{BASES[base].passage_format}"']
    judge = [f"judge.entailment={world / 'judge'}"] if system in JUDGED else []
    return [*data, f"retrieval.index={world / 'index'}", *judge]


# The demo. recipes/demo has the settings of the demo, recipes/smollm2 those of the demo of a real model.


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The options that a demo was started with. model: folder of a pretrained model, which learns to read; None: a
    model of `family` with random weights, which learns to search. questions: file of questions with passages, in place
    of the world's articles."""

    seed: int = 0
    set: tuple[str, ...] = ()
    model: str | None = None
    questions: str | None = None
    family: str | None = None  # a key of DEMO_CONFIGS; None: the first
    dtype: str | None = None  # of the pretrained model's computation; None: chosen for the processor

    @property
    def words(self) -> list[str]:
        """Return the options as command-line words."""
        named = [
            word
            for name in ("model", "questions", "family")
            if (value := getattr(self, name))
            for word in (f"--{name}", value)
        ]
        return [*named, "--seed", str(self.seed), *sets_of(*self.set)]


def stages(out: Path, plan: DemoPlan) -> list[list[str]]:
    """Return the commands of the demo, as argument lists of `thresher`."""
    report = ["report", str(out / "grpo"), "--out", str(out)]
    return [*(_searching_stages(out, plan) if plan.model is None else _reading_stages(out, plan)), report]


def _searching_stages(out: Path, plan: DemoPlan) -> list[list[str]]:
    data, model, warm, seed = out / "data", out / "init", out / "warmup", plan.seed
    sets = [
        f"data.train={data / 'train.jsonl'}",
        f"data.dev={data / 'test.jsonl'}",
        f"retrieval.index={out / 'index'}",
        f"sft.transcripts={data / 'warmup.jsonl'}",
        f"system.template={DEMO / 'prompt.txt'}",
        f"run.seed={seed}",
    ]
    recipe = [str(DEMO / "recipe.toml"), *sets_of(*sets, *plan.set)]
    return [
        ["data", "invent", "--out", str(data), "--seed", str(seed)],
        _init(DEMO / DEMO_CONFIGS[plan.family or "qwen2"], data, seed, model),
        _index(data, out / "index"),
        ["sft", *recipe, "--set", f"model.path={model}", "--out", str(warm)],
        ["train", *recipe, "--set", f"model.path={warm}", "--out", str(out / "grpo")],
    ]


def _reading_stages(out: Path, plan: DemoPlan) -> list[list[str]]:
    data = out / "data"
    sets = [
        f"model.path={plan.model}",
        f"model.dtype={plan.dtype or cpu_dtype()}",
        f"data.train={data / 'train.jsonl'}",
        f"data.dev={data / 'test.jsonl'}",
        f"run.seed={plan.seed}",
    ]
    if plan.questions is None:
        sets.append('retrieval.passage_format="{text}"')  # an article begins with its title
    world = ["data", "invent", "--articles", "--out", str(data), "--seed", str(plan.seed)]
    train = ["train", str(READING), *sets_of(*sets, *plan.set), "--out", str(out / "grpo")]
    return [*([world] if plan.questions is None else []), train]


def demo(out: Path, plan: DemoPlan, run: Callable[[list[str]], None], say: Callable[[str], None]) -> None:
    """Run the commands of the demo into `out`. run: execute one command in this process. say: print a line.

    In an existing folder, the demo continues: a stage whose folder exists is finished, an index resumes by itself, and
    a training or fine-tuning continues with --resume. Raise UserError if the folder is something else, was started with
    another plan, or is finished.
    """
    plan, before = begin(out, plan)
    started = time.perf_counter()
    for arguments in stages(out, plan):
        into = Path(arguments[arguments.index("--out") + 1])
        if arguments[0] == "report":
            atomic_write_text(out / "notes.md", _notes(out, plan))
        elif (into / "summary.json" if arguments[0] == "train" else into).exists():
            say(f"{into} is finished")
            continue
        elif to_be_resumed(arguments[0], into):
            arguments = [*arguments, "--resume"]
        say(f"$ thresher {shlex.join(arguments)}")
        run(arguments)
        _write_begun(out, plan, before + time.perf_counter() - started)
    summary = read_object(out / "grpo" / "summary.json")
    summary.pop("metrics", None)  # the digest of a file in another folder
    summary["seconds"] = before + time.perf_counter() - started
    write_object(out / "summary.json", summary)


def begin(out: Path, plan: DemoPlan) -> tuple[DemoPlan, float]:
    """Create the demo's folder, or continue an unfinished one; return its plan and the seconds of its finished stages.

    A new folder gets the split questions of a file. The plan has the dtype that the demo was started with. UserError
    for a setting that the recipe refuses, or a model without a config, before any folder is created.
    """
    load_recipe(DEMO / "recipe.toml" if plan.model is None else READING, plan.set, preset=preset_of)
    if plan.model is not None:
        read_config(plan.model)
        plan = replace(plan, dtype=cpu_dtype())
    file = out / BEGUN
    if not file.exists():
        if out.exists():
            raise UserError(
                f"{out}: exists already, and is not a demo's folder; choose another with --out, or delete it"
            )
        with staged_folder(out) as staged:
            if plan.questions is not None:
                split_questions(plan.questions, staged / "data", plan.seed)
            _write_begun(staged, plan, 0.0)
        return plan, 0.0
    found = read_json_object(file)
    if (out / "summary.json").exists():
        raise UserError(f"{out}: holds a demo that is finished; choose another folder with --out, or delete it")
    seed, sets = found.get("seed", 0), tuple(found.get("set", ()))
    names = ("model", "questions", "family", "dtype")
    begun = DemoPlan(seed=seed, set=sets, **{name: found.get(name) for name in names})
    if replace(begun, dtype=None) != replace(plan, dtype=None):
        words = shlex.join(begun.words)
        raise UserError(f"{out}: holds a demo that was begun with {words}; give the same, or choose another --out")
    return begun, float(found.get("seconds", 0.0))


def _write_begun(out: Path, plan: DemoPlan, seconds: float) -> None:
    atomic_write_text(out / BEGUN, json.dumps({**asdict(plan), "seconds": seconds}, indent=2) + "\n")


def _notes(out: Path, plan: DemoPlan) -> str:
    """Return the paragraphs for the report's page: the questions and, for a pretrained model, its transcripts."""
    if plan.model is None:
        return (DEMO / "notes.md").read_text(encoding="utf-8")
    asked = f"The questions are those of {plan.questions}, {HELD_OUT} of them held out."
    if plan.questions is None:
        asked = READING.with_name("notes.md").read_text(encoding="utf-8").strip()
    shown = [str(transcript).replace("\n", "  \n") for transcript in transcripts(out / "grpo")]
    return "\n\n".join([asked, FIRST_QUESTIONS, *shown]) + "\n"
