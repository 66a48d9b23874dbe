"""Commands that have a model write: `generate`, `rollout`, `eval`, `extract`; `compare` and `score` their output. Flags
of `eval` and `rollout` win over the recipe's file, `--set` over both; a system's preset fills the rest."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from thresher.cli import flags
from thresher.cli.flags import (
    Count,
    Device,
    Dtype,
    ModelDevice,
    Natural,
    Overrides,
    Prompt,
    Samples,
    Seconds,
    Seed,
    Temperature,
    Texts,
    Unverified,
    checked,
)
from thresher.cli.parser import POSITIONAL, REPEATED, Command, OneOf
from thresher.common import console, signals
from thresher.common.errors import UserError
from thresher.engine.compressors.options import Name, Unit, compressor_options
from thresher.engine.config.recipe import Recipe, make_recipe, parse_overrides, read_tables
from thresher.engine.config.sampling import BOUNDS
from thresher.engine.config.sections import RolloutSection
from thresher.engine.store.run_folder import Best, RunFolder, best_checkpoint

if TYPE_CHECKING:
    from thresher.engine.decoding.generator import GenerateRequest, GenerateResult, Generator
    from thresher.engine.evaluation.api_rollout import AnsweredBy
    from thresher.engine.extraction.run import Chosen
    from thresher.policy.tokenizer import Tokenizer

Tables = dict[str, dict[str, Any]]
ENDS = {"eos": "end of text", "length": "--max-new-tokens", "context": "the model's context is full"}


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a string that is not empty")
    text.encode("utf-8")  # argparse says what a ValueError means
    return text


TopP = Annotated[float, checked(float, BOUNDS["top_p"].words, BOUNDS["top_p"].admits)]
MinP = Annotated[float, checked(float, BOUNDS["min_p"].words, BOUNDS["min_p"].admits)]
_TEXT = OneOf(required=True)


class Generate(
    Command,
    help="sample completions of a prompt",
    place=32,
    example='thresher generate --model models/warm --prompt "Who is the mayor?" --chat',
):
    """One sample is shown while it is drawn, several when all have ended. On a terminal control characters are shown as
    signs."""

    model: Annotated[str, "model folder"]
    prompt: Annotated[
        str | None, _TEXT, "TEXT", "prompt, encoded as plain text: control tokens in it are not recognised"
    ] = None
    prompt_file: Annotated[str | None, _TEXT, "F", "file to read the prompt from, byte for byte"] = None
    chat: Annotated[bool, "send the prompt as a user message through the model's chat template"] = False
    max_new_tokens: Annotated[Count, "N", "maximum number of new tokens; default 256"] = 256
    stop: Annotated[Texts, not_empty, {"action": "extend"}, "S", "stop strings, each of which ends a sample"] = []
    temperature: Annotated[Temperature, "sampling temperature, 0: greedy; default 1"] = 1.0
    top_k: Annotated[Natural, "K", "sample from the K most probable tokens; default 0: all"] = 0
    top_p: Annotated[
        TopP, "P", "sample from the most probable tokens up to a total probability of P; default 1: all"
    ] = 1.0
    min_p: Annotated[
        MinP, "P", "sample from the tokens with at least P times the probability of the most probable one"
    ] = 0.0
    n: Annotated[Samples, "number of samples; default 1, a single sample is streamed"] = 1
    seed: Annotated[Seed, "seed of the sampling"] = 0
    dtype: Annotated[Dtype, "dtype of the computation"] = "float32"
    device: Annotated[Device, "device of the computation"] = "cpu"

    def __call__(self) -> None:
        where, text = self._prompt()
        generator = self._load()
        request = self._request(prompt_ids(text, generator.tokenizer, self.chat, self.model))
        try:
            if self.n == 1 and not self.json:
                _show_stream(generator, request)
                return
            (samples,) = generator.generate([request])
        except UserError as error:
            raise UserError(str(error).replace("request 0: its prompt", f"{where}: the prompt")) from None
        if self.json:
            console.answer({"prompt_ids": request.prompt_ids, "samples": [_record(sample) for sample in samples]})
            return
        for number, sample in enumerate(samples, 1):
            end = f"at {sample.stop}" if sample.stop is not None else ENDS[sample.finish]
            console.say(f"--- {number} of {self.n}: {len(sample.token_ids)} tokens, ended: {end}")
            console.say(sample.text, exact=True)

    def _prompt(self) -> tuple[str, str]:
        """Return the flag that gave the text, and the text."""
        where, text = "--prompt", self.prompt
        if text is None:
            from thresher.common.files import MOST_TEXT, decode_text, read_bytes

            where = f"--prompt-file {self.prompt_file}"
            text = decode_text(read_bytes(str(self.prompt_file), MOST_TEXT, stream=True), where)
        if not text:
            raise UserError(f"{where}: the prompt is empty; give the text that the model should continue")
        return where, text

    def _load(self) -> "Generator":
        import torch

        from thresher.engine.assemble import DTYPES, check_fit, fit_doubts
        from thresher.engine.decoding.generator import Generator
        from thresher.policy.model import load_policy
        from thresher.policy.tokenizer import load_tokenizer

        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device is cuda, but torch sees no CUDA device; leave it out")
        tokenizer = load_tokenizer(self.model)
        policy = load_policy(self.model, DTYPES[self.dtype], self.device)
        check_fit(policy, tokenizer, self.model)
        if doubts := fit_doubts(policy, tokenizer, self.model):
            print(console.visible(doubts), file=sys.stderr)
        return Generator(policy, tokenizer, max_running=min(self.n, 256))

    def _request(self, prompt_ids: list[int]) -> "GenerateRequest":
        from thresher.engine.decoding.generator import GenerateRequest

        return flags.fill(GenerateRequest, self, prompt_ids=prompt_ids, stop=tuple(dict.fromkeys(self.stop)))


def prompt_ids(text: str, tokenizer: "Tokenizer", chat: bool, model: str) -> list[int]:
    """Encode a text as a prompt, raw or, with `chat`, in the model's chat template."""
    if not chat:
        return [*tokenizer.begin_ids, *tokenizer.encode(text)]
    if tokenizer.chat_template is None:
        raise UserError(f"{model}: the model has no chat template; leave out --chat")
    from thresher.engine.episode import Prompt
    from thresher.engine.protocol.prompts import Renderer

    # As a chat prompt of a system: the template may emit control tokens, the message may not.
    renderer = Renderer(tokenizer=tokenizer, tags=(), k=1, chat=True, max_passage_tokens=0, passage_format="{text}")
    return renderer.prompt(Prompt("{question}", text))


