"""Commands that make a model: `init`, `sft`, `train`, `train-encoder`; and what a run would take, `plan`; `recipe`."""

import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from thresher.cli import flags
from thresher.cli.flags import Count, Dtype, ModelDevice, Natural, OfRecipe, Overrides, Positive, Seed, Texts
from thresher.cli.parser import POSITIONAL, REPEATED, Command, OneOf
from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.store.run_folder import sft_folder

if TYPE_CHECKING:
    from thresher.engine.config.recipe import Recipe as RunRecipe
    from thresher.engine.config.reference import Key
    from thresher.engine.parallel.ranks import Ranks
    from thresher.engine.planning.plan import Plan as MemoryPlan
    from thresher.engine.planning.tail import Tail
    from thresher.engine.planning.time import DeviceRates
    from thresher.policy.config import ModelConfig

_BEGUN = OneOf(required=True)


class Init(
    Command,
    help="create a model folder with random weights",
    place=10,
    example="thresher init --config config.json --tokenizer models/Qwen2.5-0.5B --out runs/init",
):
    config: Annotated[str | None, _BEGUN, "config.json of a supported model family"] = None
    model: Annotated[
        str | None, _BEGUN, "model folder to add layers to with --add-layers, in place of a config and a tokenizer"
    ] = None
    add_layers: Annotated[Count | None, "N", "number of layers to add on top, initialised as the identity"] = None
    tokenizer: Annotated[str | None, "folder with a tokenizer.json, or the file itself"] = None
    train_tokenizer: Annotated[Texts, "FILE", "JSONL files whose strings a new tokenizer is trained on"] = []
    vocab_size: Annotated[Count, "vocabulary size of a tokenizer that is trained"] = 1024
    set: Annotated[Texts, REPEATED, "KEY=VALUE", "override a key of the config; may be repeated"] = []
    seed: Annotated[Seed, "seed of the random weights"] = 0
    embedding_std: Annotated[
        Positive | None, "STD", "standard deviation of the embeddings; default: initializer_range"
    ] = None
    zero_outputs: Annotated[bool, "initialise every layer as the identity"] = False
    out: Annotated[str, "model folder to write"]

    def __call__(self) -> None:
        from thresher.engine.world.random_model import add_layers, initialise

        if self.model is not None or self.add_layers is not None:
            if self.model is None or self.add_layers is None:
                raise UserError("init: --model FOLDER and --add-layers N belong together; give both")
            given = ("tokenizer", "train_tokenizer", "set", "embedding_std", "zero_outputs")
            if others := [f"--{name.replace('_', '-')}" for name in given if getattr(self, name)]:
                raise UserError(
                    f"init: {others[0]} is for a new model; leave it out, because --model FOLDER brings its own"
                )
            figures = add_layers(self.model, self.add_layers, self.out, seed=self.seed)
            console.figures(f"model with more layers in {self.out}", figures)
            return
        figures = initialise(
            str(self.config),
            self.out,
            tokenizer_path=self.tokenizer,
            train_on=self.train_tokenizer,
            overrides=self.set,
            **flags.pick(self, "vocab_size seed embedding_std zero_outputs"),
        )
        console.figures(f"model with random weights in {self.out}", figures)


class ImportGguf(
    Command,
    help="convert a GGUF file to a model folder",
    place=15,
    example="thresher import-gguf SmolLM2-135M-Instruct.Q4_1.gguf --out models/SmolLM2-135M-Instruct",
):
    file: Annotated[str, POSITIONAL, "GGUF file of a Llama, Qwen2 or Qwen3 model"]
    dtype: Annotated[Dtype, "dtype of the written weights"] = "float32"
    out: Annotated[str, "FOLDER", "model folder to write"]

    def __call__(self) -> None:
        from thresher.engine.assemble import DTYPES
        from thresher.policy.gguf import import_gguf

        figures = import_gguf(self.file, self.out, dtype=DTYPES[self.dtype])
        console.figures(f"model in {self.out}", figures)


