"""`thresher extract`: EviOmni in use, evidence before the answer, in a traditional and in an agentic loop; and other
refiners in its place (engine/refiners/kinds.py), as rows that it is compared with.

    traditional   passages P of q, given or retrieved  ->  extractor(q, P) = r, e  ->  a generator, if any: answer(q, e)
    agentic       an agent searches, the extractor reads what is found, and only e comes back
    (engine/extraction/agentic.py)


Questions are taken in batches, and what a batch brings is on disk before the next begins (engine/store/journal.py).
What a chat model replied is kept beside it, so that nothing is paid for twice.

Deliberately absent: sampling. All is greedy, as in evaluation.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from thresher.engine.assemble import load_parts, load_retrieval
from thresher.engine.baselines import load_baseline
from thresher.engine.baselines.evidence import answers_from
from thresher.engine.config.recipe import Recipe, make_recipe
from thresher.engine.episode import System, Tools, read_template
from thresher.engine.extraction.agentic import ReadingRetriever, reading_figures, reading_record, with_packed_searches
from thresher.engine.extraction.converse import Converser
from thresher.engine.extraction.extractor import Extractor
from thresher.engine.extraction.refined import RefinedExtractor
from thresher.engine.extraction.responder import ChatResponder, LocalResponder, Responder, Response
from thresher.engine.protocol.passages import with_passages
from thresher.engine.refiners.kinds import FILCO_TEMPLATE, Refining
from thresher.engine.refiners.load import load_refiner
from thresher.engine.scoring.endpoint import Endpoint, read_key
from thresher.engine.store.journal import Journal
from thresher.engine.systems import load_system
from thresher.policy.config import read_config
from thresher.retrieval.data.jsonl import Record
from thresher.retrieval.questions import Question, passage_record, question_record, read_questions
from thresher.retrieval.retriever import Retriever
from thresher.rewards.errors import UserError
from thresher.rewards.measures import answer_recalled

_COMPUTING = ("max_running", "page_size", "kv_tokens", "attention", "speculate")
FREE = ("model.device", *(f"rollout.{key}" for key in _COMPUTING))  # keys that decide no record
MEASURES = ("em", "f1", "answered", "searches", "compression_ratio", "extract_seconds")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Who answers, or acts as agent: a model's folder, or the name of a chat model at a URL. template: a prompt file in
    the place of the built-in one."""

    model: str | None = None
    url: str | None = None
    name: str | None = None
    template: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExtractionPlan:
    """One run of `thresher extract`. generator is of the traditional loop, agent makes it an agentic one. model: of the
    refiner, a policy's folder or an encoder's.

    prompt: "chat" puts the prompts of local models into their chat templates. overrides: "section.key=value" of a
    recipe, for every local model. actions: searches that the agent may make. batch: questions between two visits to the
    disk. key_env: environment variable with the endpoint's key. patience: seconds that any server may stay away.
    """

    model: str
    questions: str
    out: str
    refining: Refining | None = None
    index: str | None = None
    url: str | None = None
    k: int = 5
    template: str | None = None
    prompt: str = "raw"
    generator: Chosen | None = None
    agent: Chosen | None = None
    actions: int = 4
    overrides: tuple[str, ...] = ()
    limit: int | None = None
    batch: int = 64
    key_env: str | None = None
    patience: float = 300.0

    def settings(self, questions: Sequence[Question]) -> dict[str, Any]:
        """What decides the records; not how many there are, nor where they are made and servers are at the moment."""
        content = repr([question_record(question) for question in questions]).encode("utf-8", "surrogatepass")
        kept = asdict(self) | {"the questions' content": blake2b(content, digest_size=8).hexdigest()}
        for key in ("out", "url", "limit", "batch", "key_env", "patience"):
            del kept[key]
        if self.refining is None:
            del kept["refining"]  # as files that were begun without the choice
        kept["overrides"] = [text for text in self.overrides if not text.startswith(FREE)]
        for chosen in (kept["generator"], kept["agent"]):
            if chosen is not None:
                del chosen["url"]
        return kept


