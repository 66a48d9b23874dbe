"""`thresher eval`: generate and store trajectories in batches, then score them and write the table.

    questions -> passages, noise, cut to fit -> batches of 2 x max_num_seqs: rollout, append to the folder
              -> judges (entailment, verdicts) -> rewards -> measures, intervals -> trajectories, table

Trajectories are on disk before a judge is called. The same command resumes an unfinished evaluation and generates an
unfinished batch again, with the same noise. A failure is never counted as a score.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object, staged_folder
from thresher.common.hashes import MODEL_FILES, folder_digest, text_digest
from thresher.common.locks import lock_folder
from thresher.common.records import RecordLog, write_object, write_records
from thresher.engine.assemble import (
    PromptContext,
    RunContext,
    check_gold_indices,
    load_judges,
    load_retrieval,
    load_run_context,
    tools_digest,
)
from thresher.engine.baselines import load_baseline
from thresher.engine.config.recipe import COMPUTING_KEYS, Recipe
from thresher.engine.config.sections import DataSection, SystemSection
from thresher.engine.episode import System
from thresher.engine.evaluation.api_rollout import AnsweredBy, ApiRunContext, load_api_context
from thresher.engine.evaluation.evaluate import generate_in_batches, jobs_of
from thresher.engine.evaluation.metrics import (
    FACTS,
    NAMES,
    Values,
    figures_of,
    markdown,
    measures_of,
    parts_of,
    ranking_measures,
    rows_of,
)
from thresher.engine.evaluation.metrics import (
    shown as shown_measure,
)
from thresher.engine.protocol.prompts import (
    PromptBatch,
    first_prompt,
    noise_pool,
    truncate_passages,
    with_noise,
    with_passages,
)
from thresher.engine.protocol.trajectory import Segment, Trajectory, are_scores, check_trajectory
from thresher.engine.rollout.rollout import EpisodeRunner, Job
from thresher.engine.scoring.score import Judges, Scored, check_all, score
from thresher.engine.store.run_folder import Best
from thresher.engine.systems import PLAIN, own_digest, own_files
from thresher.retrieval.indexes.manifest import FILE as MANIFEST
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, question_record, read_questions
from thresher.retrieval.retriever import Retriever
from thresher.rewards.papers.evinote import evinote_claims
from thresher.rewards.reward import Source
from thresher.rewards.text import contains_answer

NOTES = ("summary", "evidence", "extract", "evaluate", "refine", "analysis")  # tags of spans that may entail an answer
ANSWERS = "answers.jsonl"
REMEDY = "delete this line and those after it, and they are generated again"
# Recipe keys that do not affect trajectories, or that the evaluation sets itself.
_FREE = {*COMPUTING_KEYS, "retrieval.timeout", "retrieval.patience"} | {
    f"rollout.{key}" for key in ("group_size", "trees", "tree_nodes", "questions_per_step", "temperature")
}
Answerer = RunContext | ApiRunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Settings of an evaluation in addition to its recipe.

    baseline: replaces the system. answered_by: the model that replaces the recipe's policy. allow_keys: as in
    `load_endpoint`.
    """

    questions: str | None = None
    limit: int | None = None
    temperature: float = 0.0
    noise: int = 0
    baseline: str | None = None
    best: Best | None = None
    allow_keys: tuple[str, ...] = ()
    answered_by: AnsweredBy | None = None


