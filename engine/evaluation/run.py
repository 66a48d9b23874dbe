"""`thresher eval`, from questions to table: generated part by part, kept as it grows, then scored and measured.

    questions -> passages, noise, cut to what fits -> parts of 2 x max_num_seqs: rollout, append to the folder
              -> judges (entailment, verdicts) -> rewards -> measures, intervals -> trajectories, table

What is costly comes first and is on the disk before any judge is asked. Whatever ends an evaluation early (a kill, a
server that stays away, a judge that fails), the same command goes on from what the folder holds; a part that was under
way is generated anew, with the same noise. No failure becomes a score.

Latency is the rollouts' seconds by question: a figure of the whole batch, and stated with it. Prefill, decoding, the
policy's searches and the branches are in it; loading, judges and the search for passages that prompts show are not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.assemble import (
    PromptContext,
    RunContext,
    check_gold_indices,
    load_judges,
    load_retrieval,
    load_run_context,
)
from thresher.engine.baselines import load_baseline
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import DataSection, SystemSection
from thresher.engine.episode import System
from thresher.engine.evaluation.api_rollout import AnsweredBy, ApiRunContext, load_api_context
from thresher.engine.evaluation.evaluate import draw_parts, jobs_of
from thresher.engine.evaluation.folder import ANSWERS, EvalFolder, Generated, check_belongs, check_generated
from thresher.engine.evaluation.metrics import (
    FACTS,
    Values,
    figures_of,
    markdown,
    measures_of,
    parts_of,
    ranking_measures,
    rows_of,
)
from thresher.engine.protocol.prompts import (
    PromptBatch,
    first_prompt,
    noise_pool,
    truncate_passages,
    with_noise,
    with_passages,
)
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import EpisodeRunner, Job
from thresher.engine.scoring.score import Judges, Scored, check_all, score
from thresher.engine.store.run_folder import Best
from thresher.engine.systems import own_digest
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, question_record, read_questions
from thresher.retrieval.retriever import Retriever
from thresher.rewards.papers.evinote import evinote_claims
from thresher.rewards.text import contains_answer

NOTES = ("summary", "evidence", "extract", "evaluate", "analysis")  # tags of what may entail an answer
# Keys of the recipe that decide no trajectory, or only where it is computed.
_FREE = {
    "model": {"device"},
    "retrieval": {"timeout", "patience"},
    "rollout": {
        "max_num_seqs",
        "kv_block_size",
        "kv_tokens",
        "attention",
        "num_draft_tokens",
        "group_size",
        "questions_per_step",
        "temperature",
    },
}
Answerer = RunContext | ApiRunContext  # each with a `rollout` that has a prompt, a run and a clock


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Settings of an evaluation besides its recipe; `baseline` answers in the place of a system, `answered_by` in that
    of our policy. allow_keys: where which key may go, as `load_endpoint` has it."""

    questions: str | None = None
    limit: int | None = None
    temperature: float = 0.0
    noise: int = 0
    baseline: str | None = None
    best: Best | None = None
    allow_keys: tuple[str, ...] = ()
    answered_by: AnsweredBy | None = None


def run_evaluation(recipe: Recipe, asked: EvalOptions, out: Path) -> dict[str, Any]:
    """Evaluate into the folder `out`, show the table, and return what metrics.json holds."""
    path = asked.questions or recipe.need(DataSection).dev
    if path is None:
        raise UserError("eval: no questions; give --questions FILE, or data.dev in the recipe")
    questions = read_questions(path)[: asked.limit]
    settings = settings_of(recipe, asked, path, questions)
    EvalFolder.check(out, settings)
    recipe = replace(
        recipe, rollout=replace(recipe.rollout, max_num_seqs=min(recipe.rollout.max_num_seqs, len(questions)))
    )
    context = _load(recipe, asked, out / ANSWERS)
    context = replace(context, system=_with_claims(context.system, recipe.judge.entailment))
    check_gold_indices(questions, context.system, path)
    retriever = retriever_of(recipe, context.system)
    shown = prepare(questions, context, retriever, asked.noise)
    questions = shown.questions
    if warning := shown.warning():
        console.console.print(f"eval: {warning}", soft_wrap=True)
    rollout = context.rollout(retriever)
    for question in questions:
        rollout.prompt(question)  # refused before anything is written
    if not asked.answered_by and recipe.model.prompt == "raw" and context.tokenizer.chat_template is not None:
        console.console.print(
            "eval: the prompt goes in as it is, though the model has a chat template, which --prompt chat takes",
            soft_wrap=True,
        )
    with EvalFolder.open(out, settings) as folder, context.threads():
        judges = load_judges(recipe, context.system, out / "replies.jsonl", asked.allow_keys)
        try:
            done = _generate(rollout, questions, asked.temperature, recipe.run.seed, folder)
            scored = _score(questions, done, context, judges)
        except UserError as error:
            raise UserError(f"{error} ({out} keeps all so far: the same command goes on from there)") from error
        measures = _measures(scored, done, context)
        figures = figures_of(measures, [parts_of(entry) for entry in scored])
        figures |= _facts(context, asked, path, judges, scored, sum(one.seconds for one in done))
        roomless = round(sum(one.branches_without_room for one in done))
        figures |= {"branches_without_room": roomless, "roomless": _roomless(roomless)}
        figures |= {"cut_questions": shown.cut_questions, "cut_passages": shown.cut_passages, "cut": shown.warning()}
        records = (
            {**entry.to_dict(context.tokenizer), "measures": values}
            for entry, values in zip(scored, measures, strict=True)
        )
        folder.finish(records, markdown(f"{context.system.name} on {Path(path).name}", figures), figures)
    _show(out, figures)
    return figures


