"""`thresher data ..`: what makes questions and transcripts, or looks at them."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from thresher.cli import flags
from thresher.cli.flags import Count, Device, Integer, Natural, Overrides, Texts, checked
from thresher.cli.parser import POSITIONAL, REPEATED, Command, Group, OneOf
from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.compressors.options import MEASURES
from thresher.engine.training.sft_data import EPISODE, FILCO, KINDS, RECOMP, STYLES, TAUGHT, Unused

if TYPE_CHECKING:
    from thresher.retrieval.questions import Question

DATA = Group("data", "make and check data", 100, "thresher data check train.jsonl", "ACTION")


class Convert(
    Command,
    group=DATA,
    help="convert published question sets to one file of questions",
    place=10,
    example="thresher data convert --in hotpot_train.json --limit 1000 --out train.jsonl --corpus corpus.jsonl",
):
    _source = OneOf(required=True)

    format: Annotated[str, "format of the files; auto (the default) detects it for each file and reports it"] = "auto"
    files: Annotated[Texts | None, _source, "--in", "FILE", "file or files of one question set"] = None
    mix: Annotated[
        Texts | None,
        _source,
        "NAME=FILE:COUNT",
        "several question sets, with the number of questions of each (default: all)",
    ] = None
    limit: Annotated[Count | None, "N", "maximum number of questions, with --in"] = None
    seed: Annotated[
        Integer | None, "seed of random sampling and shuffling; without it, the first questions are taken in order"
    ] = None
    aliases: Annotated[str | None, "FILE", "2Wiki's id_aliases.json, with further gold answers"] = None
    canary: Annotated[
        str | None,
        "TEXT",
        "canary of BrowseComp-Plus, the line at the end of its data set card, which decodes its questions",
    ] = None
    documents: Annotated[
        Texts | None, "--documents", "FILE", "corpus files of BrowseComp-Plus, to be written to --corpus"
    ] = None
    corpus: Annotated[
        str | None, "FILE", "also write the passages of the questions to this file, each once, for thresher index build"
    ] = None
    passages: Annotated[
        Natural | None,
        "N",
        "keep the first N passages of each question; 0: none, for questions whose passages are retrieved; default: all",
    ] = None
    skipped: Annotated[str | None, "FILE", "list the skipped records, with the reasons, in this file"] = None
    out: Annotated[str, "FILE", "JSONL file to write, gzipped if named .gz"]

    def __call__(self) -> None:
        from thresher.retrieval.datasets.convert import MixSource, convert, parse_mix

        if self.mix and self.limit is not None:
            raise UserError("--limit is for --in; with --mix, put a count after each file, such as NAME=FILE:1000")
        if self.mix:
            sources = [parse_mix(text) for text in self.mix]
        else:
            sources = [MixSource(paths=tuple(map(Path, self.files or ())), count=self.limit)]
        with console.counting("records read:") as counter:
            figures = convert(
                sources,
                self.out,
                fmt=self.format,
                on_record=lambda name, records: counter(records, f"of {name}"),
                documents=self.documents or (),
                **flags.pick(self, "seed aliases canary corpus skipped passages"),
            )
        _print_conversion(self.out, figures)
        console.answer(figures)


def _print_conversion(out: str, figures: dict[str, Any]) -> None:
    rows = [
        (source["source"], source["format"], source["records"], sum(source["skipped"].values()), source["kept"])
        for source in figures["sources"]
    ]
    console.table(f"questions in {out}", ("source", "format", "records read", "skipped", "kept"), rows)
    totals: dict[str, Any] = {name: value for name, value in figures.items() if name != "sources"}
    for source in figures["sources"]:
        asked = source["asked"]
        if asked is not None and source["kept"] < asked:
            totals[f"{source['source']}: asked for"] = asked
        totals |= {f"{source['source']}: skipped, {reason}": n for reason, n in source["skipped"].items()}
        totals |= {f"{source['source']}: {note}": n for note, n in source["notes"].items()}
    console.figures("in all", totals)


class Check(
    Command,
    group=DATA,
    help="check files of questions and print statistics",
    place=20,
    example="thresher data check train.jsonl",
):
    files: Annotated[
        Texts, POSITIONAL, "FILE", "files of questions, in the format of training; no two of them may share a question"
    ]

    def __call__(self) -> None:
        from thresher.retrieval.datasets.summary import summarize
        from thresher.retrieval.questions import check_apart, iter_questions

        found = {}
        for file in self.files:
            with console.counting("questions checked:") as counter:
                found[file] = summarize(file, counter)
        if len(self.files) > 1:
            check_apart((file, iter_questions(file)) for file in self.files)
        for file, figures in found.items():
            parts = ("kinds", "per question", "words")
            spreads = {f"{part}, {name}": figures[part][name] for part in parts for name in figures[part]}
            plain = {name: value for name, value in figures.items() if name not in parts}
            if not figures["passages"]:  # then whatever is said of them is 0
                plain = {name: value for name, value in plain.items() if "passage" not in name or name == "passages"}
            console.figures(file, {**plain, **spreads})
        console.answer(found if len(found) > 1 else figures)


class Show(
    Command,
    group=DATA,
    help="print a few questions with their passages",
    place=30,
    example="thresher data show train.jsonl --n 1",
):
    _which = OneOf()

    file: Annotated[str, POSITIONAL, "file of questions, in any format of data convert"]
    format: Annotated[str, "format of the file, as in data convert"] = "auto"
    n: Annotated[Count, _which, "N", "number of questions, from the start of the file; default 3"] = 3
    id: Annotated[Texts | None, _which, REPEATED, "ID", "id of a question to print; may be repeated"] = None
    full: Annotated[bool, "print passages and metadata in full"] = False

    def __call__(self) -> None:
        from thresher.retrieval.datasets.convert import AUTO, MixSource, Tally, read_source
        from thresher.retrieval.datasets.formats import find_format
        from thresher.retrieval.datasets.summary import excerpt

        fmt = None if self.format == AUTO else find_format(self.format)
        tally = Tally(name=self.file)
        questions = read_source(MixSource(paths=(Path(self.file),)), tally, fmt=fmt)
        chosen = islice(questions, self.n) if self.id is None else _with_ids(questions, self.id, self.file)
        shown = []
        for number, question in enumerate(chosen):
            shown.append(asdict(question))
            if not number:
                console.say(f"{self.file}, read as {tally.formats[0]}")
            console.say(f"\n{excerpt(question, whole=self.full)}")
        for where, _, reason in tally.skipped[: self.n]:
            console.say(f"\n{where}: skipped, {reason}")
        skipped = [{"where": where, "reason": reason} for where, _, reason in tally.skipped[: self.n]]
        console.answer({"file": self.file, "formats": list(tally.formats), "questions": shown, "skipped": skipped})


def _with_ids(questions: "Iterator[Question]", ids: Texts, path: str) -> "Iterator[Question]":
    wanted = set(ids)
    for question in questions:
        if question.id in wanted:
            wanted.remove(question.id)
            yield question
        if not wanted:
            return
    raise UserError(f"{path}: no question with the id {min(wanted)!r}; look at some with --n")


Nats = Annotated[float, checked(float, "a finite number of at least 0", lambda value: 0 <= value < math.inf)]


class Sft(
    Command,
    group=DATA,
    help="make records for supervised fine-tuning from questions or a teacher's transcripts",
    place=40,
    example="thresher data sft --kind reasoning --questions train.jsonl --out warmup.jsonl",
):
    _source = OneOf(required=True)

    kind: Annotated[
        str, {"choices": (*KINDS, FILCO, RECOMP, EPISODE, *TAUGHT)}, "kind of records to make; see docs/sft.md"
    ]
    questions: Annotated[
        str | None, _source, "JSONL file of questions in Thresher's format, with passages except for closed-book"
    ] = None
    transcripts: Annotated[
        str | None,
        _source,
        "FILE",
        "transcripts of a teacher, in the format of eval or score; only correct ones are used",
    ] = None
    answer: Annotated[
        str, {"choices": STYLES}, "format of the answer: between answer tags (the default), or without tags"
    ] = "tagged"
    template: Annotated[str | None, "prompt template, in place of the kind's own"] = None
    measure: Annotated[str | None, {"choices": MEASURES}, "measure of how much a sentence helps, for filco records"] = (
        None
    )
    margin: Annotated[
        Nats | None,
        "NATS",
        "minimum gap in answer log-likelihood between recomp's negatives and the best sentence; default 1",
    ] = None
    model: Annotated[
        str | None,
        "folder of the model that writes the analyses of reasoning records, or of the generator for recomp "
        "and --measure cxmi",
    ] = None
    device: Annotated[Device, "device of --model"] = "cpu"
    max_tokens: Annotated[Count, "maximum number of tokens per analysis"] = 512
    recipe: Annotated[str | None, "FILE", "recipe of episode records, with the system, tokenizer and index"] = None
    set: Overrides = []
    out: Annotated[str, "JSONL file to write"]

    def __call__(self) -> None:
        from thresher.common.jsonl import write_jsonl
        from thresher.engine.episode import read_template
        from thresher.engine.training.sft_data import refuse_nothing, say_unused, taught_records, write_unused

        out = Path(self.out)
        self._check()
        template = None if self.template is None else read_template(self.template, passages=self.kind != "closed-book")
        figures: dict[str, Any] = {}
        total = None
        if self.transcripts is not None:
            records, unused = taught_records(self.transcripts, self.kind, template)
        elif self.kind == EPISODE:
            records, unused, total = self._episodes()
        elif self.kind == RECOMP:
            records, unused = self._contrasts()
        else:
            records, unused, author = self._of_questions(template)
            figures |= {"analyses by": author} if self.kind == "reasoning" else {}
        total = len(records) + len(unused) if total is None else total
        refuse_nothing(records, unused, str(self.transcripts or self.questions), self.kind)
        write_jsonl(out, records)
        listed = out.with_name(f"{out.name}.unused.jsonl")
        write_unused(unused, listed)
        asked = "transcripts" if self.transcripts else "questions"
        counted = {asked: total, "records": len(records), "unused": len(unused)}
        console.figures(f"{self.kind} records in {out}", counted | figures)
        say_unused(unused, total, listed)

    def _of_questions(self, template: str | None) -> tuple[list[dict[str, Any]], list[Unused], str]:
        """Return records, the questions that gave none, and the author of the analyses."""
        from thresher.engine.training.sft_data import TEMPLATED, make_records, why_unusable
        from thresher.retrieval.questions import read_questions

        kind, questions = self.kind, read_questions(str(self.questions))
        usable = [question for question in questions if why_unusable(question, kind) is None]
        analyses, evidence, author = None, None, TEMPLATED
        if self.model is not None and kind == "reasoning":
            from thresher.engine.training.sft_analyses import write_analyses  # torch, which the other kinds do without

            author = self.model
            analyses = write_analyses(usable, self.model, self.device, self.max_tokens)
        elif kind == FILCO and self.measure is not None:
            from thresher.engine.compressors.training_data import silver_evidence

            author = self.measure
            evidence = silver_evidence(usable, self.measure, self.model, self.device, self.answer == "tagged")
        return *make_records(questions, kind, self.answer, template, analyses, author, evidence), author

    def _episodes(self) -> tuple[list[dict[str, Any]], list[Unused], int]:
        from thresher.engine.assemble import read_run_recipe
        from thresher.engine.training.sft_episodes import episode_records

        return episode_records(read_run_recipe(str(self.recipe), self.set), str(self.questions))

    def _contrasts(self) -> tuple[list[dict[str, Any]], list[Unused]]:
        from thresher.engine.compressors.training_data import MARGIN, make_contrasts
        from thresher.engine.training.sft_data import why_unusable
        from thresher.retrieval.questions import read_questions

        questions = read_questions(str(self.questions))
        why = {question.id: why_unusable(question, RECOMP) for question in questions}
        margin = MARGIN if self.margin is None else self.margin
        usable = [question for question in questions if why[question.id] is None]
        found = make_contrasts(usable, str(self.model), margin, self.device, self.answer == "tagged")
        short = f"no sentence makes the answer less likely than the best by more than {margin} nats"
        unused = [Unused(question.id, why[question.id] or short) for question in questions if question.id not in found]
        return [contrast.to_dict() for contrast in found.values()], unused

    def _check(self) -> None:
        """Raise UserError where flags contradict each other, before anything is read."""
        kind, tagged, model = self.kind, self.answer == "tagged", self.model
        if Path(self.out).exists():
            raise UserError(f"{self.out}: exists already; choose another file for the records")
        if not Path(self.out).parent.is_dir():
            raise UserError(f"{self.out}: the folder {Path(self.out).parent} does not exist; make it")
        if kind == "reasoning" and (self.template is not None or not tagged):
            raise UserError("--template and --answer are not for reasoning records, whose form and prompt are ARENA's")
        if (kind in TAUGHT) != (self.transcripts is not None):
            raise UserError(f"--transcripts is for {' and '.join(TAUGHT)}, which are made only from them")
        if kind in TAUGHT and not tagged:
            raise UserError("--answer is not for a teacher's transcripts, whose answers only decide which are kept")
        if (kind == FILCO) != (self.measure is not None):
            raise UserError(f"--measure ({', '.join(MEASURES)}) is for --kind filco, which needs it")
        if kind == FILCO and (self.measure == "cxmi") != (model is not None):
            raise UserError(
                "--measure cxmi needs --model, the generator whose answers it compares; the others need none"
            )
        if kind == FILCO and self.measure != "cxmi" and not tagged:
            raise UserError("--answer says how a generator answers; filco records use one only with --measure cxmi")
        if kind == RECOMP and model is None:
            raise UserError("--kind recomp needs --model, the generator whose answers say which sentence helps")
        if kind == RECOMP and self.template is not None:
            raise UserError("--template is a prompt, and a record of kind recomp has none")
        if (kind == EPISODE) != (self.recipe is not None) or (self.set and self.recipe is None):
            raise UserError(f"--recipe and its --set are for --kind {EPISODE}, which needs --recipe")
        if kind == EPISODE and (self.template is not None or not tagged):
            raise UserError("--template and --answer are not for episode records; set system.template in the recipe")
        if self.margin is not None and kind != RECOMP:
            raise UserError("--margin is for --kind recomp, whose worse sentences fall short of the best by it")
        if model is not None and kind not in ("reasoning", FILCO, RECOMP):
            raise UserError(f"--model writes the analyses of reasoning records; a record of kind {kind} has none")


Share = Annotated[float, checked(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)]


class Invent(
    Command,
    group=DATA,
    help="generate an invented world: corpus, questions and transcripts, or articles with questions",
    place=50,
    example="thresher data invent --out runs/world",
):
    out: Annotated[str, "folder to write"]
    seed: Annotated[Integer, "seed of the invented facts"] = 0
    passage_format: Annotated[str, "format of a passage, as in retrieval.passage_format of the recipe"] = " {text}"
    forms: Annotated[
        Natural,
        "number of warm-up transcripts per system, written with dev questions and questions with passages, "
        "for `study systems` and `reproduce`",
    ] = 0
    aware: Annotated[Share | None, "share of the warm-up transcripts that follow their question"] = None
    articles: Annotated[
        bool, "write only train, dev and test questions, with articles in natural sentences as their passages"
    ] = False
    agents: Annotated[
        bool, "generate a world for search agents: documents of several sentences, hearsay, unanswerable questions"
    ] = False
    coverage: Annotated[Share | None, "with --agents: share of the facts that the corpus states (default: all)"] = None

    def __call__(self) -> None:
        if self.agents:
            self._agents()
            return
        if self.coverage is not None:
            raise UserError(
                "--coverage is for --agents, whose corpus can leave facts out; give --agents, or leave it out"
            )
        if self.articles:
            from thresher.engine.world.articles import invent_articles

            if self.forms or self.aware is not None:
                raise UserError("--articles writes no warm-up transcripts; leave --forms and --aware out")
            console.figures(f"an invented world in {self.out}", invent_articles(self.out, self.seed))
            return
        from thresher.engine.world.facts import Size
        from thresher.engine.world.files import invent_files

        size = Size() if self.aware is None else replace(Size(), aware=self.aware)
        figures = invent_files(self.out, self.seed, size, self.passage_format, self.forms)
        console.figures(f"an invented world in {self.out}", figures)

    def _agents(self) -> None:
        from thresher.engine.world.agents import AgentWorld, invent_agents

        if self.forms or self.articles:
            raise UserError("--agents writes files of its own; leave --forms and --articles out")
        settings = AgentWorld()
        if self.aware is not None:
            settings = replace(settings, size=replace(settings.size, aware=self.aware))
        coverage = 1.0 if self.coverage is None else self.coverage
        figures = invent_agents(self.out, self.seed, coverage, self.passage_format, settings)
        console.figures(f"an invented world in {self.out}", figures)


class Judge(
    Command,
    group=DATA,
    help="train an entailment judge for the invented world",
    place=60,
    example="thresher data judge --out runs/world/judge",
):
    out: Annotated[str, "model folder to write, for judge.entailment"]
    seed: Annotated[Integer, "seed of the world, as in data invent"] = 0
    steps: Annotated[Natural, "number of training steps; 0: the built-in number"] = 0

    def __call__(self) -> None:
        from thresher.engine.world.judge import STEPS, make_judge

        figures = make_judge(self.out, self.seed, self.steps or STEPS)
        console.figures(f"a judge of entailment in {self.out}", figures)