def run_evaluation(recipe: Recipe, asked: EvalOptions, out: Path) -> dict[str, Any]:
    """Run the evaluation, write it to the folder `out`, show the table, and return the content of metrics.json."""
    path = asked.questions or recipe.need(DataSection).dev
    if path is None:
        raise UserError("eval: no questions; give --questions FILE, or data.dev in the recipe")
    questions = read_questions(path, golds_needed=False)[: asked.limit]
    settings = settings_of(recipe, asked, path, questions)
    EvalFolder.check(out, settings)
    recipe = recipe.running_at_most(len(questions))
    context = _load(recipe, asked, out / ANSWERS)
    context = replace(context, system=_with_claims(context.system, recipe.judge.entailment))
    check_gold_indices(questions, context.system, path)
    retriever = retriever_of(recipe, context.system)
    shown = prepare(questions, context, retriever, asked.noise)
    rollout = context.rollout(retriever)
    prompts = check_prompts(shown, rollout, context, "eval", "--prompt chat")
    questions = shown.questions
    with EvalFolder.open(out, settings) as folder, context.threads():
        judges = load_judges(recipe, context.system, out / "replies.jsonl", asked.allow_keys)
        try:
            done = _generate(rollout, questions, prompts, asked.temperature, recipe.run.seed, folder)
            scored = _score(questions, done, context, judges)
        except UserError as error:
            raise UserError(f"{error} ({out} keeps all so far: the same command goes on from there)") from error
        measures = _measures(scored, done, context)
        figures = figures_of(measures, [parts_of(entry) for entry in scored])
        figures |= _facts(context, asked, path, judges, scored, sum(one.seconds for one in done))
        roomless = round(sum(one.branches_without_room for one in done))
        lost = f"{roomless:,} did not fit into rollout.max_context, and their answers count as missing"
        figures |= {"branches_without_room": roomless, "roomless": lost if roomless else None}
        figures |= {"cut_questions": shown.cut_questions, "cut_passages": shown.cut_passages, "cut": shown.warning()}
        records = (
            {**entry.to_dict(context.tokenizer), "measures": values}
            for entry, values in zip(scored, measures, strict=True)
        )
        folder.finish(records, markdown(f"{context.system.name} on {Path(path).name}", figures), figures)
    facts = [f"{FACTS[key]}: {figures[key]}" for key in FACTS if figures.get(key) is not None]
    console.console.print("\n".join(facts), markup=False, soft_wrap=True)
    console.table(f"eval: {out}", ("measure", "mean", "95% interval", "questions"), rows_of(figures))
    return figures


def check_prompts(
    shown: PromptBatch, rollout: EpisodeRunner, context: Answerer, label: str, chat: str
) -> list[list[int]]:
    """Return the ids of the prompts. Print what was cut, and a hint if the model's chat template is unused.

    chat: the flag that uses the template. UserError for a prompt that does not fit into the context.
    """
    if warning := shown.warning():
        console.console.print(f"{label}: {warning}", soft_wrap=True)
    prompts = [rollout.prompt(question) for question in shown.questions]
    if (
        isinstance(context, RunContext)
        and context.recipe.model.prompt == "raw"
        and context.tokenizer.chat_template is not None
    ):
        console.console.print(
            f"{label}: the prompt is used as it is, though the model has a chat template, which {chat} uses",
            soft_wrap=True,
        )
    return prompts


def recipe_settings(recipe: Recipe, weights: bool = True) -> dict[str, Any]:
    """Return the settings of a recipe that determine trajectories, by dotted key, and digests of the files it names.
    weights: whether the recipe's model generates the trajectories."""
    tables, retrieval = recipe.to_dict(), recipe.retrieval
    settings = {
        f"{section}.{key}": value
        for section in ("model", "retrieval", "system", "tools", "rollout")
        for key, value in tables.get(section, {}).items()
        if f"{section}.{key}" not in _FREE
    }
    if (digest := tools_digest(recipe)) is not None:
        settings["the content of the tools' files"] = digest
    if weights and recipe.run.verify:
        settings["the model's content"] = folder_digest(recipe.model.path, *MODEL_FILES)
    if retrieval is not None and retrieval.index is not None:
        settings["the index's content"] = folder_digest(retrieval.index, MANIFEST)
    if recipe.system is not None and recipe.system.template is not None:
        settings["the template's content"] = text_digest(recipe.system.template)
    return settings | {"the system file's content": own_digest(recipe.system.name) if recipe.system else None}


def settings_of(recipe: Recipe, asked: EvalOptions, path: str, questions: Sequence[Question]) -> dict[str, Any]:
    """Return all settings that determine the trajectories. An evaluation is resumed only with equal settings."""
    settings = recipe_settings(recipe, weights=asked.answered_by is None)
    settings |= asked.answered_by.settings() if asked.answered_by else {}
    content = repr([question_record(question) for question in questions]).encode("utf-8", "surrogatepass")
    noisy = any(tool.noise is not None for tool in (recipe.tools or {}).values())
    return settings | {
        "baseline": asked.baseline,
        "questions": path,
        "limit": asked.limit,
        "the questions' content": blake2b(content).hexdigest()[:16],
        "temperature": asked.temperature,
        "seed": recipe.run.seed if asked.temperature or asked.noise or noisy else None,
        "noise": asked.noise,
    }