def settings_of(recipe: Recipe, asked: EvalOptions, path: str, questions: Sequence[Question]) -> dict[str, Any]:
    """Return what decides the trajectories, by dotted keys: an unfinished evaluation goes on under the very same
    alone."""
    tables = recipe.to_dict()
    settings = {
        f"{section}.{key}": value
        for section in ("model", "retrieval", "system", "rollout")
        for key, value in tables.get(section, {}).items()
        if key not in _FREE.get(section, ())
    }
    content = blake2b(repr([question_record(question) for question in questions]).encode("utf-8", "surrogatepass"))
    settings |= asked.answered_by.settings() if asked.answered_by else {}
    return settings | {
        "baseline": asked.baseline,
        "the system file's content": own_digest(recipe.system.name) if recipe.system else None,
        "questions": path,
        "limit": asked.limit,
        "the questions' content": content.hexdigest()[:16],
        "temperature": asked.temperature,
        "seed": recipe.run.seed if asked.temperature or asked.noise else None,
        "noise": asked.noise,
    }


def prepare(
    questions: Sequence[Question], context: PromptContext, retriever: Retriever | None, noise: int
) -> PromptBatch:
    """Return the questions with what their prompts show: passages found where they bring none, and noise, as far as
    they fit.

    Noise is drawn from the corpus where it is at hand, else from the passages of the other questions. UserError for
    passages that are nowhere, and for noise without a prompt to put it into.
    """
    if not context.system.given_passages:
        if noise:
            raise UserError(
                f"eval: --distractors adds passages to a prompt, and that of {context.system.name} shows none"
            )
        return PromptBatch(list(questions), 0, 0, context.renderer.max_passage_tokens)
    questions = with_passages(questions, retriever, context.renderer.k)
    questions = with_noise(questions, noise_pool(questions, retriever), noise, context.recipe.run.seed)
    return truncate_passages(questions, context.system, context.tools, context.renderer)


def _load(recipe: Recipe, asked: EvalOptions, answers: Path) -> Answerer:
    section = recipe.need(SystemSection)
    system = None if asked.baseline is None else load_baseline(asked.baseline, section.options)
    if asked.answered_by is not None:
        return load_api_context(recipe, system, asked.answered_by, answers)
    return load_run_context(recipe, system=system)


def _measures(scored: Sequence[Scored], done: Sequence[Generated], context: Answerer) -> list[Values]:
    """Return each question's measures, without those in tokens where an endpoint answered and nobody knows its
    tokens."""
    left_out = context.unmeasured if isinstance(context, ApiRunContext) else ()
    found = [
        measures_of(entry, context.system.tags) | ranking_measures(one.relevant)
        for entry, one in zip(scored, done, strict=True)
    ]
    return [{name: value for name, value in values.items() if name not in left_out} for values in found]


def retriever_of(recipe: Recipe, system: System) -> Retriever | None:
    """Return the retriever that the system searches, or that its passages are looked for in; None if it reads
    nothing."""
    reads = system.given_passages or system.needs_index
    return load_retrieval(recipe, system) if reads else None


def _generate(
    rollout: EpisodeRunner,
    questions: Sequence[Question],
    temperature: float,
    seed: int,
    folder: EvalFolder,
) -> list[Generated]:
    """Return all trajectories, those that the folder holds already among them."""
    done = folder.generated()
    check_belongs(done, [question.id for question in questions], folder.path)
    check_generated(done, rollout, folder.path / "generated.jsonl")

    def keep(part: Sequence[Job], trajectories: list[Trajectory]) -> None:
        clock, count = rollout.clock, len(part)
        shares = {"seconds": clock.total / count, "branches_without_room": clock.branches_without_room / count}
        new = [
            Generated(trajectory, relevant=_relevant(job.question, trajectory, rollout), **shares)
            for job, trajectory in zip(part, trajectories, strict=True)
        ]
        folder.append(new)
        done.extend(new)

    draw_parts(rollout, jobs_of(questions, temperature, seed), temperature, len(done), "eval", keep)
    return done


def _relevant(question: Question, trajectory: Trajectory, rollout: EpisodeRunner) -> list[bool]:
    """Return for each passage True if it holds a gold string: of those that the prompt shows, or of those found, best
    first, search after search."""
    passages: Sequence[Passage] = ()
    queries = [search["query"] for search in trajectory.searches]
    if rollout.system.given_passages:
        passages = first_prompt(rollout.system, question, rollout.tools).passages
    elif queries and rollout.retriever is not None:  # which remembers what it found
        hits = [hit for found in rollout.retriever.search(queries, rollout.renderer.k) for hit in found]
        passages = list({hit.passage.id: hit.passage for hit in hits}.values())
    return [contains_answer(passage.text, question.golds) for passage in passages]


