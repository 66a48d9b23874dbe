"""`thresher study ..`, a claim of the method put to the test; `demo` and `reproduce`, chains of commands as well."""

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from thresher.cli import flags
from thresher.cli.flags import Count, Device, Integer, Overrides, Seed, Texts
from thresher.cli.parser import ANY_NUMBER, POSITIONAL, REPEATED, Command, Group, OneOf
from thresher.common import console, signals
from thresher.common.errors import UserError

if TYPE_CHECKING:
    from thresher.bench.studies.runs import ModelRecipe

STUDY = Group("study", "test a claim of the method", 130, "thresher study kl", "CLAIM")
_SUBJECT = OneOf()


class OfModel(Command):
    """Flags of a study that takes a pretrained model by a recipe."""

    recipe: Annotated[
        str | None, _SUBJECT, "FILE", "recipe (TOML file) whose model and questions are used in place of the demo's"
    ] = None
    model: Annotated[str | None, "FOLDER", "model folder, with --recipe; short for --set model.path="] = None
    set: Overrides = []

    def chosen(self, device: str | None = None) -> "ModelRecipe | None":
        """Return what the flags name. device: of the recipe's model. UserError for --model, --set or a device without
        --recipe."""
        from thresher.bench.studies.runs import ModelRecipe

        if self.recipe is not None:
            return ModelRecipe(self.recipe, self.model, tuple(flags.overrides(self.set, device)))
        for flag, value in (("--model", self.model), ("--set", self.set), ("--device", device)):
            if value:
                raise UserError(f"{flag}: belongs to a recipe; name it with --recipe, such as smollm2/read.toml")
        return None


class Kl(
    OfModel,
    group=STUDY,
    help="compare KL estimators: value, gradient, training",
    place=10,
    example="thresher study kl --start runs/demo --steps 10 --seeds 0",
):
    out: Annotated[str, "output folder; finished parts are not repeated"] = "runs/study-kl"
    start: Annotated[
        str | None, _SUBJECT, "FOLDER", "folder of `thresher demo`, whose world and warm-up are reused"
    ] = None
    run: Annotated[
        str | None,
        _SUBJECT,
        "folder of `thresher train`; evaluate the estimators on its stored tokens, without training",
    ] = None
    steps: Annotated[Count | None, "number of steps per training run; default: 30, with --recipe 20"] = None
    seeds: Annotated[list[Seed] | None, "SEED", "seeds of the training runs; default: 0 1, with --recipe 0"] = None
    device: Annotated[
        Device | None, "device of the model, with --recipe; short for --set model.device=; default: the recipe's"
    ] = None

    def __call__(self) -> None:
        from thresher.bench.studies.kl import run_study
        from thresher.common.files import read_json_object

        chosen = self.chosen(self.device)
        if self.run is not None:
            self._of_run(self.run)
            return
        steps, seeds = (30, [0, 1]) if chosen is None else (20, [0])
        with signals.on_interrupt(lambda: f"{self.out} keeps what is finished"):
            start = chosen or self.start
            run_study(Path(self.out), start, self.steps or steps, self.seeds or seeds, self.run_command)
        console.answer(read_json_object(Path(self.out) / "kl.json"))

    def _of_run(self, run: str) -> None:
        from thresher.bench.studies.kl_run import run_study_of_run
        from thresher.common.files import read_json_object

        for flag, value in (("--steps", self.steps), ("--seeds", self.seeds)):
            if value is not None:
                raise UserError(f"{flag}: belongs to training runs, and --run trains nothing; leave it out")
        run_study_of_run(Path(self.out), run)
        console.answer(read_json_object(Path(self.out) / "kl_run.json"))


class Credit(
    Command,
    group=STUDY,
    help="compare credit assignment rules with the policy gradient, by enumeration",
    place=15,
    example="thresher study credit --draws 200",
):
    out: Annotated[str, "folder for credit.json and credit.png"] = "runs/study-credit"
    draws: Annotated[Count, "number of random policies"] = 50
    seed: Annotated[Seed, "seed of the random policies"] = 0

    def __call__(self) -> None:
        from thresher.bench.studies.credit import run_study
        from thresher.common.files import read_json_object

        run_study(Path(self.out), self.draws, self.seed)
        console.answer(read_json_object(Path(self.out) / "credit.json"))