_FROM = "with --resume: return to the checkpoint of this step, and delete everything after it; 0: the beginning"


class Sft(
    OfRecipe,
    help="fine-tune all weights or adapters on transcripts",
    place=20,
    example="thresher sft recipe.toml --out models/warm",
):
    out: Annotated[str, "model folder to write"]
    resume: Annotated[bool, "resume from the last checkpoint of the unfinished run"] = False
    from_step: Annotated[Natural | None, "--resume-from", "STEP", _FROM] = None

    def __call__(self) -> None:
        from thresher.engine.parallel.ranks import joined

        with joined() as ranks:
            if ranks.is_distributed:
                raise UserError(
                    f"sft trains in one process, but torchrun has started {ranks.count}; leave torchrun out"
                )
        with flags.resumable(self.resume, self.from_step, sft_folder(self.out)):
            run_sft(self.read_recipe(), Path(self.out), self.resume, self.from_step)


def run_sft(recipe: "RunRecipe", out: Path, resume: bool = False, from_step: int | None = None) -> None:
    """Fine-tune `model.path`, all of it or adapters, into the model folder `out`."""
    from thresher.engine.config.sections import SftSection
    from thresher.engine.training.sft_data import say_unused
    from thresher.engine.training.sft_run import check_out, load_fine_tuning

    sft = recipe.need(SftSection)
    check_out(out, resume)
    tuning = load_fine_tuning(recipe)
    console.announce(
        f"sft: {len(tuning.trainer.training):,} transcripts to train on, {len(tuning.trainer.held_out):,} held out, "
        f"{tuning.trained:,} parameters, at most {sft.steps} steps"
    )
    copying: list[float] = []  # as often as it was measured
    with console.progress_line("sft", sft.steps) as line:

        def watch(record: dict[str, Any]) -> None:
            if "copying" in record:
                copying.append(record["copying"])
            text = f"loss {record['loss']:.3f}" + (f"  names copied right {copying[-1]:.0%}" if copying else "")
            if resume and line.done == 0:
                line.from_before(record["step"])
            line.to(record["step"], text)

        figures = tuning.run(out, watch, resume, from_step)
    console.figures(f"sft: model in {out}", figures)
    say_unused(tuning.unused, tuning.questions, out / "unused.jsonl")
    if not figures["passed"]:
        console.console.print(
            f"The gate was not reached: {figures['names copied right']:.0%} of the names were copied right, "
            f"{sft.stop_at_copy_accuracy:.0%} needed. The model is written all the same; GRPO may learn little from "
            "it. Try more sft.steps or another run.seed."
        )


class Train(
    OfRecipe, help="train with GRPO", place=30, example="thresher train recipe.toml --out runs/first --set run.steps=50"
):
    out: Annotated[str, "run folder to write"]
    resume: Annotated[bool, "resume from the last checkpoint of the run folder"] = False
    from_step: Annotated[Natural | None, "--resume-from", "STEP", _FROM] = None
    allow_key: flags.AllowKey = []
    replay: Annotated[
        str | None, "RUN", "run of the same recipe to repeat, whatever the response times of its servers and tools were"
    ] = None

    def __call__(self) -> None:
        from thresher.engine.parallel.ranks import joined

        with flags.resumable(self.resume, self.from_step, Path(self.out)), joined() as ranks:
            self._train(ranks)

    def _train(self, ranks: "Ranks") -> None:
        from thresher.engine.progress import progress_to
        from thresher.engine.training.train import train

        recipe = self.read_recipe()
        with console.progress_line("train", recipe.run.steps) as line:
            watch = progress_to(line, recipe, self.out)
            keys = self.allow_key
            summary = train(recipe, self.out, self.resume, watch, ranks, self.from_step, keys, self.replay)
        console.figures(f"train: run in {self.out}", summary)