def _show_stream(generator: "Generator", request: "GenerateRequest") -> None:
    from thresher.engine.decoding.generator import stream_text

    last = "\n"
    for last in stream_text(generator, request):
        console.say(last, end="", exact=True)
    if not last.endswith("\n"):
        console.say("")


def _record(sample: "GenerateResult") -> dict[str, object]:
    values = {name: getattr(sample, name) for name in ("token_ids", "logprobs", "text", "finish", "stop")}
    trailing = sample.trailing.decode("utf-8", "replace")
    return {**values, "trailing": trailing, "prefill_tokens_computed": sample.prefill_tokens_computed}


# Flag of `rollout` or `eval` -> the recipe's key.
KEYS = {
    "model": "model.path",
    "device": "model.device",
    "prompt": "model.prompt",
    "index": "retrieval.index",
    "url": "retrieval.url",
    "k": "retrieval.k",
    "seed": "run.seed",
    "entailment": "judge.entailment",
    "judge_url": "judge.url",
    "judge_model": "judge.model",
    "answer_model": "model.path",  # who answers has the model's place
    "max_num_seqs": "rollout.max_num_seqs",
}


class Rollout(
    Command,
    help="sample trajectories for questions, with tokens and log-probs",
    place=36,
    example="thresher rollout --model models/warm --system arena --questions dev.jsonl --n 8 --out rollouts.jsonl",
):
    _where = OneOf()

    model: Annotated[str | None, "model folder"] = None
    system: Annotated[str | None, "name of a system, or path of a system file"] = None
    questions: Annotated[str, "JSONL file of questions; gold answers are optional"]
    limit: Annotated[Count | None, "maximum number of questions, from the start of the file"] = None
    index: Annotated[str | None, _where, "index folder"] = None
    url: Annotated[str | None, _where, "URL of a retrieval server"] = None
    recipe: Annotated[str | None, "FILE", "recipe (TOML file); not needed if the flags suffice"] = None
    set: Overrides = []
    device: ModelDevice = None
    n: Annotated[Samples, "number of samples per question; default 1"] = 1
    temperature: Annotated[Temperature | None, "sampling temperature, 0: greedy; default: the recipe's, or 1"] = None
    seed: Annotated[Seed | None, "seed of the sampling; default: run.seed of the recipe, or 0"] = None
    max_num_seqs: Annotated[
        Count | None, "N", "maximum number of concurrent samples; short for --set rollout.max_num_seqs="
    ] = None
    out: Annotated[str, "F.jsonl", "JSONL file to write, one trajectory per line, for thresher score or other programs"]
    resume: Annotated[bool, "continue the existing output file"] = False

    def __call__(self) -> None:
        no_model = "rollout: no model; give --model FOLDER, or --recipe FILE"
        recipe = flagged_recipe(self, self.recipe, no_model, "rollout: no system; give --system NAME, or --recipe FILE")
        from thresher.engine.evaluation.trajectories import RolloutPlan, run_rollouts

        temperature = recipe.rollout.temperature if self.temperature is None else self.temperature
        plan = flags.fill(RolloutPlan, self, out=Path(self.out), samples=self.n, temperature=temperature)
        with signals.on_interrupt(lambda: signals.lines_in(plan.out), "--resume"):
            run_rollouts(recipe, plan)


