"""What has to be run for a table: commands, in an order in which each finds what it reads.

    cell = (row, seed)  ->  (base) -> warm-up -> training -> of each column its extraction -> its evaluation
                                     generator, once ----------------------------------->

Of these a method has some (manifest.py). Cells share whatever is the same: the base, a warm-up, a training, a
generator, and in the world one evaluation for all columns of the same noise, which are parts of its questions. A method
that nothing trains by seed has one seed, for all else is greedy.

Every command writes one folder or file, which is finished when its last file is there; `train`, `eval` and `extract` go
on with an unfinished one. Which words a stage has at which scale: chains.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thresher.common.files import read_json_object
from thresher.engine.reproduction.manifest import Method, PaperManifest, PaperTable, TableRow
from thresher.engine.reproduction.servers import ServedModel
from thresher.engine.store.run_folder import to_be_resumed
from thresher.engine.synthetic.warmup_transcripts import GIVEN, SEARCHING

OF_TRAININGS = ("sft", "data", "optim")  # sections that no answer and no extraction reads


def without(overrides: Iterable[str], *sections: str) -> list[str]:
    return [text for text in overrides if text.partition(".")[0].strip() not in sections]


@dataclass(frozen=True, slots=True)
class Scale:
    """At which scale a table is run, "paper" or "world", with which seeds; overrides of every recipe that has their
    section, how many questions an evaluation has at most, which keys may go to which hosts, the servers of models by
    their names, and a folder of prompts that replace ours, NAME.txt for each system or baseline."""

    name: str
    seeds: Sequence[int] = (0,)
    overrides: tuple[str, ...] = ()
    limit: int | None = None
    allow_keys: tuple[str, ...] = ()
    servers: Mapping[str, ServedModel] = field(default_factory=dict)
    prompts: Path | None = None

    def prompt_of(self, method: Method) -> list[str]:
        """The user's own prompt of a method's system or baseline, as an override; none where there is no such file."""
        file = None if self.prompts is None else self.prompts / f"{prompt_name(method)}.txt"
        return [f"system.template={file}"] if file is not None and file.is_file() else []

    @property
    def invented(self) -> bool:
        return self.name == "world"

    @property
    def of_trainings(self) -> list[str]:
        return without(self.overrides, "sft")

    @property
    def of_tunings(self) -> list[str]:
        """The questions of `sft` are keys of [sft], and its adapters have no masters to keep in CPU memory."""
        return [text for text in without(self.overrides, "data") if not text.startswith("optim.offload")]

    @property
    def of_answers(self) -> list[str]:
        """Of `eval` and `extract`, whose questions are none of [data]."""
        return without(self.overrides, *OF_TRAININGS)

    @property
    def of_judges(self) -> list[str]:
        """Of the evaluation of a run, whose recipe has all else."""
        return [text for text in self.overrides if text.partition(".")[0].strip() == "judge"]

    @property
    def device(self) -> str:
        """Of a command that takes no overrides, at paper scale: a GPU where they do not say otherwise."""
        named = [text.partition("=")[2] for text in self.overrides if text.startswith("model.device=")]
        return ["cuda", *named][-1].partition(":")[0]

    def limiting(self) -> list[str]:
        return [] if self.limit is None else ["--limit", str(self.limit)]


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `thresher`, and the folder or the file that it writes. lacking: what it reads and nobody has put
    there, each with how to get it."""

    words: tuple[str, ...]
    folder: Path
    lacking: tuple[tuple[str, str], ...] = ()

    @property
    def finished(self) -> bool:
        if self.words[0] == "extract":  # its figures come last
            side = self.folder.with_suffix(".json")
            return side.is_file() and "figures" in read_json_object(side)
        last = {"train": "summary.json", "eval": "metrics.json"}.get(self.words[0])
        return self.folder.exists() if last is None else (self.folder / last).is_file()

    def to_run(self, scale: Scale) -> list[str]:
        """The words to run now: a training or a fine-tuning that was begun goes on, what may ask a judge may send the
        keys, and a server's model has its address. None of these decides what is made."""
        keys = scale.allow_keys if self.words[0] in ("train", "eval") else ()
        served = [word for server in scale.servers.values() for word in server.flags(self.words)]
        allowed = [word for key in keys for word in ("--allow-key", key)]
        return [*self.words, *served, *allowed, *(["--resume"] if to_be_resumed(self.words[0], self.folder) else [])]


@dataclass(frozen=True, slots=True)
class Cell:
    """A row with one seed: the commands before its columns, and of each column its extraction, its evaluation or both;
    in the world columns of the same noise have the same."""

    row: TableRow
    seed: int
    before: tuple[Command, ...]
    columns: dict[str, tuple[Command, ...]] = field(default_factory=dict)

    @property
    def training(self) -> Path | None:
        """The folder of its GRPO run."""
        return next((command.folder for command in self.before if command.words[0] == "train"), None)

    def possible(self) -> Iterator[Command]:
        """The commands that can be run, in order: none behind one whose data are absent."""
        if any(command.lacking and not command.finished for command in self.before):
            return
        yield from self.before
        for chain in dict.fromkeys(self.columns.values()):
            if not any(command.lacking and not command.finished for command in chain):
                yield from chain

    def leading_to(self, command: Command) -> tuple[Command, ...]:
        """What has to be there before it."""
        chains = [self.before, *((*self.before, *chain) for chain in self.columns.values())]
        chain = next(chain for chain in chains if command in chain)
        return chain[: chain.index(command)]

    def lacking(self) -> dict[str, str]:
        """What is absent of all that the cell's commands read, and how to get it."""
        return dict(pair for command in self.every() if not command.finished for pair in command.lacking)

    def every(self) -> tuple[Command, ...]:
        return *self.before, *(command for chain in self.columns.values() for command in chain)


def prompt_name(method: Method) -> str | None:
    """Whose prompt a method asks in: its baseline's, or its system's."""
    return method.baseline or method.system


def columns_of(manifest: PaperManifest, table: PaperTable, invented: bool) -> list[str]:
    """The columns that a table has at this scale."""
    return [name for name in table.columns if not invented or manifest.sets[name].relations is not None]


def in_world(method: Method) -> bool:
    """Whether the invented world's base knows the form of this method, or is taught it."""
    taught = method.warmup is not None or method.generator is not None
    return method.world and (method.system in (*SEARCHING, *GIVEN) or (method.system is None and taught))


def rows_in_world(manifest: PaperManifest, table: PaperTable) -> list[TableRow]:
    """The rows that the invented world has. Of a paper's models it has one base, so of the rows of one method that of
    the model that `against` names, or else the last."""
    against = [row.model for row in table.rows if manifest.label(row) == table.against]
    chosen = {row.method: row for row in sorted(table.rows, key=lambda row: row.model in against)}
    return [row for row in table.rows if chosen[row.method] is row and in_world(manifest.methods[row.method])]
