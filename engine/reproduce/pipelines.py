"""The commands that a table needs, in an order in which each finds its input.

    ExperimentRun = (row, seed)  ->  (base) -> warm-up -> training -> per column: extraction -> evaluation
                                              generator, once ------------------------->

A method has some of these stages (manifest.py). Experiments share equal commands: the base, a warm-up, a training, a
generator, and in the world one evaluation for all columns with the same noise. A method without any seed-dependent
training runs with one seed, because everything else is greedy. A command writes one folder or file; `train`, `eval` and
`extract` continue an unfinished one. At the paper's scale, recipes, models and files are those of the manifest; the
invented world has one recipe, short prompts and a base for each seed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thresher.common.files import atomic_write_text, read_json_object
from thresher.engine.extraction.run import SECTIONS
from thresher.engine.reproduce.manifest import (
    Method,
    PaperManifest,
    PaperTable,
    PublishedModel,
    ServedModel,
    TableRow,
    Tuning,
    files_of,
    switches_of,
)
from thresher.engine.store.run_folder import to_be_resumed
from thresher.engine.world.files import GIVEN, SEARCHING, template
from thresher.engine.world.stages import (
    BASES,
    JUDGED,
    RECIPE,
    RECIPES,
    base_folder,
    sets_of,
    world_paths,
    world_questions,
    world_stages,
)

OF_TRAININGS = ("sft", "data", "optim")  # sections that answering and extraction do not read
TEACHER_QUESTIONS = 1000  # as in EviOmni's empirical study
ON_GPU = ("model.device=cuda", "model.dtype=bfloat16")  # for commands without a recipe
# For every policy that extracts, as much as the generators read: MuSiQue's 20 paragraphs are 2,450 tokens on average.
ROOM_TO_READ = ("rollout.max_passage_tokens=3072", "rollout.max_context=4608")
SHARED_SEED = 0  # of the stages shared by all seeds: the generator that answers from evidence, and the teacher
ASKED_IN = {"reason-extract": "eviomni", "extract": "extract_only"}  # a tuning's kind or format -> prompt in the world
ASKED_IN |= {name: name for name in ("qa", "closed-book", "filco")}
# The world's generator reads names that it was not tuned on: its questions are those of the warm-up worlds, and it
# needs more steps than other tunings (docs/internals/log.md).
READS_NEW_NAMES = ("sft.steps=1500", "sft.lr=2e-3")

AGENT = Method(label="agent", baseline="search_loop")  # gives `extract --loop agentic` the agent's prompt


def without(overrides: Iterable[str], *sections: str) -> list[str]:
    return [text for text in overrides if text.partition(".")[0].strip() not in sections]


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a table, "paper" or "world", and its settings.

    seeds: of its experiments. overrides: for every recipe with their section. limit: maximum number of questions per
    evaluation. allow_keys: keys and the hosts that may receive them (NAME@HOST). servers: by the names of their models.
    prompts: folder of prompts that replace the manifest's and ours, named NAME.txt by `prompt_name`.
    """

    name: str
    seeds: Sequence[int] = (0,)
    overrides: tuple[str, ...] = ()
    limit: int | None = None
    allow_keys: tuple[str, ...] = ()
    servers: Mapping[str, ServedModel] = field(default_factory=dict)
    prompts: Path | None = None

    def prompt_of(self, method: Method, model: PublishedModel) -> list[str]:
        """Return [prompt file] for this model, the user's or a released checkpoint's; [] for our prompt."""
        file = None if self.prompts is None else self.prompts / f"{prompt_name(method, model)}.txt"
        if file is not None and file.is_file():
            return [str(file)]
        return [] if model.prompt is None else [model.prompt]

    @property
    def invented(self) -> bool:
        return self.name == "world"

    @property
    def of_trainings(self) -> list[str]:
        return without(self.overrides, "sft")

    @property
    def of_tunings(self) -> list[str]:
        """Return the overrides for `sft`: its questions are keys of [sft], and adapters have no masters to offload."""
        return [text for text in without(self.overrides, "data") if not text.startswith("optim.offload")]

    @property
    def of_answers(self) -> list[str]:
        """Return the overrides for `eval` and `extract`, whose questions are not in [data]."""
        return without(self.overrides, *OF_TRAININGS)

    @property
    def of_judges(self) -> list[str]:
        """Return the overrides for the evaluation of a run; everything else is in the run's recipe."""
        return [text for text in self.overrides if text.partition(".")[0].strip() == "judge"]

    @property
    def limiting(self) -> list[str]:
        return [] if self.limit is None else ["--limit", str(self.limit)]


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `thresher`, and the folder or file that it writes. lacking: missing input files, each with
    instructions to get it."""

    words: tuple[str, ...]
    folder: Path
    lacking: tuple[tuple[str, str], ...] = ()

    @property
    def finished(self) -> bool:
        if self.words[0] == "extract":  # its metrics are written last
            side = self.folder.with_suffix(".json")
            return side.is_file() and "figures" in read_json_object(side)
        last = {"train": "summary.json", "eval": "metrics.json"}.get(self.words[0])
        return self.folder.exists() if last is None else (self.folder / last).is_file()

    @property
    def blocked(self) -> bool:
        return bool(self.lacking) and not self.finished

    def to_run(self, scale: Scale) -> list[str]:
        """Return the words to run now, including words that do not change the result.

        These are --resume for an unfinished training or fine-tuning, keys for commands that may call a judge, and the
        address of a server's model.
        """
        keys = scale.allow_keys if self.words[0] in ("train", "eval") else ()
        served = [word for server in scale.servers.values() for word in server.flags(self.words)]
        allowed = [word for key in keys for word in ("--allow-key", key)]
        return [*self.words, *served, *allowed, *(["--resume"] if to_be_resumed(self.words[0], self.folder) else [])]


@dataclass(frozen=True, slots=True)
class ExperimentRun:
    """A row with one seed: the commands before its columns, and each column's extraction, evaluation or both. In the
    world, columns with the same noise share them."""

    row: TableRow
    seed: int
    before: tuple[Command, ...]
    columns: dict[str, tuple[Command, ...]] = field(default_factory=dict)

    @property
    def training(self) -> Path | None:
        """Return the folder of its GRPO run, None without one."""
        return next((command.folder for command in self.before if command.words[0] == "train"), None)

    def possible(self) -> Iterator[Command]:
        """Yield the commands that can run, in order, without those after a command whose data are missing."""
        if any(command.blocked for command in self.before):
            return
        yield from self.before
        for chain in dict.fromkeys(self.columns.values()):
            if not any(command.blocked for command in chain):
                yield from chain

    def leading_to(self, command: Command) -> tuple[Command, ...]:
        """Return the commands that must be finished before this one."""
        chains = [self.before, *((*self.before, *chain) for chain in self.columns.values())]
        chain = next(chain for chain in chains if command in chain)
        return chain[: chain.index(command)]

    def lacking(self) -> dict[str, str]:
        """Return the missing files that the commands read -> how to get each."""
        return dict(pair for command in self.every() if not command.finished for pair in command.lacking)

    def every(self) -> tuple[Command, ...]:
        return *self.before, *(command for chain in self.columns.values() for command in chain)


def prompt_name(method: Method, model: PublishedModel) -> str | None:
    """Return the name of a method's prompt for a model: a released checkpoint's, the baseline's or the system's."""
    return method.baseline or method.system if model.prompt is None else Path(model.prompt).stem


def columns_of(manifest: PaperManifest, table: PaperTable, invented: bool) -> list[str]:
    """Return the columns that a table has at this scale."""
    return [name for name in table.columns if not invented or manifest.sets[name].relations is not None]


def in_world(method: Method) -> bool:
    """Return whether the invented world's base knows the format of this method, or is trained for it."""
    taught = method.warmup is not None or method.generator is not None
    return method.world and (method.system in (*SEARCHING, *GIVEN) or (method.system is None and taught))