class Eval(
    Command,
    help="evaluate a system or a baseline on questions",
    place=40,
    example="thresher eval --best-of runs/first --questions test.jsonl --out runs/eval",
):
    _which, _where = OneOf(), OneOf()

    recipe: Annotated[str | None, POSITIONAL, "recipe (TOML file); not needed if the flags suffice"] = None
    set: Overrides = []
    device: ModelDevice = None
    model: Annotated[str | None, _which, "model folder"] = None
    best_of: Annotated[
        str | None, _which, "RUN", "run folder; use its recipe, and its checkpoint with the best dev EM"
    ] = None
    system: Annotated[str | None, "name of a system, or path of a system file"] = None
    baseline: Annotated[str | None, "NAME", "baseline to evaluate in place of the system, under the same settings"] = (
        None
    )
    questions: Annotated[str | None, "JSONL file of questions; default: data.dev of the recipe"] = None
    limit: Annotated[Count | None, "maximum number of questions, from the start of the file"] = None
    index: Annotated[str | None, _where, "index folder"] = None
    url: Annotated[str | None, _where, "URL of a retrieval server"] = None
    k: Annotated[Count | None, "number of passages per search, or per question that comes without passages"] = None
    distractors: Annotated[Natural, "N", "number of irrelevant passages added to those in the prompt"] = 0
    prompt: Annotated[
        Prompt | None, "prompt format; chat: the model's chat template; default: the recipe's, or raw"
    ] = None
    temperature: Annotated[Temperature, "sampling temperature, 0 (the default): greedy"] = 0.0
    seed: Annotated[
        Natural | None, "seed of the sampling, the distractors and tool noise; default: run.seed of the recipe, or 0"
    ] = None
    entailment: Annotated[
        str | None, "FOLDER", "folder of an NLI classifier; default: word overlap, reported as a stand-in"
    ] = None
    judge_url: Annotated[
        str | None, "URL", "URL of an OpenAI-compatible server with a chat model that judges the answers"
    ] = None
    judge_model: Annotated[str | None, "NAME", "name of the model at --judge-url"] = None
    allow_key: flags.AllowKey = []
    answer_url: Annotated[
        str | None, "URL", "URL of an OpenAI-compatible server whose chat or completion endpoint generates the answers"
    ] = None
    answer_model: Annotated[str | None, "NAME", "name of the model at --answer-url"] = None
    answer_key_env: Annotated[str | None, "VARIABLE", "environment variable with the API key for --answer-url"] = None
    tokenizer: Annotated[
        str | None, "FOLDER", "folder of the tokenizer that counts the text lengths, with --answer-url; default: bytes"
    ] = None
    out: Annotated[str, "folder for trajectories.jsonl, metrics.json and table.md; an unfinished evaluation is resumed"]

    def __call__(self) -> None:
        answered_by = self._answered_by()
        recipe, best = self.run_recipe()
        from thresher.engine.evaluation.run import EvalOptions, run_evaluation

        if self.baseline is not None and self.system is not None:
            console.note(
                f"eval: baseline {self.baseline} answers; only the preset of {self.system} is used, for keys that are "
                "left open"
            )
        more = {"noise": self.distractors, "allow_keys": tuple(self.allow_key)}
        asked = flags.fill(EvalOptions, self, best=best, answered_by=answered_by, **more)
        out = Path(self.out)
        with signals.on_interrupt(lambda: signals.lines_in(out / "generated.jsonl")):
            console.answer(run_evaluation(recipe, asked, out))

    def _answered_by(self) -> "AnsweredBy | None":
        from thresher.engine.evaluation.api_rollout import AnsweredBy

        if (self.answer_url is None) != (self.answer_model is None):
            raise UserError("eval: --answer-url URL and --answer-model NAME belong together; give both")
        if self.answer_url is None or self.answer_model is None:
            if self.tokenizer is not None or self.answer_key_env is not None:
                raise UserError(
                    "eval: --tokenizer and --answer-key-env are for --answer-url; add it, or leave them out"
                )
            return None
        return AnsweredBy(
            url=self.answer_url, model=self.answer_model, key_env=self.answer_key_env, tokenizer=self.tokenizer
        )

    def run_recipe(self) -> tuple[Recipe, Best | None]:
        """Return the recipe of the evaluation, and the checkpoint of --best-of."""
        if self.answer_url is not None and (self.model or self.best_of):
            raise UserError("eval: with --answer-url its model answers; leave out --model and --best-of")
        best = best_checkpoint(self.best_of) if self.best_of else None
        file = self.recipe or (RunFolder(Path(self.best_of)).recipe_file if self.best_of else None)
        no_model = "eval: no model; give --model FOLDER, or --best-of RUN, or --answer-url URL, or a recipe"
        no_system = "eval: no system; give --system NAME, or --baseline NAME, or a recipe"
        return flagged_recipe(self, file, no_model, no_system, best), best