def prepare(
    questions: Sequence[Question], context: PromptContext, retriever: Retriever | None, noise: int
) -> PromptBatch:
    """Return the questions with the passages of their prompts, cut to fit.

    These are a question's own passages, or retrieved ones, and `noise` irrelevant ones. Noise is drawn from a local
    corpus, else from the passages of the other questions. UserError if there are no passages, and for noise if the
    prompt shows no passages.
    """
    if not context.system.given_passages:
        if noise:
            raise UserError(
                f"eval: --distractors adds passages to a prompt, and that of {context.system.name} shows none"
            )
        return PromptBatch(list(questions), 0, 0, 0)
    questions = with_passages(questions, retriever, context.renderer.k, context.system.most_given)
    questions = with_noise(questions, noise_pool(questions, retriever), noise, context.recipe.run.seed)
    return truncate_passages(questions, context.system, context.episode_config, context.renderer)


def retriever_of(recipe: Recipe, system: System) -> Retriever | None:
    """Return the recipe's retriever; None for a system that neither searches nor shows passages."""
    return load_retrieval(recipe, system) if system.given_passages or system.needs_index else None


def _load(recipe: Recipe, asked: EvalOptions, answers: Path) -> Answerer:
    options = recipe.need(SystemSection).options
    system = None if asked.baseline is None else load_baseline(asked.baseline, options)
    if asked.answered_by is not None:
        return load_api_context(recipe, system, asked.answered_by, answers)
    return load_run_context(recipe, system=system)


def _with_claims(system: System, classifier: str | None) -> System:
    """Return the system with an entailment claim about its last note. It is unchanged if no classifier is named, it
    has no notes, or it makes claims itself."""
    tag = next((tag for tag in NOTES if f"<{tag}>" in system.tags), None)
    if classifier is None or system.claims is not None or tag is None:
        return system
    return replace(system, claims=partial(evinote_claims, tag=tag))


# --- Trajectories, and the folder that stores them


@dataclass(frozen=True, slots=True)
class Generated:
    """A trajectory with its share of the batch's seconds and of the batch's branches without room in the context.

    relevant: for each passage found or given, True if it contains a gold string; empty if the question has no golds.
    """

    trajectory: Trajectory
    seconds: float
    relevant: list[bool]
    branches_without_room: float = 0.0