def extract(
    plan: ExtractionPlan,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Do what of the plan is not done yet; returns the figures over all of it, which F.json beside `plan.out` keeps."""
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
        if plan.agent is None:  # refused before hours are spent on the others
            loop.extractor.check(todo if loop.retriever is not None else with_passages(todo, None, plan.k))
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
    """The loaded models of a plan, and one batch of questions at a time through them."""

    def __init__(self, plan: ExtractionPlan, journal: Journal, say: Callable[[str], None]) -> None:
        self.plan, self.journal, self.say = plan, journal, say
        self.recipe = local_recipe(plan)
        refining = plan.refining
        self.parts = None if refining is not None and refining.of_encoder else load_parts(self.recipe)
        system = load_system("eviomni", {}) if self.parts is None else self.parts.system
        self.retriever = load_retrieval(self.recipe, system)
        self.extractor: Extractor | RefinedExtractor
        if refining is None or refining.writes:
            assert self.parts is not None
            self.extractor = Extractor(self.parts, rationale=refining is None)
        else:
            refiner = load_refiner(refining, Path(plan.model), self.recipe.model.device, self.parts)
            self.extractor = RefinedExtractor(refiner)
        self.evidence: dict[str, str] = {}  # of the batch at hand, for the generator
        self.agent: Responder | None = None
        self.reader: ReadingRetriever | None = None
        self.generator: Responder | None = None
        if plan.agent is not None:
            if self.retriever is None:
                raise UserError("an agent searches, and there is nowhere to; give --index FOLDER or --url URL")
            self.reader = ReadingRetriever(self.retriever, self.extractor)
            system = with_packed_searches(load_baseline("search_loop", {}))
            self.agent = self._responder(plan.agent, system, plan.actions + 1, self.reader)
        elif plan.generator is not None:
            self.generator = self._responder(plan.generator, answers_from(self.evidence, plan.out), 1, None)

    def threads(self) -> AbstractContextManager[None]:
        """Those that suit a policy; an encoder computes with torch's own number."""
        return nullcontext() if self.parts is None else self.parts.threads()

    def traditional(self, questions: Sequence[Question]) -> None:
        """Evidence for each question, and an answer where there is a generator."""
        waiting = {record["id"]: record for record in self._extracted(questions)}
        if self.generator is None:
            for record in waiting.values():
                self.journal.add(record)
            return
        self.evidence.update((id_, record["evidence"]) for id_, record in waiting.items())
        try:
            for response in self.generator.responses(questions):
                self.journal.add(waiting.pop(response.question.id) | _answered(response))
        finally:  # what was extracted is kept though its answer could not be had
            for id_, record in waiting.items():
                if id_ not in self.journal.partial:
                    self.journal.add(record)
            self.evidence.clear()

    def agentic(self, questions: Sequence[Question]) -> None:
        """The agent's answer to each question, with every search and what the extractor made of it."""
        assert self.agent is not None and self.reader is not None
        for response in self.agent.responses(questions):
            packed = [search["query"] for search in response.searches]
            readings = [self.reader.readings[search] for search in packed]
            reads = [reading_record(search, reading) for search, reading in zip(packed, readings, strict=True)]
            self.journal.add(
                _head(response.question)
                | _answered(response)
                | {
                    "evidence": "\n".join(read["evidence"] for read in reads if read["evidence"]),
                    **reading_figures(readings),
                    "reads": reads,
                }
            )

    def _extracted(self, questions: Sequence[Question]) -> list[Record]:
        """A record of evidence for each question: the one that an earlier run left, or a new one."""
        kept = self.journal.partial
        fresh = with_passages(
            [question for question in questions if question.id not in kept], self.retriever, self.plan.k
        )
        started = time.perf_counter()
        extractions = self.extractor.extract(fresh)
        seconds = (time.perf_counter() - started) / max(len(fresh), 1)
        records = {
            question.id: _head(question)
            | {
                "passages": [passage_record(passage) for passage in extraction.passages],
                "cut_passages": extraction.cut_passages,
                **({} if extraction.rationale is None else {"rationale": extraction.rationale}),
                "evidence": extraction.evidence,
                "compression_ratio": extraction.compression_ratio,
                "ended": extraction.reason,
                "extract_seconds": seconds,
            }
            for question, extraction in zip(fresh, extractions, strict=True)
        }
        return [kept.get(question.id) or records[question.id] for question in questions]

    def _responder(self, chosen: Chosen, system: System, turns: int, retriever: Retriever | None) -> Responder:
        template = system.template if chosen.template is None else read_template(chosen.template)
        tools = Tools(template, turns)
        if chosen.model is not None:
            parts = self.parts if chosen.model == self.plan.model else None
            return LocalResponder(parts or load_parts(self.recipe, chosen.model), system, tools, retriever)
        assert chosen.url is not None and chosen.name is not None
        replies = Path(self.plan.out).with_suffix(".replies.jsonl")
        key = None if self.plan.key_env is None else read_key(self.plan.key_env)
        chat = Endpoint(chosen.url, chosen.name, key=key, patience=self.plan.patience, replies=replies, say=self.say)
        sent = f", with the key in {self.plan.key_env}" if key else ""
        self.say(f"extract: {chosen.name} is asked at {chat.url}{sent}")
        return ChatResponder(
            Converser(
                system=system,
                tools=tools,
                chat=chat,
                retriever=retriever,
                k=self.plan.k,
                passage_format="{text}",
                max_tokens=self.recipe.rollout.max_turn_tokens,
            )
        )


def local_recipe(plan: ExtractionPlan) -> Recipe:
    """The recipe that `load_parts` needs for the extractor; the other local models are loaded with it as well.

    UserError for a template that nobody is asked with.
    """
    refining, template = plan.refining, plan.template
    if refining is not None and refining.writes:
        template = template or str(FILCO_TEMPLATE)
    elif refining is not None and template is not None:
        raise UserError(f"--template is a prompt, and --refiner {refining.name} has none; leave it out")
    for text in plan.overrides:
        if text.partition("=")[0].partition(".")[0].strip() not in ("model", "rollout", "retrieval"):
            raise UserError(f"--set {text}: expected a key of model, rollout or retrieval, as in model.dtype=bfloat16")
    beside = plan.generator or plan.agent
    policy: str | None = plan.model
    if refining is not None and refining.of_encoder:
        policy = None if beside is None else beside.model
    context = 4096 if policy is None else min(4096, read_config(Path(policy)).max_position_embeddings)
    retrieval: dict[str, Any] = {"k": plan.k, "patience": plan.patience}
    retrieval |= {key: value for key, value in (("index", plan.index), ("url", plan.url)) if value is not None}
    tables: dict[str, Any] = {
        "model": {"path": plan.model, "prompt": plan.prompt},
        "retrieval": retrieval,
        "system": {"name": "eviomni"} | ({} if template is None else {"template": template}),
        # An agent's thinking, a turn long, and the passages have room in the extractor's prompt. EviOmni's latency was
        # measured with 768 new tokens.
        "rollout": {
            "max_context": context,
            "max_passage_tokens": context // 2,
            "max_turn_tokens": min(768, context // 4),
            "max_running": 32,
        },
    }
    return make_recipe(tables, "the command line", plan.overrides)


def summarise(records: Iterable[Record]) -> dict[str, Any]:
    """Means over questions; a figure that a question has no value for is left out of its mean.

    compression_ratio: over questions with evidence, without_evidence counting the others. recall_*: share of questions
    whose evidence or rationale holds a gold answer; like em and f1 over those that have one, without_golds counting the
    others. cut_questions: those of which passages were cut. extract_seconds: a batch's, shared among its questions.
    """
    values: dict[str, list[float]] = {}
    questions = without_evidence = without_golds = cut = 0
    for record in records:
        golds = record.get("golden_answers", ())
        questions += 1
        without_evidence += not record["evidence"]
        without_golds += not golds
        cut += record.get("cut_passages", 0) > 0
        found = {name: record.get(name) for name in MEASURES}
        for name in ("evidence", "rationale"):
            if golds and name in record:
                found[f"recall_{name}"] = answer_recalled(record[name], golds)
        for name, value in found.items():
            if value is not None:
                values.setdefault(name, []).append(float(value))
    means = {name: sum(column) / len(column) for name, column in values.items()}
    counts = {"questions": questions, "without_evidence": without_evidence, "without_golds": without_golds}
    counts["cut_questions"] = cut
    return counts | means


def _head(question: Question) -> Record:
    head: Record = {"id": question.id, "question": question.question}
    return head | {"golden_answers": list(question.golds)} if question.golds else head


def _answered(response: Response) -> Record:
    """What there is to say of an answer: right or wrong only where the question has gold answers."""
    measures = ("em", "f1", "answered") if response.question.golds else ("answered",)
    return {
        "answer": response.result.answer,
        **{name: response.result.parts[name] for name in measures},
        "answer_ended": response.reason,
    }