def flagged_recipe(
    command: Eval | Rollout, file: str | Path | None, no_model: str, no_system: str, best: Best | None = None
) -> Recipe:
    """Return the recipe of the flags in KEYS, --system and --baseline, with a file or without. UserError with one of
    the two sentences where model or system is open."""
    tables = read_tables(file) if file else {}
    baseline = getattr(command, "baseline", None)

    def put(key: str, value: object) -> None:
        section, _, name = key.partition(".")
        if isinstance(table := tables.setdefault(section, {}), dict):  # else the recipe is refused for it
            table[name] = value

    if command.index is not None or command.url is not None:
        tables["retrieval"] = {
            key: value for key, value in (tables.get("retrieval") or {}).items() if key not in ("index", "url")
        }
    for flag, key in KEYS.items():
        if getattr(command, flag, None) is not None:
            put(key, getattr(command, flag))
    if best is not None:
        put("model.path", str(best.path))
    name = baseline or command.system
    if name is not None and (baseline or tables.get("system", {}).get("name") != name):
        tables["system"] = {"name": name}  # template and options of the file's system are none of this one's
    if not file:
        given = {text.partition("=")[0].strip() for text in command.set}
        if "model.path" not in given and "path" not in tables.get("model", {}):
            raise UserError(no_model)
        if "system" not in tables and "system.name" not in given:
            raise UserError(no_system)
    return make_recipe(
        tables, str(file or "the command line"), command.set, lambda name: _preset(name, tables, command, bare=not file)
    )