class EvalFolder:
    """The folder of `thresher eval`, locked; use it in a `with` statement. If an error ends the block and the folder
    holds no results, it is removed.

        settings.json        settings that determine the trajectories; a command with other settings is refused
        generated.jsonl      the trajectories so far, appended in batches; deleted once the evaluation is complete
        answers.jsonl        replies of the endpoint that generates the turns, if any
        replies.jsonl        replies of an LLM judge, if any
        trajectories.jsonl   for every question its trajectory, reward, parts and measures
        table.md             the table, for reading
        metrics.json         the same, and the settings of the measurement; written last
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock
        self._log = RecordLog(path / "generated.jsonl", remedy=REMEDY)

    @staticmethod
    def check(path: str | Path, settings: Mapping[str, Any]) -> None:
        """Raise UserError unless the folder is free or holds an unfinished evaluation with these settings."""
        path = Path(path)
        if not os.path.lexists(path):
            return
        if not (path / "settings.json").is_file() or (path / "metrics.json").exists():
            raise UserError(f"{path}: exists already; choose another folder for the evaluation")
        before = read_json_object(path / "settings.json")
        now = json.loads(json.dumps(settings))
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                one, other = (
                    "nothing" if values.get(key) is None else json.dumps(values[key], ensure_ascii=False)
                    for values in (before, now)
                )
                raise UserError(
                    f"{path}: holds an unfinished evaluation with {key} = {one}, not {other}; finish it with its own "
                    "settings, or choose another folder"
                )

    @classmethod
    def open(cls, path: str | Path, settings: Mapping[str, Any]) -> "EvalFolder":
        """Open a new folder or an unfinished one. UserError as `check`, and while another process writes to the
        folder."""
        path = Path(path)
        cls.check(path, settings)
        if path.exists():
            return cls(path, lock_folder(path))
        with staged_folder(path) as staged:
            atomic_write_text(staged / "settings.json", json.dumps(settings, indent=1) + "\n")
            lock = lock_folder(staged)  # is held across the rename
        return cls(path, lock)

    def __enter__(self) -> "EvalFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and {path.name for path in self.path.iterdir()} <= {"settings.json", ".lock"}:
            shutil.rmtree(self.path)
        os.close(self._lock)

    def generated(self) -> list[Generated]:
        """Return the entries so far, without an incomplete last line left by a kill."""
        return [read_generated(record, f"{self._log.path}:{number}") for number, record in self._log.recover()]

    def append(self, entries: Iterable[Generated]) -> None:
        """Append entries; when this returns, they survive a kill of the process."""
        self._log.append(*map(write_generated, entries))

    def finish(self, records: Iterable[dict[str, Any]], table: str, figures: Mapping[str, Any]) -> None:
        """Write the results. metrics.json, which marks the evaluation as complete, is written last."""
        mark = write_records(self.path / "trajectories.jsonl", records)
        atomic_write_text(self.path / "table.md", table)
        write_object(self.path / "metrics.json", {**figures, "trajectories": mark})
        self._log.path.unlink(missing_ok=True)


def _generate(
    rollout: EpisodeRunner,
    questions: Sequence[Question],
    prompts: Sequence[Sequence[int]],
    temperature: float,
    seed: int,
    folder: EvalFolder,
) -> list[Generated]:
    """Generate the missing trajectories; return all, including those that the folder already holds."""
    done = folder.generated()
    ids = [question.id for question in questions[: len(done)]]
    if [entry.trajectory.question_id for entry in done] != ids:
        raise UserError(
            f"{folder.path}: holds trajectories of other questions; choose another folder for the evaluation"
        )
    for entry, prompt in zip(done, prompts, strict=False):
        if entry.trajectory.segments[0].ids != list(prompt):
            raise UserError(
                f"{folder.path}: the prompt of question {entry.trajectory.question_id} is now another (its template, "
                "examples or passages were changed); restore it, or choose another folder"
            )
    check_generated(done, rollout, folder.path / "generated.jsonl")

    def keep(batch: Sequence[Job], trajectories: list[Trajectory]) -> None:
        clock, count = rollout.clock, len(batch)
        shares = {"seconds": clock.total / count, "branches_without_room": clock.branches_without_room / count}
        new = [
            Generated(trajectory, relevant=_relevant(job.question, trajectory, rollout), **shares)
            for job, trajectory in zip(batch, trajectories, strict=True)
        ]
        folder.append(new)
        done.extend(new)

    generate_in_batches(rollout, jobs_of(questions, temperature, seed), temperature, len(done), "eval", keep)
    return done


def _relevant(question: Question, trajectory: Trajectory, rollout: EpisodeRunner) -> list[bool]:
    """Return for each passage whether it contains a gold string. Passages are those of the prompt, or those found, in
    the order of searches and ranks."""
    passages: Sequence[Passage] = ()
    queries = [search["query"] for search in trajectory.searches]
    if rollout.system.given_passages:
        passages = first_prompt(rollout.system, question, rollout.episode_config).passages
    elif queries and rollout.retriever is not None:  # its cache holds these queries
        hits = [hit for found in rollout.retriever.search(queries, rollout.renderer.k) for hit in found]
        passages = list({hit.passage.id: hit.passage for hit in hits}.values())
    return [contains_answer(passage.text, question.golds) for passage in passages] if question.golds else []


def check_generated(entries: Sequence[Generated], rollout: EpisodeRunner, path: Path) -> None:
    """Raise UserError, naming the line, if a trajectory or one of its branches violates an invariant."""
    for number, entry in enumerate(entries, 1):
        for one in (entry.trajectory, *entry.trajectory.branches.values()):
            if wrong := check_trajectory(one, rollout.tokenizer, rollout.system.tags, rollout.limits.max_context):
                raise UserError(f"{path}:{number}: {'; '.join(wrong)}; {REMEDY}")


def write_generated(entry: Generated) -> dict[str, Any]:
    """Return the record of an entry. `from_api` is stored under its original name, "elsewhere"."""

    def stored(trajectory: Trajectory) -> dict[str, Any]:
        record = asdict(trajectory)
        record["branches"] = {name: stored(branch) for name, branch in trajectory.branches.items()}
        record["elsewhere"] = record.pop("from_api")
        return record

    return asdict(entry) | {"trajectory": stored(entry.trajectory)}


def read_generated(record: Mapping[str, Any], where: str) -> Generated:
    """Return the entry of a record. UserError, starting with `where`, for a record in any other form."""
    try:
        record = {key: value for key, value in record.items() if key != "check"}  # a digest that earlier versions wrote
        entry = Generated(**{**record, "trajectory": _trajectory(record["trajectory"])})
        _require(
            all(isinstance(x, int | float) and 0 <= x < math.inf for x in (entry.seconds, entry.branches_without_room))
        )
        _require(isinstance(entry.relevant, list) and all(isinstance(x, bool) for x in entry.relevant))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{where}: expected a trajectory as it was written ({type(error).__name__}: {error}); {REMEDY}"
        ) from None
    return entry


def _trajectory(record: Mapping[str, Any]) -> Trajectory:
    """Read a trajectory. ValueError, TypeError or KeyError if a field has another type than in `asdict`;
    `check_generated` checks the rest."""
    fields = {"from_api" if key == "elsewhere" else key: value for key, value in record.items()}
    segments = [_segment(segment) for segment in fields.pop("segments")]
    branches = {name: _trajectory(branch) for name, branch in fields.pop("branches").items()}
    forked = fields.pop("forked", None)  # absent in files of earlier versions
    found = Trajectory(**fields, segments=segments, branches=branches, forked=tuple(forked) if forked else None)
    _require(isinstance(found.trained, bool) and (found.forked is None or len(found.forked) == 2))
    _require(all(map(_whole, found.forked or ())))
    _require(all(isinstance(text, str) for text in (found.question_id, found.reason, *branches)))
    _require(_whole(found.group) and _whole(found.sample) and isinstance(found.searches, list))
    _require(all(isinstance(search, dict) and isinstance(search["query"], str) for search in found.searches))
    listed = [search.get("passages", []) for search in found.searches]
    _require(all(isinstance(ids, list) and all(isinstance(id_, str) for id_ in ids) for ids in listed))
    _require(isinstance(found.tools, list) and all(isinstance(call, dict) for call in found.tools))
    _require(all(isinstance(call["error"], bool) for call in found.tools))
    _require(all(isinstance(call[key], str) for call in found.tools for key in ("name", "text")))
    _require(are_scores(found.scores))
    return found


def _segment(record: Mapping[str, Any]) -> Segment:
    before, after = record.get("edges", (0, 0))  # absent in files of earlier versions
    found = Segment(**{**record, "source": Source(record["source"]), "edges": (before, after)})
    _require(_whole(before) and _whole(after))
    _require(isinstance(found.ids, list) and all(map(_whole, found.ids)) and _whole(found.trailing))
    _require(isinstance(found.logprobs, list) and all(isinstance(x, float | int) for x in found.logprobs))
    _require(found.stop is None or (isinstance(found.stop, str) and found.stop != ""))
    return found


def _require(fits: bool) -> None:
    if not fits:
        raise TypeError("a value of another type")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


# --- Scores, and the facts of the table


def _score(questions: Sequence[Question], done: Sequence[Generated], context: Answerer, judges: Judges) -> list[Scored]:
    # A verdict judge rates the answers of every system, even if the reward does not use the verdict.
    system = replace(context.system, wants_verdict=judges.verdict is not None)
    scored = score(questions, [one.trajectory for one in done], system, context.tokenizer, judges)
    check_all(scored, context.tokenizer, context.system.tags, context.limits.max_context)
    return scored


def _measures(scored: Sequence[Scored], done: Sequence[Generated], context: Answerer) -> list[Values]:
    """Return the measures of each question, without lengths in tokens if the tokens of an endpoint are unknown."""
    left_out = context.unmeasured if isinstance(context, ApiRunContext) else ()
    found = [
        measures_of(entry, context.system.tags) | ranking_measures(one.relevant)
        for entry, one in zip(scored, done, strict=True)
    ]
    return [{name: value for name, value in values.items() if name not in left_out} for values in found]


def _facts(
    context: Answerer, asked: EvalOptions, path: str, judges: Judges, scored: Sequence[Scored], seconds: float
) -> dict[str, Any]:
    recipe, best = context.recipe, asked.best
    chosen = gold = None
    if best is not None:
        name, value = NAMES.get(best.metric, (best.metric,))[0], shown_measure(best.metric, best.value)
        chosen = f"step {best.step}, of best {name[0].lower()}{name[1:]} on the dev split ({value})"
        if best.lost is not None:
            chosen += f", among the checkpoints that are kept; step {best.lost} was better but is not kept"
    unknown = sum(entry.question.gold_indices is None for entry in scored)
    if context.system.needs_gold_indices and unknown:
        gold = f"unknown for {unknown:,} of {len(scored):,} questions, which earn nothing for naming some"
    bare = sum(not entry.question.golds for entry in scored)
    without = f"missing for {bare:,} of {len(scored):,} questions, which count in no measure against them"
    without += " nor in the reward" if context.system.needs_golds else ""
    each, model, batch = seconds / len(scored), recipe.model, recipe.rollout.max_num_seqs
    branches = ", branches included" if any(entry.trajectory.branches for entry in scored) else ""
    options = recipe.system.options if recipe.system else {}
    reasons = dict(sorted(Counter(entry.trajectory.reason for entry in scored).items()))
    return {
        "system": None if asked.baseline else context.system.name,
        "baseline": asked.baseline,
        "options": options,
        "switches": ", ".join(f"{name} = {value}" for name, value in sorted(options.items())) or None,
        "model": model.path,
        "prompt": model.prompt,
        "chosen": chosen,
        "data": f"{path}, {len(scored):,} questions",
        "golds": without if bare else None,
        "retrieval": _retrieval(context),
        "noise": asked.noise,
        "temperature": asked.temperature,
        "seed": recipe.run.seed,
        "entailment_judge": judges.entailment and judges.entailment.name,
        "verdict_judge": judges.verdict and judges.verdict.name,
        "seconds": seconds,  # of rollouts, summed over questions, without loading, judges and retrieval for prompts
        "seconds_per_question": each,
        "batch": batch,
        "latency": f"{each:.3g} s a question, at most {batch} at once, {model.dtype} on {model.device}{branches}",
        "gold": gold,
        "rewarded_by": rewarded_by(context),
        "reasons": reasons,
        "ended": ", ".join(f"{reason} {count:,}" for reason, count in reasons.items()),
        "tools": _tools([call for entry in scored for call in entry.trajectory.tools]),
        **(context.facts(each) if isinstance(context, ApiRunContext) else {}),
    }


def _tools(calls: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe how often each tool was called; None if there were no calls."""
    counts, errors = Counter(call["name"] for call in calls), sum(call["error"] for call in calls)
    named = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
    return f"{named}; {errors:,} errors" if calls else None