class TrainEncoder(
    Command,
    help="train RECOMP's extractive compressor",
    place=31,
    example="thresher train-encoder --records contrasts.jsonl --model models/contriever --out models/recomp",
):
    records: Annotated[str, "JSONL file written by `thresher data sft --kind recomp`"]
    model: Annotated[str, "folder of the encoder to start from, of the BERT family"]
    out: Annotated[str, "folder to write, for `thresher extract --refiner recomp`"]
    steps: Annotated[Natural, "number of optimiser steps; 0: three epochs"] = 0
    lr: Annotated[Positive, "peak learning rate"] = 2e-5
    batch: Annotated[Count, "number of questions per step"] = 64
    seed: Annotated[Seed, "seed of the held-out split and of the order of the records"] = 0
    device: Annotated[flags.Device, "device of the training"] = "cpu"

    def __call__(self) -> None:
        from thresher.engine.compressors.recomp_train import train_recomp

        figures = train_recomp(self.records, self.model, self.out, **flags.pick(self, "steps lr batch seed device"))
        console.figures(f"an encoder in {self.out}", figures)


class Plan(
    Command,
    help="predict the memory and time of a training run",
    place=25,
    example="thresher plan --recipe recipes/eval_rar/qwen2.5-3b.toml --model models/Qwen2.5-3B-Instruct --chip H100",
):
    model: Annotated[str | None, "DIR|CONFIG", "model folder or config.json; default: the recipe's"] = None
    recipe: Annotated[str, "recipe (TOML file)"]
    set: Overrides = []
    device: ModelDevice = None
    gpu_memory: Annotated[
        str | None, "SIZE", "memory of a GPU, such as 80GB; default: the chip's, or this machine's"
    ] = None
    gpus: Annotated[Count, "number of GPUs that share the weights; default: 1"] = 1
    chip: Annotated[str | None, "GPU, such as H100: its memory, and its rates for the time of a step"] = None
    measure: Annotated[bool, "use the rates of this machine, measured in a second"] = False
    lengths: Annotated[
        str | None, "FILE", "file of stored trajectories, for the lengths of samples; default: an assumed long tail"
    ] = None

    def __call__(self) -> None:
        from thresher.common.machine import cpu_dtype
        from thresher.engine.assemble import check_positions, read_run_recipe
        from thresher.engine.planning.plan import GB, plan
        from thresher.engine.planning.tail import read_lengths

        recipe = read_run_recipe(self.recipe, flags.overrides(self.set, self.device))
        config = _config(recipe.model.path if self.model is None else self.model)
        check_positions(recipe, config)
        rates, memory = self._rates(recipe), self._memory(recipe)
        if self.lengths is not None and rates is None:
            raise UserError(
                "--lengths: expected --measure, or --chip with model.dtype = bfloat16, to predict a step's seconds"
            )
        lengths = None if self.lengths is None else read_lengths(self.lengths)
        found = plan(config, recipe, self.gpus, memory, rates, lengths)
        if recipe.model.device == "cpu" and (recipe.model.dtype, cpu_dtype()) == ("float32", "bfloat16"):
            low = plan(config, replace(recipe, model=replace(recipe.model, dtype="bfloat16")), self.gpus, memory)
            found.advice.append(
                'this processor multiplies bfloat16 faster: model.dtype = "bfloat16" takes '
                f"{low.total_bytes / GB:.1f} GB"
            )
        console.answer(found.to_dict())
        _print_plan(found)

    def _rates(self, recipe: "RunRecipe") -> "DeviceRates | None":
        """Return the rates of the chip that was named, or this machine's."""
        import torch

        from thresher.engine.planning.time import CHIPS

        if self.chip is not None:
            if self.chip not in CHIPS:
                raise UserError(f"--chip {self.chip}: expected one of {', '.join(CHIPS)}")
            if self.measure:
                raise UserError("--measure: expected either --chip or --measure, got both")
            if recipe.model.device != "cuda":
                raise UserError("--chip: expected a recipe with model.device = cuda; add --device cuda")
            # A data sheet's rate is that of bfloat16's products.
            return CHIPS[self.chip] if recipe.model.dtype == "bfloat16" else None
        if not self.measure:
            return None
        from thresher.bench.harness import measure_rates

        if recipe.model.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--measure: torch sees no CUDA device; name a chip, such as --chip H100")
        return measure_rates(torch.device(recipe.model.device), getattr(torch, recipe.model.dtype))

    def _memory(self, recipe: "RunRecipe") -> int:
        import torch

        from thresher.common.machine import cpu_memory
        from thresher.engine.planning.time import CHIPS
        from thresher.retrieval.indexes.kinds import parse_memory

        if self.gpu_memory is not None:
            if not re.search(r"[A-Za-z]\s*$", self.gpu_memory):
                raise UserError(f"--gpu-memory {self.gpu_memory}: expected a size with its unit, such as 80GB or 40GiB")
            return parse_memory(self.gpu_memory)
        if self.chip is not None:
            return int(CHIPS[self.chip].memory)
        if recipe.model.device == "cpu":
            return cpu_memory()[0]
        if not torch.cuda.is_available():
            raise UserError("--gpu-memory: torch sees no CUDA device; expected a size such as 80GB, or --chip H100")
        return int(torch.cuda.mem_get_info()[1])