def _preset(name: str, tables: Tables, command: Eval | Rollout, bare: bool) -> Tables:
    """Return the values that fill the rest: the system's preset; below a baseline's, that of the system it replaces;
    and, without a file, a context no longer than the model's."""
    from thresher.engine.baselines import load_baseline
    from thresher.engine.systems import preset_of
    from thresher.policy.config import read_config

    layers: list[Tables] = []
    if getattr(command, "baseline", None) is None:
        layers.append(preset_of(name))
    else:
        switches = tables["system"].get("options", {})
        if command.system is not None:
            layers.append(preset_of(command.system))
        layers.append(load_baseline(name, switches if isinstance(switches, dict) else {}).preset)
    merged: Tables = {}
    for layer in layers:
        for section, values in layer.items():
            merged[section] = merged.get(section, {}) | values
    model = tables.get("model")
    served = getattr(command, "answer_model", None) is not None
    if bare and not served and isinstance(model, dict) and isinstance(model.get("path"), str):
        positions = read_config(Path(model["path"])).max_position_embeddings
        rollout = merged.setdefault("rollout", {})
        most = min(rollout.get("max_context", RolloutSection.max_context), positions)
        merged["rollout"] = rollout | {"max_context": most}
    return merged


class Compare(
    Command,
    help="compare two evaluations of the same questions",
    place=50,
    example="thresher compare runs/a runs/b --out runs/compared",
):
    first: Annotated[str, POSITIONAL, "output folder of `thresher eval`"]
    second: Annotated[str, POSITIONAL, "output folder of `thresher eval`; differences are second minus first"]
    first_seeds: Annotated[
        Texts, "DIR", "output folders for other seeds of the first; statistics are then computed over seeds"
    ] = []
    second_seeds: Annotated[
        Texts, "DIR", "output folders for other seeds of the second, in the order of the first's"
    ] = []
    out: Annotated[str | None, "folder for compare.md and compare.json"] = None
    unverified: Unverified = False

    def __call__(self) -> None:
        from thresher.common.files import atomic_write_text
        from thresher.engine.evaluation.compare import (
            compare,
            compare_over_seeds,
            difference_rows,
            markdown,
            read_evaluation,
            recall_rows,
        )

        sides = ([self.first, *self.first_seeds], [self.second, *self.second_seeds])
        firsts, seconds = ([read_evaluation(path, self.unverified) for path in side] for side in sides)
        first, second = firsts[0], seconds[0]
        several = len(firsts) + len(seconds) > 2
        result = compare_over_seeds(firsts, seconds) if several else compare(first, second)
        if self.out is not None:
            out = Path(self.out)
            out.mkdir(parents=True, exist_ok=True)
            atomic_write_text(out / "compare.md", markdown(result))
            atomic_write_text(out / "compare.json", json.dumps(result, indent=2) + "\n")
        console.answer(result)
        for note in result["notes"]:
            console.note(note)
        unit = "seeds" if several else "questions"
        columns = ("measure", "first", "second", "difference", "95% interval", "p", unit)
        rows = [row[: len(columns)] for row in difference_rows(result)]
        console.table(f"second - first: {second.path} - {first.path}", columns, rows)
        if result["recalled"]:
            texts = ("a gold recalled by", "both", "only the first", "only the second", "neither", "questions")
            console.table("questions whose passages hold a gold in both runs", texts, recall_rows(result))