def rows_in_world(manifest: PaperManifest, table: PaperTable) -> list[TableRow]:
    """Return the rows that the invented world has, one per method because the world has one base model. Of the rows of
    one method, it is the row with the model that `against` names, or else the last row."""
    against = [row.model for row in table.rows if manifest.label(row) == table.against]
    chosen = {row.method: row for row in sorted(table.rows, key=lambda row: row.model in against)}
    return [row for row in table.rows if chosen[row.method] is row and in_world(manifest.methods[row.method])]


class Pipeline:
    """The stages of one row with one seed, at the paper's scale or in the invented world (in out/world)."""

    def __init__(self, manifest: PaperManifest, scale: Scale, out: Path, row: TableRow, seed: int) -> None:
        self.manifest, self.scale, self.out, self.row, self.seed = manifest, scale, out, row, seed
        self.method = method = manifest.methods[row.method]
        self.trained = manifest.methods[manifest.trains(row)]
        self.model = manifest.models[row.model]
        self.invented, self.world, self.base = scale.invented, out / "world", manifest.world_base
        self.of_model = "" if self.invented else f"-{row.model}"  # in the names of outputs
        # In the world: the prompt, shared by all methods that share a training, and the questions of a tuning.
        self.prompt = method.world_prompt or method.system or method.baseline or method.refiner[1]
        self.trained_on = str(world_questions(self.world, GIVEN[0], "train"))

    def experiment(self, columns: Sequence[str]) -> ExperimentRun:
        """Return all commands for these columns."""
        method, before, policy, trained = self.method, self.base_commands(), self.start(self.seed), False
        if self.trained.warmup is not None:
            prompt = self.scale.prompt_of(self.trained, self.model)  # the one in which the tuned model is asked
            before += self.tuning(self.trained.warmup, policy, self.seed, prompt)
            policy = str(before[-1].folder)
        if self.trained.recipe is not None:
            before.append(self.training(self.trained.recipe, policy))
            policy, trained = str(before[-1].folder), True
        generator = None
        if method.generator is not None and columns:
            before += self.tuning(method.generator, self.start(SHARED_SEED), SHARED_SEED)
            generator = str(before[-1].folder)
        chains = {}
        for column in columns:
            chain = [self.extraction(column, policy, trained)] if method.extract else []
            if generator is not None:
                chain.append(self.answering(column, generator, *chain))
            elif not chain:
                chain.append(self.evaluation(column, policy, trained))
            chains[column] = tuple(chain)
        return ExperimentRun(self.row, self.seed, tuple(before), chains)

    # Stages. policy: a model folder or, if `trained`, a GRPO run, whose recipe determines system and files.

    def base_commands(self) -> list[Command]:
        """Return the commands that make the world and its base."""
        if not self.invented:
            return []
        # A generator starts from the base of the shared seed, and a teacher is that base.
        warmup = self.manifest.tunings.get(self.trained.warmup or "")
        shares = self.method.generator is not None or (warmup is not None and warmup.teacher is not None)
        stages = [
            (tuple(words), Path(words[words.index("--out") + 1]))
            for seed in dict.fromkeys((self.seed, SHARED_SEED) if shares else (self.seed,))
            for words in world_stages(self.world, seed, self.method.system in JUDGED, self.base)
        ]
        return [Command(*stage) for stage in dict.fromkeys(stages)]

    def tuning(self, name: str, start: str, seed: int, prompt: Sequence[str] = ()) -> list[Command]:
        """Return the commands of a tuning that starts from `start`; the last one writes the model folder. prompt:
        [file] in place of our prompt, at the paper's scale."""
        commands: list[Command] = []
        tuning = self.manifest.tunings[name]
        folder = self.out / "tunings" / f"{name}{self.of_model}-seed{seed}"
        if self.invented:
            prompt = [str(prompt_file(self.world, ASKED_IN[tuning.kind or tuning.format or "qa"]))]
        if tuning.kind is None:
            asked = [f"sft.data={self.trained_on}"] if self.invented else []
            if self.invented and tuning.format == "qa":
                asked = [f"sft.data={world_questions(self.world, GIVEN[0], 'warmup')}", *READS_NEW_NAMES]
            data = [f"sft.format={tuning.format}", *asked, *(f"sft.template={file}" for file in prompt)]
        else:
            made = self.out / "tunings" / f"{name}.jsonl"
            commands, source = self.source(tuning)
            data = ["sft.data=", f"sft.transcripts={made}"]
            form = [word for file in prompt for word in ("--template", file)]
            if tuning.kind == "reasoning":  # its records have no prompt, and get the recipe's
                form, data = [], [*data, *(f"system.template={file}" for file in prompt)]
            words = ("data", "sft", "--kind", tuning.kind, *source, *form, "--out", str(made))
            commands.append(Command(words, made, self.absent(source)))
        recipe = RECIPE.with_name("tuning.toml") if self.invented else RECIPES / tuning.recipe
        sets = (f"model.path={start}", *data, f"run.seed={seed}", *tuning.overrides, *self.scale.of_tunings)
        return [*commands, self.by_recipe("sft", str(recipe), sets, folder)]

    def source(self, tuning: Tuning) -> tuple[list[Command], list[str]]:
        """Return the commands that make the source of a tuning's transcripts, and the `data sft` flags that name it."""
        if tuning.questions is not None and self.invented:
            return [], ["--questions", self.trained_on, *tuning.options]
        if tuning.questions is not None:
            named = [text.partition("=")[2] for text in self.scale.overrides if text.startswith("model.device=")]
            device = ["--device", ["cuda", *named][-1].partition(":")[0]] if "--model" in tuning.options else []
            return [], ["--questions", tuning.questions, *tuning.options, *device]
        if not self.invented:
            return [], ["--transcripts", str(tuning.teacher)]
        folder = self.out / "tunings" / "teacher"
        words = ("eval", *self.of_system("eviomni", self.start(SHARED_SEED)), "--set", "system.name=eviomni")
        asked = ("--questions", self.trained_on, "--limit", str(TEACHER_QUESTIONS))
        answering = Command((*words, *asked, "--out", str(folder)), folder)
        return [answering], ["--transcripts", str(folder / "trajectories.jsonl")]

    def training(self, recipe: str, policy: str) -> Command:
        folder = self.out / "runs" / f"{self.manifest.trains(self.row)}{self.of_model}-seed{self.seed}"
        if self.invented:
            recipe, placed = str(RECIPE), self.placed(self.prompt, policy)
        else:
            recipe, placed = str(RECIPES / recipe), (f"model.path={policy}", *self.template_of(self.trained))
        own = (*switches_of(self.trained), *self.overrides(self.trained), *self.scale.of_trainings)
        return self.by_recipe("train", recipe, (*placed, f"run.seed={self.seed}", *own), folder)

    def by_recipe(self, command: str, recipe: str, sets: tuple[str, ...], folder: Path) -> Command:
        words = (command, recipe, *sets_of(*sets), "--out", str(folder))
        return Command(words, folder, self.absent(files_of(recipe, sets)))

    def evaluation(self, column: str, policy: str, trained: bool) -> Command:
        """Return the evaluation of the policy's own answers."""
        folder = self.out / "evaluations" / self.column_name(column)
        if trained:
            words = ["eval", "--best-of", policy, *sets_of(*self.scale.of_judges)]
        else:
            own = [*self.overrides(self.method), *self.scale.of_answers]
            if self.invented:
                words = self.of_system(self.prompt, policy)
            else:
                words = self.named(policy)
                own = [*self.template_of(self.method), *self.model.overrides, *own]
            words = ["eval", *words, *sets_of(*switches_of(self.method), *own), *self.baseline]
        words += [*self.questions(column), *self.noise(column), *self.scale.limiting]
        return Command((*words, "--out", str(folder)), folder, self.absent(words))

    def extraction(self, column: str, policy: str, trained: bool) -> Command:
        file = self.out / "evidence" / f"{self.column_name(column)}.jsonl"
        words = ["extract", *self.extract_words(policy, trained), *self.noise(column), *self.scale.limiting]
        if self.method.evidence_tokens is not None:
            words += ["--evidence-tokens", str(self.method.evidence_tokens)]
        if self.method.agent is not None:
            model = self.manifest.models[self.method.agent]
            words += ["--loop", "agentic", "--agent-name" if model.served else "--agent-model", self.called(model)]
            words += [word for file in self.scale.prompt_of(AGENT, model) for word in ("--agent-template", file)]
        words += self.questions(column)
        return Command((*words, "--out", str(file)), file, self.absent(words))

    def extract_words(self, policy: str, trained: bool) -> list[str]:
        method, scale = self.method, self.scale
        # The overrides that `extract` accepts; with a run, it reads the system from the run.
        every = [*([] if trained else switches_of(method)), *self.overrides(method), *scale.of_answers]
        own = sets_of(*(text for text in every if text.partition(".")[0] in SECTIONS))
        if self.invented and trained:
            return ["--best-of", policy, *own]
        if self.invented:
            form = ["--template", str(prompt_file(self.world, self.prompt))]
            shown = sets_of(f'retrieval.passage_format="{BASES[self.base].passage_format}"')
            return ["--model", policy, *method.refiner, *form, *shown, *own, *self.baseline]
        if method.encoder is not None:
            named = ["--model", self.manifest.models[method.encoder].paper, *sets_of(*ON_GPU)]
        else:
            named = [*(["--best-of", policy] if trained else self.named(policy)), *sets_of(*ROOM_TO_READ)]
        asked = [] if trained or method.refiner else self.template_of(method)
        return [*named, *method.refiner, *sets_of(*asked), *own, *self.baseline]

    def answering(self, column: str, generator: str, evidence: Command | None = None) -> Command:
        """Return the generator's evaluation, from evidence if given."""
        folder = self.out / "evaluations" / self.column_name(column)
        if self.invented:
            tuning = self.manifest.tunings[str(self.method.generator)]
            words = ["eval", *self.of_system(tuning.format or "qa", generator), *sets_of(*self.scale.of_answers)]
        else:
            own = (*ON_GPU, *without(self.overrides(self.method), *OF_TRAININGS), *self.scale.of_answers)
            words = ["eval", "--model", generator, *self.chat, *sets_of(*own)]
        if evidence is not None:
            words += ["--baseline", "evidence", *sets_of(f"system.options.file={evidence.folder}")]
            words += self.questions(column)
        else:
            words += [*self.baseline, *self.questions(column), *self.noise(column)]
        words += [*self.scale.limiting, "--out", str(folder)]
        return Command(tuple(words), folder, self.absent(words))

    # Parts of the commands' words

    def absent(self, read: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return (name, how to get it) of missing files, and of models without a server, that these words refer to.

        A word refers to a name itself or as the value of an override; of several overrides of a key, the last counts.
        The user's overrides are ignored, because a judge may have the name of such a model.
        """
        known: dict[str, str] = dict(self.manifest.files)
        known |= {one.paper: one.get for one in self.manifest.models.values() if one.paper not in self.scale.servers}
        known |= {column.paper: column.get for column in self.manifest.sets.values() if not column.noise}
        last = {word.partition("=")[0]: word for word in read}.values()
        paths = dict.fromkeys(word.rpartition("=")[2] for word in last if word not in self.scale.overrides)
        return tuple((path, known[path]) for path in paths if path in known and not Path(path).exists())

    def template_of(self, method: Method) -> list[str]:
        """Return a prompt that replaces ours for a method, as an override."""
        return [f"system.template={file}" for file in self.scale.prompt_of(method, self.model)]

    def start(self, seed: int) -> str:
        """Return the model folder that all chains of this seed start from."""
        return base_folder(self.world, self.base, seed) if self.invented else self.model.paper

    def column_name(self, column: str) -> str:
        noise = self.manifest.sets[column].noise
        ours = (f"-noise{noise}" if noise else "") if self.invented else ""
        return f"{self.row.method}{self.of_model}{'' if self.invented else f'-{column}'}-seed{self.seed}{ours}"

    def overrides(self, method: Method) -> list[str]:
        """Return the method's overrides; in the world, without those that name a file of the paper's scale."""
        absent = self.manifest.files if self.invented else ()
        return [text for text in method.overrides if text.partition("=")[2] not in absent]

    def questions(self, column: str) -> list[str]:
        """Return the flag for the held-out questions; in the world, all columns use one file."""
        if self.invented:
            return ["--questions", str(world_questions(self.world, _protocol(self.prompt), "test"))]
        return ["--questions", self.manifest.sets[column].paper]

    def noise(self, column: str) -> list[str]:
        passages = self.manifest.sets[column].noise
        return ["--distractors", str(passages)] if passages else []

    @property
    def baseline(self) -> list[str]:
        return [] if self.method.baseline is None else ["--baseline", self.method.baseline]

    @property
    def chat(self) -> list[str]:
        return ["--prompt", "chat"] if self.model.chat else []

    def called(self, model: PublishedModel) -> str:
        """Return the model's folder, or its name at the server that was given for it."""
        server = self.scale.servers.get(model.paper)
        return model.paper if server is None else server.model

    def named(self, policy: str) -> list[str]:
        if self.model.served:
            return ["--answer-model", self.called(self.model)]
        return ["--model", policy, *self.chat, *sets_of(*ON_GPU)]

    def of_system(self, prompt: str, policy: str) -> list[str]:
        """Return the world's recipe for a system or for one of its other prompts."""
        return [str(RECIPE), *sets_of(*self.placed(prompt, policy))]

    def placed(self, prompt: str, policy: str) -> tuple[str, ...]:
        """Return the overrides that name the model and the files of the world's recipe."""
        paths = world_paths(self.world, _protocol(prompt), self.base)
        return (f"model.path={policy}", *paths, f"system.template={prompt_file(self.world, prompt)}")


def _protocol(prompt: str) -> str:
    """Return the protocol with which a prompt reads the world; for a tuning's prompt, any with given passages."""
    return prompt if prompt in (*SEARCHING, *GIVEN) else GIVEN[0]


def write_prompts(world: Path) -> None:
    """Write the prompts of the invented world: of each system that its base knows, and of each that a tuning teaches.
    Each prompt has a name, passages and the question."""
    world.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys((*SEARCHING, *GIVEN, *ASKED_IN.values())):
        shown = "" if name in SEARCHING or name == "closed-book" else "{passages}\n"
        text = template(name) if name in (*SEARCHING, *GIVEN) else f"{name}\n{shown}Question: {{question}}\n"
        atomic_write_text(prompt_file(world, name), text)


def prompt_file(world: Path, name: str) -> Path:
    return world / f"{name}.txt"


def experiment_runs(manifest: PaperManifest, table: PaperTable, scale: Scale, out: Path) -> list[ExperimentRun]:
    """Return all experiments of a table at this scale, in row order, without rows and columns that it does not have. A
    row that no seed changes (greedy answers of an untrained model) has one experiment."""
    found = []
    for row in rows_in_world(manifest, table) if scale.invented else table.rows:
        trained = manifest.methods[manifest.trains(row)]
        own_base = scale.invented and manifest.methods[row.method].generator is None
        for seed in scale.seeds if own_base or trained.warmup or trained.recipe else scale.seeds[:1]:
            pipeline = Pipeline(manifest, scale, out, row, seed)
            found.append(pipeline.experiment(columns_of(manifest, table, scale.invented)))
    return found