def _config(model: str) -> "ModelConfig":
    """Read the configuration of a model folder, or a config.json."""
    from thresher.common.files import read_json_object
    from thresher.policy.config import config_from_dict, read_config

    path = Path(model)
    return config_from_dict(read_json_object(path), str(path)) if path.is_file() else read_config(path)


def _print_plan(found: "MemoryPlan") -> None:
    from thresher.engine.planning.plan import GB

    of = "" if found.gpus == 1 else f", on each of {found.gpus} GPUs"
    phases = found.phases.values()
    rows = {name: [parts[name] for parts in phases] for name in found.parts if any(parts[name] for parts in phases)}
    rows["all"] = [sum(parts.values()) for parts in phases]
    texts = [[name, *(f"{value / GB:.1f}" if value else "" for value in values)] for name, values in rows.items()]
    title = f"GB by part and phase{of}; the peak is in: {found.peak}"
    console.grid(title, ["part", *found.phases], texts)
    for line in _lines(found):
        console.note(line)


def _lines(found: "MemoryPlan") -> list[str]:
    """Return the text below the table."""
    from thresher.engine.planning.plan import GB

    assert found.memory_bytes is not None
    verdict = "fits" if found.fits else "does not fit"
    lines = [f"{found.total_bytes / GB:.1f} GB of {found.memory_bytes / GB:.1f}: it {verdict}"]
    lines += found.advice
    if found.largest:
        bounds = {name: f" ({why})" for name, why in found.bounds.items()}
        each = (f"{name} = {value:,}{bounds.get(name, '')}" for name, value in found.largest.items())
        lines.append("largest that fit, each alone: " + ", ".join(each))
    if found.host:
        lines.append("in the machine's memory: " + ", ".join(f"{k} {v / GB:.1f} GB" for k, v in found.host.items()))
    if found.checkpointed:
        lines.append("activations are recomputed in the backward")
    if found.gpus > 1:
        lines.append("several GPUs: torchrun --nproc-per-node N (docs/scale.md); nothing was measured on several")
    if found.seconds is not None:
        rollout, update = found.seconds["rollout"], found.seconds["update"]
        sent = "" if found.gpus == 1 else ", without the communication between them"
        if found.links is not None:
            sent = f", linked at {found.links / GB:.0f} GB/s per direction, as in one machine"
        lines.append(
            f"predicted, with every trajectory at its limits: {found.seconds_per_step:.3g} s a step, "
            f"rollout {rollout:.3g}, update {update:.3g}{sent}; nothing was run"
        )
    if found.tail is not None:
        lines += _tail_lines(found.tail)
    return lines


