"""`thresher extract`: extract evidence before the answer, in a traditional or an agentic loop.

    traditional   passages P of q, given or retrieved, and noise  ->  extractor(q, P) = r, e
                  ->  a generator, if any: answer(q, e)
    agentic       an agent searches, the extractor reads the found passages, and the agent sees only e

The extractor is a policy, or a compressor (engine/compressors/options.py). All decoding is greedy. Questions are
processed in batches; a batch, and replies of a chat model, are on disk (records.py) before the next batch begins.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.hashes import MODEL_FILES, folder_digest, text_digest
from thresher.common.jsonl import Record
from thresher.common.locks import locked_file
from thresher.engine.assemble import load_retrieval, load_run_context
from thresher.engine.baselines import load_baseline
from thresher.engine.baselines.reading import answers_from
from thresher.engine.compressors.compressors import load_compressor
from thresher.engine.compressors.options import FILCO_TEMPLATE, CompressorOptions
from thresher.engine.config.recipe import COMPUTING_KEYS, Recipe, make_recipe, read_tables
from thresher.engine.config.sections import RetrievalSection, SystemSection
from thresher.engine.episode import EpisodeConfig, System, read_template
from thresher.engine.evaluation.api_rollout import ApiRollout, chat_rollout
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.extraction.extractor import (
    CompressorExtractor,
    Extractor,
    ReadingRetriever,
    reading_figures,
    reading_record,
    with_packed_searches,
)
from thresher.engine.extraction.records import (
    Journal,
    answer_record,
    extraction_record,
    question_head,
    summarise,
)
from thresher.engine.protocol.prompts import noise_pool, with_noise, with_passages
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.scoring.endpoint import Endpoint, read_key
from thresher.engine.scoring.score import Scored, check_all, score
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.systems import load_system
from thresher.policy.config import read_config
from thresher.retrieval.indexes.manifest import FILE as MANIFEST
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, question_record, read_questions
from thresher.retrieval.retriever import Retriever

SECTIONS = ("model", "rollout", "retrieval", "system")  # sections of a recipe that --set may change


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The model of the generator or the agent: the folder of a model, or the name of a chat model at a URL. template: a
    prompt file in place of the built-in one."""

    model: str | None = None
    url: str | None = None
    name: str | None = None
    template: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExtractionPlan:
    """One run of `thresher extract`.

    model: folder of the extractor, a policy or an encoder. refining: the compressor used as extractor. system, or
    baseline in its place: its protocol is the extractor's. run: folder of the run that wrote the checkpoint `model`;
    its prompt, passages and limits are used. evidence_tokens: limit on the evidence. noise: number of irrelevant
    passages added per question, drawn by `seed`. prompt: "chat" wraps the prompts of local models in their chat
    templates. generator: answers in the traditional loop. agent: selects the agentic loop. actions: limit on the
    searches of the agent. overrides: "section.key=value" of a recipe, for every local model. batch: questions per
    batch. key_env: environment variable with the endpoint's key. patience: seconds to retry an unreachable server.
    """

    model: str
    questions: str
    out: str
    refining: CompressorOptions | None = None
    index: str | None = None
    url: str | None = None
    k: int = 5
    template: str | None = None
    system: str | None = None
    baseline: str | None = None
    run: str | None = None
    evidence_tokens: int | None = None
    noise: int = 0
    seed: int = 0
    prompt: str = "raw"
    generator: Chosen | None = None
    agent: Chosen | None = None
    actions: int = 4
    overrides: tuple[str, ...] = ()
    limit: int | None = None
    batch: int = 64
    key_env: str | None = None
    patience: float = 300.0

    @property
    def of_encoder(self) -> bool:
        return self.refining is not None and self.refining.of_encoder

    @property
    def of_baseline(self) -> str | None:
        """Return the baseline whose protocol the policy follows; None if it follows a system. FilCo's filter uses
        extract_only, because it writes only evidence."""
        return "extract_only" if self.refining is not None and self.refining.writes else self.baseline

    def settings(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Return the settings that determine a record; number of records, place and addresses are not among them."""
        content = repr([question_record(question) for question in questions]).encode("utf-8", "surrogatepass")
        kept = asdict(self) | {"the questions' content": blake2b(content, digest_size=8).hexdigest()}
        for key in ("out", "url", "limit", "batch", "key_env", "patience"):
            del kept[key]
        if self.refining is None:
            del kept["refining"]  # as in files begun before this option existed
        kept["overrides"] = [text for text in self.overrides if not text.startswith(COMPUTING_KEYS)]
        for chosen in (kept["generator"], kept["agent"]):
            if chosen is not None:
                del chosen["url"]
                chosen["content"] = folder_digest(chosen["model"], *MODEL_FILES) if chosen["model"] else None
        templates = [self.template, *(one.template for one in (self.generator, self.agent) if one is not None)]
        if digests := [text_digest(path) for path in templates if path is not None]:
            kept["the templates' content"] = digests
        kept["the model's content"] = folder_digest(self.model, *MODEL_FILES)
        kept["the index's content"] = folder_digest(self.index, MANIFEST) if self.index else None
        return kept


def extract(
    plan: ExtractionPlan,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Extract for the questions that are not done yet; return the figures over all questions. The figures are also
    stored in F.json next to `plan.out`. UserError while another process writes to `plan.out`."""
    if not Path(plan.out).parent.is_dir():
        raise UserError(f"{plan.out}: the folder {Path(plan.out).parent} does not exist; make it first")
    with locked_file(Path(plan.out)):
        return _extract(plan, on_progress, say)


def _extract(
    plan: ExtractionPlan, on_progress: Callable[[int, int], None], say: Callable[[str], None]
) -> dict[str, Any]:
    everything = read_questions(plan.questions, golds_needed=False)
    needed = ("answer",) if plan.generator or plan.agent else ("evidence",)
    journal = Journal(plan.out, plan.settings(everything), needed)
    todo = [question for question in everything[: plan.limit] if question.id not in journal.done]
    if plan.limit is not None and len(journal.done) > plan.limit:
        say(
            f"extract: {plan.out} holds {len(journal.done):,} questions already, more than --limit {plan.limit:,}; the "
            "figures are over all of them"
        )
    total = len(todo) + len(journal.done)
    if todo:
        loop = Loop(plan, journal, say)
        if plan.agent is None:  # fail before hours are spent on the others
            loop.pool = noise_pool(everything, loop.retriever)
            loop.extractor.check(todo if loop.retriever is not None else loop.shown(todo))
        on_progress(len(journal.done), total)
        for start in range(0, len(todo), plan.batch):
            batch = todo[start : start + plan.batch]
            with loop.threads():
                (loop.agentic if plan.agent else loop.traditional)(batch)
            on_progress(len(journal.done), total)
    figures = summarise(journal.records())
    if cut := figures["cut_questions"]:
        say(
            f"extract: {cut:,} of {figures['questions']:,} questions had passages cut to what fits; raise "
            "rollout.max_passage_tokens with --set"
        )
    journal.finish(figures)
    return figures


class Loop:
    """The loaded models of a plan; `traditional` and `agentic` process one batch of questions."""

    def __init__(self, plan: ExtractionPlan, journal: Journal, say: Callable[[str], None]) -> None:
        self.plan, self.journal, self.say = plan, journal, say
        self.recipe = local_recipe(plan)
        retrieval, refining = self.recipe.need(RetrievalSection), plan.refining
        options = self.recipe.need(SystemSection).options
        baseline = None if plan.of_baseline is None else load_baseline(plan.of_baseline, options)
        self.k = retrieval.k
        self.context = None if plan.of_encoder else load_run_context(self.recipe, system=baseline)
        system = load_system("eviomni", {}) if self.context is None else self.context.system
        self.retriever = load_retrieval(self.recipe, system)
        self.extractor: Extractor | CompressorExtractor
        if refining is None or refining.writes:
            assert self.context is not None
            self.extractor = Extractor(self.context, plan.evidence_tokens)
        else:
            compressor = load_compressor(refining, Path(plan.model), self.recipe.model.device, self.context)
            self.extractor = CompressorExtractor(compressor)
        self.pool: Sequence[Passage] = ()  # passages from which noise is drawn
        self.evidence: dict[str, str] = {}  # evidence of the current batch, for the generator
        self.agent: Rollout | ApiRollout | None = None
        self.generator: Rollout | ApiRollout | None = None
        if plan.agent is not None:
            if self.retriever is None:
                raise UserError("an agent searches, but there is no index or server; give --index FOLDER or --url URL")
            self.reader = ReadingRetriever(self.retriever, self.extractor)
            system = with_packed_searches(load_baseline("search_loop", {}))
            # Evidence replaces the passages and is shown unformatted.
            self.agent = self._rollout(plan.agent, system, plan.actions + 1, self.reader, "{text}")
        elif plan.generator is not None:
            # Evidence is shown as a passage, as in the training data of a generator.
            system, shown = answers_from(self.evidence, plan.out), retrieval.passage_format
            self.generator = self._rollout(plan.generator, system, 1, None, shown)

    def shown(self, questions: Sequence[Question]) -> list[Question]:
        """Return the questions with the passages for the extractor: given or retrieved, and noise."""
        found = with_passages(questions, self.retriever, self.k)
        return with_noise(found, self.pool, self.plan.noise, self.plan.seed)

    def threads(self) -> AbstractContextManager[None]:
        """Return a context that sets the number of threads for a policy; an encoder keeps torch's default."""
        return nullcontext() if self.context is None else self.context.threads()

    def traditional(self, questions: Sequence[Question]) -> None:
        """Extract evidence for each question, and answer from it if there is a generator."""
        waiting = {record["id"]: record for record in self._extracted(questions)}
        if self.generator is None:
            for record in waiting.values():
                self.journal.add(record)
            return
        self.evidence.update((id_, record["evidence"]) for id_, record in waiting.items())
        try:
            for response in responses(self.generator, questions):
                self.journal.add(waiting.pop(response.question.id) | answer_record(response))
        finally:  # store evidence even if its answer failed
            for id_, record in waiting.items():
                if id_ not in self.journal.partial:
                    self.journal.add(record)
            self.evidence.clear()

    def agentic(self, questions: Sequence[Question]) -> None:
        """Answer each question with the agent; record every search and its extraction."""
        assert self.agent is not None
        for response in responses(self.agent, questions):
            packed = [search["query"] for search in response.trajectory.searches]
            readings = [self.reader.readings[search] for search in packed]
            reads = [reading_record(search, reading) for search, reading in zip(packed, readings, strict=True)]
            evidence = "\n".join(read["evidence"] for read in reads if read["evidence"])
            record = question_head(response.question) | answer_record(response) | {"evidence": evidence}
            self.journal.add(record | reading_figures(readings) | {"reads": reads})

    def _extracted(self, questions: Sequence[Question]) -> list[Record]:
        """Return a record of evidence for each question: the stored partial record, or a new one."""
        kept = self.journal.partial
        fresh = self.shown([question for question in questions if question.id not in kept])
        started = time.perf_counter()
        extractions = self.extractor.extract(fresh)
        seconds = (time.perf_counter() - started) / max(len(fresh), 1)
        records = {
            question.id: question_head(question) | extraction_record(extraction) | {"extract_seconds": seconds}
            for question, extraction in zip(fresh, extractions, strict=True)
        }
        return [kept.get(question.id) or records[question.id] for question in questions]

    def _rollout(
        self, chosen: Chosen, system: System, turns: int, retriever: Retriever | None, passage_format: str
    ) -> Rollout | ApiRollout:
        shows = "{passages}" in system.template
        template = system.template if chosen.template is None else read_template(chosen.template, shows)
        config = EpisodeConfig(template, turns)
        if chosen.model is not None:
            context = self.context if chosen.model == self.plan.model else None
            extractor = None if self.context is None else self.context.system
            context = context or load_run_context(self.recipe, chosen.model, extractor)
            renderer = replace(context.renderer, tags=system.tags, passage_format=passage_format)
            return replace(context, system=system, episode_config=config, renderer=renderer).rollout(retriever)
        assert chosen.url is not None and chosen.name is not None
        replies = Path(self.plan.out).with_suffix(".replies.jsonl")
        key = None if self.plan.key_env is None else read_key(self.plan.key_env)
        chat = Endpoint(chosen.url, chosen.name, key=key, patience=self.plan.patience, replies=replies, say=self.say)
        sent = f", with the key in {self.plan.key_env}" if key else ""
        self.say(f"extract: {chosen.name} is asked at {chat.url}{sent}")
        max_tokens = self.recipe.rollout.max_turn_tokens
        return chat_rollout(chat, system, config, retriever, self.k, passage_format, max_tokens)


def local_recipe(plan: ExtractionPlan) -> Recipe:
    """Return the recipe of the extractor, which is also used to load other local models. UserError for a template or a
    limit on evidence if the compressor has no prompt."""
    refining, template = plan.refining, plan.template
    if refining is not None and refining.writes:
        template = template or str(FILCO_TEMPLATE)
    elif refining is not None and template is not None:
        raise UserError(f"--template is a prompt, and --refiner {refining.name} has none; leave it out")
    elif refining is not None and plan.evidence_tokens is not None:
        raise UserError(
            f"--evidence-tokens cuts what is written, and --refiner {refining.name} writes nothing; leave it out"
        )
    for text in plan.overrides:
        if text.partition("=")[0].partition(".")[0].strip() not in SECTIONS:
            raise UserError(f"--set {text}: expected a key of {', '.join(SECTIONS)}, as in model.dtype=bfloat16")
    if plan.run is None:
        tables = _bare_tables(plan)
    else:
        stored = read_tables(RunFolder(Path(plan.run)).recipe_file)
        tables = {name: dict(stored.get(name) or {}) for name in SECTIONS}
        for key in ("trees", "tree_nodes", "group_size"):  # of training; they would have to fit its [grpo]
            tables["rollout"].pop(key, None)
    tables["model"] |= {"path": plan.model, "prompt": plan.prompt}
    if plan.index is not None or plan.url is not None:
        for key in ("index", "url"):
            tables["retrieval"].pop(key, None)
    given = {"k": plan.k, "patience": plan.patience, "index": plan.index, "url": plan.url}
    tables["retrieval"] |= {key: value for key, value in given.items() if value is not None}
    if (name := plan.of_baseline or plan.system) is not None and name != tables["system"]["name"]:
        tables["system"] = {"name": name}
    if template is not None:
        tables["system"]["template"] = template
    return make_recipe(tables, "the command line", plan.overrides)


def _bare_tables(plan: ExtractionPlan) -> dict[str, Any]:
    beside = plan.generator or plan.agent
    policy = plan.model if not plan.of_encoder else None if beside is None else beside.model
    context = 4096 if policy is None else min(4096, read_config(Path(policy)).max_position_embeddings)
    # The extractor's prompt has room for an agent's thinking (one turn) and the passages. EviOmni's latency was
    # measured with 768 new tokens.
    rollout = {
        "max_context": context,
        "max_passage_tokens": context // 2,
        "max_turn_tokens": min(768, context // 4),
        "max_num_seqs": 32,
    }
    return {"model": {}, "retrieval": {}, "system": {"name": "eviomni"}, "rollout": rollout}


def responses(rollout: Rollout | ApiRollout, questions: Sequence[Question]) -> Iterator[Scored]:
    """Yield a greedy answer to each question. Answers of a chat model are yielded as soon as each is known, so those
    before an error of its endpoint are not lost."""
    jobs = jobs_of(questions)
    played = rollout.stream(jobs, 0.0) if isinstance(rollout, ApiRollout) else rollout.run(jobs, 0.0)
    with console.polling(rollout.stage):
        for trajectory in played:
            scored = score([questions[trajectory.group]], [trajectory], rollout.system, rollout.tokenizer)
            check_all(scored, rollout.tokenizer, rollout.system.tags, rollout.limits.max_context)
            yield from scored