def rewarded_by(context: PromptContext) -> str:
    """Describe the reward. The rewards of two evaluations are comparable if their descriptions are equal."""
    if context.system_digest is not None:
        section = context.recipe.need(SystemSection)
        return f"{section.name}, {context.system_digest[:16]}, {dict(sorted(section.options.items()))}"
    if context.system.name == PLAIN:  # the user's functions, identified by name and by the content of their files
        section = context.recipe.need(SystemSection)
        digests = [str(own_digest(file))[:16] for file in own_files(section)]
        return f"{PLAIN}, {digests}, {dict(sorted(section.options.items()))}"
    given = context.system.reward_group or context.system.reward
    reward, switches = (given.func, given.keywords) if isinstance(given, partial) else (given, {})
    # The module name that evaluations stored before the folder rewards/papers existed.
    module = reward.__module__.replace("thresher.rewards.papers.", "thresher.rewards.")
    return f"{module}.{reward.__qualname__}, {dict(sorted(switches.items()))}"


def _retrieval(context: PromptContext) -> str | None:
    """Describe the source of the passages; None for a system that reads no passages."""
    section = context.recipe.retrieval
    place = section and (section.index or section.url)
    if context.system.needs_index:
        return f"{context.renderer.k} a search, from {place}"
    if not context.system.given_passages:
        return None
    return "those given with the questions" + (f", else the {context.renderer.k} best of {place}" if place else "")