def _with_claims(system: System, classifier: str | None) -> System:
    """Return the system with its notes measured by the classifier, if one is named, even if no reward asks: EviNote's
    premise, the last note, of whatever tag the system's notes have."""
    tag = next((tag for tag in NOTES if f"<{tag}>" in system.tags), None)
    if classifier is None or system.claims is not None or tag is None:
        return system
    return replace(system, claims=partial(evinote_claims, tag=tag))


def _score(questions: Sequence[Question], done: Sequence[Generated], context: Answerer, judges: Judges) -> list[Scored]:
    # A chat model that is there judges every system's answers, not those alone that are rewarded by it.
    system = replace(context.system, wants_verdict=judges.verdict is not None)
    scored = score(questions, [one.trajectory for one in done], system, context.tokenizer, judges)
    check_all(scored, context.tokenizer, context.system.tags, context.limits.max_context)
    return scored


def _facts(
    context: Answerer, asked: EvalOptions, path: str, judges: Judges, scored: Sequence[Scored], seconds: float
) -> dict[str, Any]:
    recipe, best = context.recipe, asked.best
    chosen = None
    if best is not None:
        chosen = f"step {best.step}, of best exact match on the dev split ({best.em:.1%})"
        if best.lost is not None:
            chosen += f", among the checkpoints that are kept; step {best.lost} was better and is not"
    each, model, batch = seconds / len(scored), recipe.model, recipe.rollout.max_num_seqs
    branches = ", branches included" if any(entry.trajectory.branches for entry in scored) else ""
    return {
        "system": None if asked.baseline else context.system.name,
        "baseline": asked.baseline,
        "options": (options := recipe.system.options if recipe.system else {}),
        "switches": ", ".join(f"{name} = {value}" for name, value in sorted(options.items())) or None,
        "model": model.path,
        "prompt": model.prompt,
        "chosen": chosen,
        "data": f"{path}, {len(scored):,} questions",
        "retrieval": _retrieval(context),
        "noise": asked.noise,
        "temperature": asked.temperature,
        "seed": recipe.run.seed,
        "entailment_judge": judges.entailment and judges.entailment.name,
        "verdict_judge": judges.verdict and judges.verdict.name,
        "seconds": seconds,
        "seconds_per_question": each,
        "batch": batch,
        "latency": f"{each:.3g} s a question, at most {batch} at once, {model.dtype} on {model.device}{branches}",
        "gold": _gold(context, scored),
        "rewarded_by": rewarded_by(context),
        "reasons": (reasons := dict(sorted(Counter(entry.trajectory.reason for entry in scored).items()))),
        "ended": ", ".join(f"{reason} {count:,}" for reason, count in reasons.items()),
        **(context.facts(each) if isinstance(context, ApiRunContext) else {}),
    }


def _roomless(count: int) -> str | None:
    return f"{count:,} found no room in rollout.max_context, and their answers count as missing" if count else None


def _gold(context: PromptContext, scored: Sequence[Scored]) -> str | None:
    """Say how many questions leave open what their gold passages are, if the system's reward asks for it."""
    unknown = sum(entry.question.gold_indices is None for entry in scored)
    if not context.system.needs_gold_indices or not unknown:
        return None
    return f"unknown for {unknown:,} of {len(scored):,} questions, to which naming some earns nothing"


def rewarded_by(context: PromptContext) -> str:
    """Return the reward in words: two evaluations with the same have rewards that compare."""
    if context.system_digest is not None:
        section = context.recipe.need(SystemSection)
        return f"{section.name}, {context.system_digest[:16]}, {dict(sorted(section.options.items()))}"
    given = context.system.reward
    reward, switches = (given.func, given.keywords) if isinstance(given, partial) else (given, {})
    # As evaluations have it that were stored before the papers' rewards had a folder of their own.
    module = reward.__module__.replace("thresher.rewards.papers.", "thresher.rewards.")
    return f"{module}.{reward.__qualname__}, {dict(sorted(switches.items()))}"


def _retrieval(context: PromptContext) -> str | None:
    """Return the source of the passages, in words; None for a system that reads none."""
    section = context.recipe.retrieval
    place = section and (section.index or section.url)
    if context.system.needs_index:
        return f"{context.renderer.k} a search, from {place}"
    if not context.system.given_passages:
        return None
    return "those given with the questions" + (f", else the {context.renderer.k} best of {place}" if place else "")


def _show(out: Path, figures: dict[str, Any]) -> None:
    facts = [(FACTS[key], figures[key]) for key in FACTS if figures.get(key) is not None]
    console.console.print("\n".join(f"{name}: {value}" for name, value in facts), markup=False, soft_wrap=True)
    console.table(f"eval: {out}", ("measure", "mean", "95% interval", "questions"), rows_of(figures))