class Mask(
    OfModel,
    group=STUDY,
    help="compare ways to exclude retrieved tokens from the loss: cost and gradient",
    place=20,
    example="thresher study mask --run runs/demo/grpo --out runs/masked",
):
    out: Annotated[str, "folder for mask.json and mask.png"] = "runs/study-mask"
    run: Annotated[
        str | None, _SUBJECT, "folder of `thresher train` or `demo`; use its last weights and stored trajectories"
    ] = None
    seed: Annotated[Seed, _SUBJECT, "seed of a scripted batch and random weights, without --run and --recipe"] = 0
    limit: Annotated[Count | None, "maximum number of trajectories in the batch; default: 64, with --recipe 16"] = None
    repeats: Annotated[Count | None, "number of timed steps per treatment; default: 7, with --recipe 3"] = None
    device: Annotated[Device, "device of the computation"] = "cpu"

    def __call__(self) -> None:
        from thresher.bench.studies.mask import run_study
        from thresher.common.files import read_json_object

        chosen = self.chosen()
        repeats, limit = (7, 64) if chosen is None else (3, 16)
        batch, repeats, limit = chosen or self.run, self.repeats or repeats, self.limit or limit
        run_study(Path(self.out), batch, self.seed, repeats, limit, self.device)
        console.answer(read_json_object(Path(self.out) / "mask.json"))


class Leak(
    Command,
    group=STUDY,
    help="measure what a soft mask in place of EviOmni's hard mask would leak",
    place=25,
    example="thresher study leak --recipe eviomni/laptop.toml --model models/eviomni",
):
    recipe: Annotated[str, "FILE", "recipe (TOML file) of eviomni or lear, with the questions in data.dev"]
    model: Annotated[str | None, "FOLDER", "model folder; short for --set model.path="] = None
    out: Annotated[str, "folder for leak.json and rows.jsonl"] = "runs/study-leak"
    set: Overrides = []
    device: flags.ModelDevice = None

    def __call__(self) -> None:
        from thresher.bench.studies.leak import run_study
        from thresher.bench.studies.runs import ModelRecipe
        from thresher.common.files import read_json_object

        run_study(Path(self.out), ModelRecipe(self.recipe, self.model, flags.overrides(self.set, self.device)))
        console.answer(read_json_object(Path(self.out) / "leak.json"))


class Systems(
    Command,
    group=STUDY,
    help="train every system, with controls on shuffled rewards",
    place=30,
    example="thresher study systems --system search_r1 --seeds 0",
):
    out: Annotated[str, "output folder; finished parts are not repeated"] = "runs/study-systems"
    system: Annotated[Texts | None, REPEATED, "NAME", "system to train; may be repeated; default: all six"] = None
    seeds: Annotated[list[Seed], "SEED", "seeds of the training runs"] = [0, 1, 2]
    controls: Annotated[
        list[Seed] | None,
        ANY_NUMBER,
        "SEED",
        "seeds of the control runs, with shuffled rewards; default: the first seed",
    ] = None
    base: Annotated[Seed | None, "seed of one base model that all runs start from; default: each seed has its own"] = (
        None
    )
    set: Overrides = []
    allow_key: flags.AllowKey = []

    def __call__(self) -> None:
        from thresher.bench.studies.systems import SYSTEMS, run_study
        from thresher.common.files import read_json_object

        out, names = Path(self.out), self.system or SYSTEMS
        with signals.on_interrupt(lambda: f"{self.out} keeps what is finished"):
            run_study(out, names, self.seeds, self.controls, self.set, self.run_command, self.allow_key, self.base)
        console.answer(read_json_object(out / "systems.json"))


class Partial(
    Command,
    group=STUDY,
    help="train with and without partial rollouts, in an invented world",
    place=40,
    example="thresher study partial --seeds 0",
):
    out: Annotated[str, "output folder; finished parts are not repeated"] = "runs/study-partial"
    seeds: Annotated[list[Seed], "SEED", "seeds of the training runs"] = [0, 1, 2]
    base: Annotated[Seed, "seed of the base model that all runs start from"] = 0
    set: Overrides = []

    def __call__(self) -> None:
        from thresher.bench.studies.partial import run_study
        from thresher.common.files import read_json_object

        out = Path(self.out)
        with signals.on_interrupt(lambda: f"{self.out} keeps what is finished"):
            run_study(out, self.seeds, self.base, self.set, self.run_command)
        console.answer(read_json_object(out / "partial.json"))