class Score(
    Command,
    help="score transcripts with a system's reward",
    place=70,
    example="thresher score --system eval_rar --transcripts in.jsonl --out out.jsonl",
):
    system: Annotated[str, "name of a system, or path/to/your_own.py"]
    set: Annotated[Texts, REPEATED, "OPTION=VALUE", "option of the system; may be repeated"] = []
    transcripts: Annotated[str, "FILE", "JSONL file of segmented transcripts"]
    tokenizer: Annotated[str | None, "DIR", "folder of the tokenizer that counts lengths; default: in words"] = None
    out: Annotated[str, "FILE", "JSONL file to write, one line per transcript"]
    unverified: Unverified = False

    def __call__(self) -> None:
        from thresher.engine.scoring.transcripts import score_file

        switches = parse_overrides(self.set)
        figures = score_file(self.system, switches, self.transcripts, self.out, self.tokenizer, self.unverified)
        console.figures(f"{self.system} rewards in {self.out}", figures)


Share = Annotated[float, checked(float, "a share above 0, up to 1", lambda value: 0 < value <= 1)]
_CHAT = "URL of a server with OpenAI's chat completions API"


class Extract(
    Command,
    help="extract evidence from passages, and answer from it",
    place=60,
    example="thresher extract --model models/eviomni --questions dev.jsonl --index indexes/mine --out evidence.jsonl",
):
    _which, _protocol, _place = OneOf(required=True), OneOf(), OneOf()

    model: Annotated[str | None, _which, "folder of the extractor, or of the refiner's encoder"] = None
    best_of: Annotated[
        str | None,
        _which,
        "RUN",
        "run folder; use its checkpoint with the best dev EM, under the settings of its training",
    ] = None
    system: Annotated[
        str | None, _protocol, "NAME", "system whose protocol the extractor follows; default: the run's, or eviomni"
    ] = None
    baseline: Annotated[
        str | None,
        _protocol,
        "NAME",
        "baseline in place of the system: extract_only, or cot with system.options.passages",
    ] = None
    refiner: Annotated[
        Name | None,
        _protocol,
        "compressor in place of a trained EviOmni: filco generates the sentences that help; the others keep "
        "parts of the passages, by a policy's self-information (selective-context), an encoder's embeddings "
        "(recomp) or a token classifier (llmlingua-2)",
    ] = None
    questions: Annotated[str, "JSONL file of questions; passages and gold answers are optional"]
    out: Annotated[str, "F.jsonl", "JSONL file to write, one line per question; an existing file is continued"]
    keep: Annotated[
        Share | None, "SHARE", "share of the units to keep, with selective-context and llmlingua-2; default .5"
    ] = None
    unit: Annotated[Unit | None, "unit that selective-context keeps or drops; default sentence"] = None
    sentences: Annotated[Count | None, "N", "number of sentences that recomp keeps; default 1"] = None
    index: Annotated[str | None, _place, "index folder to search for passages, if the questions come without"] = None
    url: Annotated[str | None, _place, "URL of a retrieval server, in place of --index"] = None
    k: Annotated[Count | None, "number of passages per search; default: the run's, or 5"] = None
    distractors: Annotated[Natural, "N", "number of irrelevant passages added to those of each question"] = 0
    seed: Annotated[Natural, "seed of the distractors; default 0"] = 0
    evidence_tokens: Annotated[Count | None, "N", "truncate the evidence to N tokens; default: never"] = None
    template: Annotated[str | None, "FILE", "file with the extractor's prompt, with {question} and {passages}"] = None
    prompt: Annotated[
        Prompt | None, "prompt format of the local models; chat: their chat templates; default: the run's, or raw"
    ] = None
    loop: Annotated[
        Literal["traditional", "agentic"],
        "traditional: one extraction per question; agentic: an agent searches, and reads the evidence",
    ] = "traditional"
    answer_model: Annotated[str | None, "DIR", "folder of the model that answers from the evidence"] = None
    answer_url: Annotated[str | None, "URL", _CHAT] = None
    answer_name: Annotated[str | None, "MODEL", "name of the model at --answer-url"] = None
    answer_template: Annotated[str | None, "FILE", "file with the answering model's prompt, with {question}"] = None
    agent_model: Annotated[str | None, "DIR", "folder of the model that searches, with --loop agentic"] = None
    agent_url: Annotated[str | None, "URL", _CHAT] = None
    agent_name: Annotated[str | None, "MODEL", "name of the model at --agent-url"] = None
    agent_template: Annotated[str | None, "FILE", "file with the agent's prompt, with {question}"] = None
    actions: Annotated[Count, "maximum number of searches by the agent; default 4"] = 4
    limit: Annotated[Count | None, "maximum number of questions, from the start of the file"] = None
    batch: Annotated[Count, "number of questions between two writes; default 64"] = 64
    key_env: Annotated[str | None, "VARIABLE", "environment variable with the API key of the chat server"] = None
    patience: Annotated[Seconds, "SECONDS", "how long to keep retrying a server that does not respond"] = 300.0
    set: Annotated[
        Texts,
        REPEATED,
        "SECTION.KEY=VALUE",
        "override a key of model, rollout, retrieval or system, as in recipes; may be repeated",
    ] = []
    device: ModelDevice = None

    def __call__(self) -> None:
        from thresher.engine.extraction.run import ExtractionPlan, extract

        agentic = self.loop == "agentic"
        generator, agent = self._chosen("answer"), self._chosen("agent")
        if agentic != (agent is not None):
            raise UserError(
                "--loop agentic needs an agent: give --agent-model DIR, or --agent-url URL and --agent-name MODEL"
                if agentic
                else "an agent is for --loop agentic; add it, or leave out the flags that begin with --agent"
            )
        if agentic and generator is not None:
            raise UserError("with --loop agentic the agent answers; leave out the flags that begin with --answer")
        if agentic and self.distractors:
            raise UserError(
                "--distractors adds passages to a question's own, and an agent searches; leave one of them out"
            )
        plan = flags.fill(
            ExtractionPlan,
            self,
            **self._extractor(),
            refining=compressor_options(self.refiner, keep=self.keep, unit=self.unit, sentences=self.sentences),
            generator=generator,
            agent=agent,
            overrides=tuple(flags.overrides(self.set, self.device)),
            noise=self.distractors,
        )
        by = plan.model if self.refiner is None else f"{self.refiner} of {plan.model}"
        console.announce(f"extract: {self.loop}, from {plan.questions} with {by}, into {plan.out}")
        with signals.on_interrupt(lambda: signals.lines_in(Path(plan.out))), console.stages() as on_stage:
            figures = extract(plan, lambda done, of: on_stage("extract", done, of), console.note)
        console.figures(f"extract: {plan.out}", figures)

    def _extractor(self) -> dict[str, Any]:
        """Return the extractor's folder and what a run that it comes from says of it; flags win."""
        if self.best_of is None:
            return {"model": self.model, "k": self.k or 5, "prompt": self.prompt or "raw"}
        tables = read_tables(RunFolder(Path(self.best_of)).recipe_file)
        return {
            "model": str(best_checkpoint(self.best_of).path),
            "run": self.best_of,
            "k": self.k or tables.get("retrieval", {}).get("k", 5),
            "prompt": self.prompt or tables["model"].get("prompt", "raw"),
        }

    def _chosen(self, who: str) -> "Chosen | None":
        """Return the model that was named for `who`, or None."""
        from thresher.engine.extraction.run import Chosen

        given = {key: getattr(self, f"{who}_{key}") for key in ("model", "url", "name", "template")}
        if all(value is None for value in given.values()):
            return None
        if (given["model"] is None) == (given["url"] is None) or (given["url"] is None) != (given["name"] is None):
            raise UserError(f"expected either --{who}-model DIR, or --{who}-url URL with --{who}-name MODEL")
        return Chosen(**given)