def _tail_lines(tail: "Tail") -> list[str]:
    """Return what is said of samples that are not equally long."""
    whole, partial = tail.whole, tail.partial
    lengths = f"{tail.mean:,.0f} tokens a sample on average, {tail.longest:,} at most"
    lengths += ", as in --lengths" if tail.sigma is None else f", lognormal with sigma {tail.sigma:g}, assumed"
    return [
        f"predicted, with {lengths}: rollout {whole.seconds:.3g} s, {whole.busy:.0f} of {tail.slots:,} slots busy",
        f"with rollout.partial and {partial.in_flight:,} groups in flight: rollout {partial.seconds:.3g} s, "
        f"{whole.seconds / partial.seconds:.2f} times as fast, {partial.busy:.0f} slots busy; staleness of "
        f"tokens {partial.staleness:.2g} updates on average, {partial.max_staleness} at most; "
        f"{partial.tokens_again:,.0f} tokens a step are prefilled again; the KV pool is no larger",
    ]


_WHAT = OneOf(required=True)


class Recipe(
    Command,
    help="list, show or copy recipes, or explain a key",
    place=28,
    example="thresher recipe --explain rollout.group_size",
):
    show: Annotated[
        str | None, _WHAT, "RECIPE", "print the recipe with --set, the preset of its system and all defaults"
    ] = None
    explain: Annotated[
        str | None, _WHAT, "KEY", "explain a key, such as rollout.group_size or group_size, or a section"
    ] = None
    list: Annotated[bool, _WHAT, "list the recipes shipped with Thresher"] = False
    new: Annotated[str | None, _WHAT, "RECIPE", "copy a shipped recipe to --out for editing, comments included"] = None
    reference: Annotated[bool, _WHAT, "print docs/recipe.md: every key, as Markdown"] = False
    out: Annotated[str | None, "FILE", "file to write, with --new"] = None
    set: Overrides = []
    device: ModelDevice = None

    def __call__(self) -> None:
        from thresher.engine.config.recipe import load_recipe, shipped_recipes
        from thresher.engine.config.reference import explain, keys_of, markdown
        from thresher.engine.systems import NAMES, preset_of

        changes = flags.overrides(self.set, self.device)
        if (self.out is None) != (self.new is None):
            raise UserError("recipe: --new RECIPE and --out FILE go together; give both or neither")
        if self.show is not None:
            recipe = load_recipe(self.show, changes, preset=preset_of)
            print(recipe.to_toml(), end="")
            console.answer(recipe.to_dict())
            return
        if changes:
            raise UserError("recipe: --set and --device are for --show RECIPE; leave them out")
        if self.list:
            title = "recipes that came with Thresher: each can be named wherever a recipe is expected"
            found = [(recipe.name, recipe.system, recipe.model, recipe.about) for recipe in shipped_recipes()]
            console.table(title, ("recipe", "system", "model", "what it is"), found)
            return
        if self.new is not None and self.out is not None:
            _copy(self.new, Path(self.out))
            return
        keys = keys_of({name: preset_of(name) for name in NAMES})
        if self.reference:
            print(markdown(keys), end="")
        else:
            keys = explain(keys, str(self.explain))
            print("\n\n".join(map(_explained, keys)))
        console.answer({"keys": [asdict(key) for key in keys]})


def _copy(name: str, out: Path) -> None:
    from thresher.common.files import atomic_write_text
    from thresher.engine.config.recipe import shipped_recipe

    source = shipped_recipe(name)
    if os.path.lexists(out):
        raise UserError(f"--out {out}: exists already; choose another file, or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(out, source.read_text(encoding="utf-8"))
    console.console.print(
        f"recipe: {name} is copied to {out}; thresher recipe --show {out} fills in what it leaves open"
    )


def _explained(key: "Key") -> str:
    from thresher.engine.config.reference import by_value

    lines = [key.dotted, f"  {key.meaning}", f"  default: {key.default}", f"  takes: {key.takes}"]
    lines += [f"  preset {value}: {', '.join(systems)}" for value, systems in by_value(key).items()]
    return "\n".join(lines)