class CompareMethods(
    Command,
    help="train methods over several seeds at equal numbers of computed tokens, and compare them",
    place=136,
    example="thresher compare-methods world.toml --out runs/methods",
):
    file: Annotated[
        str,
        POSITIONAL,
        "FILE",
        "TOML file, or name of one shipped with Thresher: methods, conditions, seeds, budgets (docs/comparisons.md)",
    ]
    out: Annotated[str, "output folder; finished runs are not repeated, and several processes may share it"] = (
        "runs/compare-methods"
    )
    rows: Annotated[str | None, "FILE", "rows.jsonl of an earlier comparison, whose runs are not repeated"] = None
    finished: Annotated[bool, "train nothing; compare only the finished runs"] = False
    seeds: Annotated[list[Seed] | None, "SEED", "seeds of the runs, in place of the file's"] = None
    budgets: Annotated[list[Count] | None, "TOKENS", "token budgets, in place of the file's"] = None
    set: Overrides = []

    def __call__(self) -> None:
        from thresher.bench.studies.methods import read_comparison, run_comparison

        plan = read_comparison(self.file, self.seeds, self.budgets, self.set)
        with signals.on_interrupt(lambda: f"{self.out} keeps what is finished"):
            found = run_comparison(plan, Path(self.out), self.run_command, self.rows, not self.finished)
        console.answer(found)


class Demo(
    Command,
    help="train a small model to search, in minutes, or a pretrained one to read",
    place=140,
    example="thresher demo --out runs/demo --seed 1",
):
    """The chain is engine/world/stages.py's; here its commands go through the parser like ones that were typed."""

    out: Annotated[str, "output folder; an unfinished demo is resumed"] = "runs/demo"
    seed: Annotated[Integer, "seed of the world, the weights and the training"] = 0
    model: Annotated[
        str | None,
        "FOLDER",
        "folder of a pretrained model of about 135 M parameters, which learns to answer from passages",
    ] = None
    questions: Annotated[
        str | None, "FILE", "questions with passages, in any format of data convert, with --model; default: invented"
    ] = None
    family: Annotated[
        Literal["qwen2", "qwen3_5"] | None,
        "family of the randomly initialised model that learns to search; default: qwen2",
    ] = None
    set: Overrides = []

    def __call__(self) -> None:
        from thresher.engine.world.stages import DemoPlan, demo

        if self.questions is not None and self.model is None:
            raise UserError("--questions is for the demo of a pretrained model; name its folder with --model")
        if self.family is not None and self.model is not None:
            raise UserError("--family is for a model with random weights; leave it out, or --model")
        out = Path(self.out)
        given = {"model": self.model, "questions": self.questions, "family": self.family}
        plan = DemoPlan(seed=self.seed, set=tuple(self.set), **given)

        with signals.on_interrupt(lambda: f"{out} keeps what is finished" if out.exists() else None):
            demo(out, plan, self.run_command, partial(console.note, style="bold"))
        from thresher.common.records import read_object

        summary = read_object(out / "summary.json")
        title = f"{summary['questions']} held-out questions, greedy, seed {self.seed}"
        if self.model is None:
            self._searched(out, summary, title)
        else:
            self._read(out, summary, title)
        console.console.print(f"{console.show_time(summary['seconds'])} in all. Look at {out / 'report.html'}")

    def _searched(self, out: Path, summary: dict[str, Any], title: str) -> None:
        from thresher.engine.reports.report import print_trajectories  # matplotlib takes a second

        print_trajectories(out / "grpo")
        rows = [("EM", summary["em_before"], summary["em_after"]), ("F1", summary["f1_before"], summary["f1_after"])]
        console.table(title, ("", "after warm-up", "after GRPO"), rows)
        console.answer(summary)

    def _read(self, out: Path, summary: dict[str, Any], title: str) -> None:
        from thresher.engine.world.before_after import learning_curve, measures_before_after, transcripts

        shown = transcripts(out / "grpo")
        for transcript in shown:
            console.say(f"\n{transcript}")
        console.say("")
        console.table("greedy answers while it learned", ("after step", "EM", "F1"), learning_curve(out / "grpo"))
        columns = ("", "questions", "EM before", "EM after", "F1 before", "F1 after")
        console.table(title, columns, measures_before_after(out / "grpo"))
        console.answer(summary | {"transcripts": [asdict(transcript) for transcript in shown]})


def model_is(text: str) -> tuple[str, str]:
    model, _, value = text.partition("=")
    if not (model and value):
        raise argparse.ArgumentTypeError(f"expected MODEL=.., such as gpt-4o=https://api.openai.com/v1, got {text}")
    return model, value


Named = list[Annotated[tuple[str, str], model_is]]


