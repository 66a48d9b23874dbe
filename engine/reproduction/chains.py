"""How the stages of a row follow one another, and the words of their commands at each scale.

Chain         one row with one seed: what its columns share, then of every column extraction and evaluation
PaperChain    the recipes, models and files that the manifest names
WorldChain    a base a seed, one recipe, and the questions of the invented world; short prompts
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thresher.engine.extraction.run import SECTIONS
from thresher.engine.reproduction.commands import (
    OF_TRAININGS,
    Cell,
    Command,
    Scale,
    columns_of,
    rows_in_world,
    without,
)
from thresher.engine.reproduction.manifest import Method, PaperManifest, PaperTable, PublishedModel, TableRow
from thresher.engine.reproduction.overrides import files_of, sets_of, switches_of
from thresher.engine.reproduction.world_prompts import ASKED_IN, prompt_file
from thresher.engine.synthetic.shared_base import (
    BASES,
    JUDGED,
    RECIPE,
    RECIPES,
    WorldBase,
    base_folder,
    world_paths,
    world_questions,
    world_stages,
)
from thresher.engine.synthetic.warmup_transcripts import GIVEN, SEARCHING

TEACHER_QUESTIONS = 1000  # as in EviOmni's empirical study
ON_GPU = ("model.device=cuda", "model.dtype=bfloat16")  # of what no recipe says it for
SHARED_SEED = 0  # of what all seeds share: the generator that answers from evidence, and the teacher


@dataclass(frozen=True, slots=True)
class Answerer:
    """The policy that extracts or answers: a model folder, or a GRPO run, whose recipe says system and files."""

    folder: str
    run: bool = False


class Chain(ABC):
    """One row's chain with one seed."""

    def __init__(self, manifest: PaperManifest, scale: Scale, out: Path, row: TableRow, seed: int) -> None:
        self.manifest, self.scale, self.out, self.row, self.seed = manifest, scale, out, row, seed
        self.method = manifest.methods[row.method]
        self.trained = manifest.methods[manifest.trains(row)]

    def cell(self, columns: Sequence[str]) -> Cell:
        method, before, policy = self.method, self.base_commands(), self.start(self.seed)
        if self.trained.warmup is not None:
            warmed = self.tuning(self.trained.warmup, policy, self.seed)
            before += warmed
            policy = str(warmed[-1].folder)
        answerer = Answerer(policy)
        if self.trained.recipe is not None:
            training = self.training(policy)
            before.append(training)
            answerer = Answerer(str(training.folder), run=True)
        generator = None
        if method.generator is not None and columns:
            tuned = self.tuning(method.generator, self.start(SHARED_SEED), SHARED_SEED)
            before += tuned
            generator = str(tuned[-1].folder)
        chains = {}
        for column in columns:
            name = self.column_name(column)
            extraction = self.extraction(column, name, answerer) if method.extract else None
            if generator is not None:
                answering = self.answering(column, name, generator, extraction)
            elif extraction is None:
                answering = self.evaluation(column, name, answerer)
            else:
                answering = None
            chains[column] = tuple(command for command in (extraction, answering) if command is not None)
        return Cell(self.row, self.seed, tuple(before), chains)

    def tuning(self, name: str, start: str, seed: int) -> list[Command]:
        """The commands of a tuning that begins at `start`; the last one writes the model folder."""
        commands: list[Command] = []
        tuning = self.manifest.tunings[name]
        folder = self.out / "tunings" / f"{name}{self.of_model()}-seed{seed}"
        if tuning.kind is None:
            data = [f"sft.format={tuning.format}", *self.answered_questions(name)]
        else:
            made = self.out / "tunings" / f"{name}.jsonl"
            teaching, source = self.source(name)
            words = ("data", "sft", "--kind", tuning.kind, *source, *self.template_of(tuning.kind))
            commands = [*teaching, Command((*words, "--out", str(made)), made, self.absent(source))]
            data = ["sft.data=", f"sft.transcripts={made}"]
        recipe = self.tuning_recipe(name)
        sets = (f"model.path={start}", *data, f"run.seed={seed}", *tuning.overrides, *self.scale.of_tunings)
        words = ("sft", recipe, *sets_of(*sets), "--out", str(folder))
        return [*commands, Command(words, folder, self.absent(files_of(recipe, sets)))]

    def training(self, policy: str) -> Command:
        folder = self.out / "runs" / f"{self.manifest.trains(self.row)}{self.of_model()}-seed{self.seed}"
        switches = switches_of(self.trained)
        recipe, *placed = self.recipe(policy)
        sets = (*placed, f"run.seed={self.seed}", *switches, *self.overrides(self.trained), *self.scale.of_trainings)
        words = ("train", recipe, *sets_of(*sets), "--out", str(folder))
        return Command(words, folder, self.absent(files_of(recipe, sets)))

    def evaluation(self, column: str, name: str, answerer: Answerer) -> Command:
        """Of the policy's own answers."""
        folder = self.out / "evaluations" / name
        if answerer.run:
            words = ["eval", "--best-of", answerer.folder, *sets_of(*self.scale.of_judges)]
        else:
            words = [*self.eval_words(answerer.folder), *self.baseline()]
        words += [*self.questions(column), *self.noise(column), *self.scale.limiting()]
        return Command((*words, "--out", str(folder)), folder, self.absent(words))

    def extraction(self, column: str, name: str, answerer: Answerer) -> Command:
        file = self.out / "evidence" / f"{name}.jsonl"
        words = ["extract", *self.extract_words(answerer), *self.noise(column), *self.scale.limiting()]
        if self.method.evidence_tokens is not None:
            words += ["--evidence-tokens", str(self.method.evidence_tokens)]
        if self.method.agent is not None:
            model = self.manifest.models[self.method.agent]
            words += ["--loop", "agentic", "--agent-name" if model.served else "--agent-model", self.called(model)]
        words += self.questions(column)
        return Command((*words, "--out", str(file)), file, self.absent(words))

    def answering(self, column: str, name: str, generator: str, evidence: Command | None) -> Command:
        """The generator's evaluation, from evidence where there is any."""
        folder = self.out / "evaluations" / name
        baseline = "evidence" if evidence is not None else self.method.baseline
        assert baseline is not None, f"{self.row.method}: a generator answers as a baseline asks, or from evidence"
        given = [] if evidence is None else sets_of(f"system.options.file={evidence.folder}")
        noise = [] if evidence is not None else self.noise(column)
        words = [*self.answer_words(generator), "--baseline", baseline, *given, *self.questions(column), *noise]
        words += [*self.scale.limiting(), "--out", str(folder)]
        return Command(tuple(words), folder, self.absent(words))

    def noise(self, column: str) -> list[str]:
        passages = self.manifest.sets[column].noise
        return ["--distractors", str(passages)] if passages else []

    def overrides(self, method: Method) -> list[str]:
        return list(method.overrides)

    def absent(self, read: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Of these words those that name, or set to, a file that is not there, or a model that no given server has,
        with the manifest's way to get it: of overrides of one key the last. Not of those that were asked for: a judge
        may be called as such a model is."""
        known: dict[str, str] = dict(self.manifest.files)
        known |= {one.paper: one.get for one in self.manifest.models.values() if one.paper not in self.scale.servers}
        known |= {column.paper: column.get for column in self.manifest.sets.values() if not column.noise}
        last = {word.partition("=")[0]: word for word in read}.values()
        paths = dict.fromkeys(word.rpartition("=")[2] for word in last if word not in self.scale.overrides)
        return tuple((path, known[path]) for path in paths if path in known and not Path(path).exists())

    def baseline(self) -> list[str]:
        return [] if self.method.baseline is None else ["--baseline", self.method.baseline]

    def called(self, model: PublishedModel) -> str:
        """Its folder, or its name at the server that was given for it."""
        server = self.scale.servers.get(model.paper)
        return model.paper if server is None else server.model

    def of_extract(self, answerer: Answerer) -> list[str]:
        """Of the overrides those that `extract` knows; of a run it knows the system."""
        switches = [] if answerer.run else switches_of(self.method)
        every = [*switches, *self.overrides(self.method), *self.scale.of_answers]
        return sets_of(*(text for text in every if text.partition(".")[0] in SECTIONS))

    @abstractmethod
    def base_commands(self) -> list[Command]:
        """What makes the base that everything begins at, where it is made here."""

    @abstractmethod
    def start(self, seed: int) -> str:
        """The model folder that everything of this seed begins at."""

    @abstractmethod
    def of_model(self) -> str: ...

    @abstractmethod
    def column_name(self, column: str) -> str: ...

    @abstractmethod
    def source(self, name: str) -> tuple[list[Command], list[str]]:
        """Of `data sft` the flags that name what a tuning's transcripts are made of, and before it the commands that
        make that."""

    @abstractmethod
    def answered_questions(self, name: str) -> list[str]:
        """Overrides that name the questions that a tuning is on."""

    @abstractmethod
    def template_of(self, kind: str) -> list[str]: ...

    @abstractmethod
    def tuning_recipe(self, name: str) -> str: ...

    @abstractmethod
    def recipe(self, policy: str) -> list[str]:
        """The recipe of a training, and as overrides what puts it into its place."""

    @abstractmethod
    def eval_words(self, policy: str) -> list[str]:
        """Of the evaluation of a model folder, but for its baseline."""

    @abstractmethod
    def extract_words(self, answerer: Answerer) -> list[str]: ...

    @abstractmethod
    def answer_words(self, generator: str) -> list[str]: ...

    @abstractmethod
    def question_file(self, column: str) -> str: ...

    def questions(self, column: str) -> list[str]:
        return ["--questions", self.question_file(column)]


class PaperChain(Chain):
    """What the manifest names."""

    def base_commands(self) -> list[Command]:
        return []

    def start(self, seed: int) -> str:
        return self.manifest.models[self.row.model].paper

    def of_model(self) -> str:
        return f"-{self.row.model}"

    def named(self, policy: str) -> list[str]:
        model = self.manifest.models[self.row.model]
        if model.served:
            return ["--answer-model", self.called(model)]
        return ["--model", policy, *self.chat(), *sets_of(*ON_GPU)]

    def chat(self) -> list[str]:
        return ["--prompt", "chat"] if self.manifest.models[self.row.model].chat else []

    def column_name(self, column: str) -> str:
        return f"{self.row.method}-{self.row.model}-{column}-seed{self.seed}"

    def source(self, name: str) -> tuple[list[Command], list[str]]:
        tuning = self.manifest.tunings[name]
        if tuning.questions is not None:
            device = ["--device", self.scale.device] if "--model" in tuning.options else []
            return [], ["--questions", tuning.questions, *tuning.options, *device]
        assert tuning.teacher is not None, f"[tunings.{name}]: a kind needs questions or a teacher"
        return [], ["--transcripts", tuning.teacher]

    def answered_questions(self, name: str) -> list[str]:
        return []

    def template_of(self, kind: str) -> list[str]:
        return []

    def tuning_recipe(self, name: str) -> str:
        return str(RECIPES / self.manifest.tunings[name].recipe)

    def recipe(self, policy: str) -> list[str]:
        assert self.trained.recipe is not None
        return [str(RECIPES / self.trained.recipe), f"model.path={policy}", *self.scale.prompt_of(self.trained)]

    def eval_words(self, policy: str) -> list[str]:
        own = self.manifest.models[self.row.model].overrides
        asked = [*switches_of(self.method), *self.scale.prompt_of(self.method)]
        sets = sets_of(*asked, *own, *self.overrides(self.method), *self.scale.of_answers)
        return ["eval", *self.named(policy), *sets]

    def extract_words(self, answerer: Answerer) -> list[str]:
        if self.method.encoder is not None:
            named = ["--model", self.manifest.models[self.method.encoder].paper, *sets_of(*ON_GPU)]
        else:
            named = ["--best-of", answerer.folder] if answerer.run else self.named(answerer.folder)
        asked = [] if answerer.run or self.method.refiner else self.scale.prompt_of(self.method)
        wider = sets_of(*self.method.extract_overrides, *asked)
        return [*named, *self.method.refiner, *wider, *self.of_extract(answerer), *self.baseline()]

    def answer_words(self, generator: str) -> list[str]:
        own = without(self.overrides(self.method), *OF_TRAININGS)
        return ["eval", "--model", generator, *self.chat(), *sets_of(*ON_GPU, *own, *self.scale.of_answers)]

    def question_file(self, column: str) -> str:
        return self.manifest.sets[column].paper


class WorldChain(Chain):
    """The invented world, in out/world, with a base of its own for each seed."""

    @property
    def world(self) -> Path:
        return self.out / "world"

    @property
    def _base(self) -> WorldBase:
        return BASES[self.manifest.world_base]

    def base_commands(self) -> list[Command]:
        # A generator begins at the shared seed's base, and a teacher is that base.
        warmup = self.manifest.tunings.get(self.trained.warmup or "")
        shares = self.method.generator is not None or (warmup is not None and warmup.teacher is not None)
        stages = [
            (tuple(words), Path(words[words.index("--out") + 1]))
            for seed in dict.fromkeys((self.seed, SHARED_SEED) if shares else (self.seed,))
            for words in world_stages(self.world, seed, self.method.system in JUDGED, self.manifest.world_base)
        ]
        return [Command(*stage) for stage in dict.fromkeys(stages)]

    def start(self, seed: int) -> str:
        return base_folder(self.world, self.manifest.world_base, seed)

    def of_model(self) -> str:
        return ""

    def column_name(self, column: str) -> str:
        noise = self.manifest.sets[column].noise
        return f"{self.row.method}-seed{self.seed}" + (f"-noise{noise}" if noise else "")

    def source(self, name: str) -> tuple[list[Command], list[str]]:
        tuning = self.manifest.tunings[name]
        if tuning.questions is not None:
            return [], ["--questions", self._trained_on(), *tuning.options]
        folder = self.out / "tunings" / "teacher"
        words = ("eval", *self.of_system("eviomni", self.start(SHARED_SEED)), "--set", "system.name=eviomni")
        asked = ("--questions", self._trained_on(), "--limit", str(TEACHER_QUESTIONS))
        answering = Command((*words, *asked, "--out", str(folder)), folder)
        return [answering], ["--transcripts", str(folder / "trajectories.jsonl")]

    def answered_questions(self, name: str) -> list[str]:
        prompt = prompt_file(self.world, self.manifest.tunings[name].format or "qa")
        return [f"sft.data={self._trained_on()}", f"sft.template={prompt}"]

    def template_of(self, kind: str) -> list[str]:
        return ["--template", str(prompt_file(self.world, ASKED_IN[kind]))]

    def tuning_recipe(self, name: str) -> str:
        return str(RECIPE.with_name("tuning.toml"))

    def recipe(self, policy: str) -> list[str]:
        return [str(RECIPE), *self.placed(self._prompt(), policy)]

    def of_system(self, prompt: str, policy: str) -> list[str]:
        """The world's recipe, for a system or for one of its other prompts."""
        return [str(RECIPE), *sets_of(*self.placed(prompt, policy))]

    def placed(self, prompt: str, policy: str) -> tuple[str, ...]:
        """What puts that recipe into its place, as overrides."""
        paths = world_paths(self.world, _protocol(prompt), self.manifest.world_base)
        return (f"model.path={policy}", *paths, f"system.template={prompt_file(self.world, prompt)}")

    def eval_words(self, policy: str) -> list[str]:
        sets = sets_of(*switches_of(self.method), *self.overrides(self.method), *self.scale.of_answers)
        return ["eval", *self.of_system(self._prompt(), policy), *sets]

    def extract_words(self, answerer: Answerer) -> list[str]:
        if answerer.run:
            return ["--best-of", answerer.folder, *self.of_extract(answerer)]
        template = ["--template", str(prompt_file(self.world, self._prompt()))]
        sets = [*sets_of(f'retrieval.passage_format="{self._base.passage_format}"'), *self.of_extract(answerer)]
        return ["--model", answerer.folder, *self.method.refiner, *template, *sets, *self.baseline()]

    def answer_words(self, generator: str) -> list[str]:
        assert self.method.generator is not None
        prompt = self.manifest.tunings[self.method.generator].format or "qa"
        return ["eval", *self.of_system(prompt, generator), *sets_of(*self.scale.of_answers)]

    def question_file(self, column: str) -> str:
        """The held-out questions as the method is asked them, one file for all columns."""
        return str(world_questions(self.world, _protocol(self._prompt()), "test"))

    def overrides(self, method: Method) -> list[str]:
        """Without those that name a file of the paper's scale."""
        return [text for text in method.overrides if text.partition("=")[2] not in self.manifest.files]

    def _prompt(self) -> str:
        # What shares a training with another method must have the same prompt.
        method = self.method
        return method.world_prompt or method.system or method.baseline or method.refiner[1]

    def _trained_on(self) -> str:
        """The questions of a tuning: they bring their passages."""
        return str(world_questions(self.world, GIVEN[0], "train"))


def _protocol(prompt: str) -> str:
    """The protocol that reads the world as a prompt does: of those that tunings teach, any that is given passages."""
    return prompt if prompt in (*SEARCHING, *GIVEN) else GIVEN[0]


def cells_of(manifest: PaperManifest, table: PaperTable, scale: Scale, out: Path) -> list[Cell]:
    """All cells of a table at this scale, in the order of its rows; rows and columns that it does not have there are
    left out. A row that no seed changes, greedy answers of what is not trained, has one."""
    chain_of = WorldChain if scale.invented else PaperChain
    found = []
    for row in rows_in_world(manifest, table) if scale.invented else table.rows:
        method = manifest.methods[row.method]
        trained = manifest.methods[manifest.trains(row)]
        own_base = scale.invented and method.generator is None
        for seed in scale.seeds if own_base or trained.warmup or trained.recipe else scale.seeds[:1]:
            making = chain_of(manifest, scale, out, row, seed)
            found.append(making.cell(columns_of(manifest, table, scale.invented)))
    return found