class Reproduce(
    Command,
    help="reproduce the tables of a paper, at its scale or in an invented world",
    place=145,
    example="thresher reproduce eval_rar T2 --scale world --seeds 3 --out runs/eval_rar-T2",
):
    paper: Annotated[str | None, POSITIONAL, "name of the paper; --list shows all"] = None
    tables: Annotated[Texts, POSITIONAL, ANY_NUMBER, "TABLE", "table, such as T1; default: all tables of the paper"]
    list: Annotated[bool, "only list the rows, their requirements at the paper's scale, and what is left out"] = False
    chip: Annotated[str, "NAME", "GPU that --list plans trainings for; default: H100"] = "H100"
    scale: Annotated[
        Literal["paper", "world"],
        "paper: the paper's models and data, which must be present; world: the invented world",
    ] = "world"
    seeds: Annotated[Count, "N", "train every method with seeds 0 to N - 1"] = 1
    limit: Annotated[Count | None, "N", "use only the first N questions of every evaluation and extraction"] = None
    set: Annotated[
        Texts,
        REPEATED,
        "SECTION.KEY=VALUE",
        "override a recipe key in the commands that read it (docs/reproduce.md); may be repeated",
    ] = []
    answer_url: Annotated[
        Named,
        REPEATED,
        "MODEL=URL",
        "OpenAI-compatible server of a model without a local folder; MODEL as named by the run; may be repeated",
    ] = []
    answer_model: Annotated[
        Named, REPEATED, "MODEL=NAME", "name of the model at that server; may be repeated; default: the same"
    ] = []
    prompts: Annotated[
        str | None, "DIR", "folder of prompts, with --scale paper: SYSTEM.txt or BASELINE.txt replaces Thresher's own"
    ] = None
    allow_key: Annotated[
        Texts,
        REPEATED,
        flags.key_at,
        "VARIABLE@HOST[:PORT]",
        "send this environment variable's key to this host, the server of a judge or of a model",
    ] = []
    out: Annotated[str | None, "output folder; finished parts are not repeated; default: runs/PAPER-TABLE"] = None

    def __call__(self) -> None:
        from thresher.engine.reproduce.manifest import paper_names, read_manifest, servers_of
        from thresher.engine.reproduce.pipelines import Scale
        from thresher.engine.reproduce.run import reproduce

        if self.list:
            self._list()
            return
        if self.paper is None:
            raise UserError(f"reproduce: name a paper, one of {', '.join(paper_names())}, or give --list")
        if self.scale == "world":
            self._no_servers()
        out = Path(self.out or f"runs/{'-'.join([self.paper, *self.tables])}")
        keys = tuple(self.allow_key)
        servers = servers_of(read_manifest(self.paper), self.answer_url, self.answer_model, keys)
        prompts = None if self.prompts is None else Path(self.prompts)
        scale = Scale(self.scale, range(self.seeds), tuple(self.set), self.limit, keys, servers, prompts)
        with signals.on_interrupt(lambda: f"{out} keeps what is finished" if out.exists() else None):
            found = reproduce(self.paper, self.tables, scale, out, self.run_command)
        console.answer(found)

    def _no_servers(self) -> None:
        """Raise UserError for a server's flag; in the invented world only a judge of --set may be on a server."""
        judged = any(text.startswith("judge.") for text in self.set)
        keys = [] if judged else self.allow_key
        given = (("--answer-url", self.answer_url), ("--answer-model", self.answer_model), ("--allow-key", keys))
        for flag, value in given:
            if value:
                raise UserError(f"{flag}: the invented world has no model of a server; give it with --scale paper")

    def _list(self) -> None:
        from thresher.engine.planning.time import CHIPS
        from thresher.engine.reproduce.manifest import paper_names, read_manifest
        from thresher.engine.reproduce.pipelines import Scale
        from thresher.engine.reproduce.tables import listing, plan_in_words

        if self.chip not in CHIPS:
            raise UserError(f"--chip {self.chip}: expected one of {', '.join(CHIPS)}")
        manifests = [read_manifest(name) for name in ([self.paper] if self.paper else paper_names())]
        chip, training = CHIPS[self.chip], Scale("paper", overrides=tuple(self.set)).of_trainings
        records = [one for manifest in manifests for one in listing(manifest, chip, self.tables, training)]
        left_out = {
            f"{manifest.name}: {what}": why for manifest in manifests for what, why in manifest.left_out.items()
        }
        console.answer({"rows": records, "left_out": left_out})
        rows = [
            (
                *(one[key] for key in ("paper", "table", "row")),
                ", ".join(one["world"]) or "-",
                ", ".join(one["stages"]),
                plan_in_words(one["planned"], one["needs"]),
            )
            for one in records
        ]
        heads = ("paper", "table", "row", "in the world", "stages", f"on one {self.chip}")
        console.table("what can be reproduced", heads, rows)
        console.table("left out", ("what", "why"), list(left_out.items()))
