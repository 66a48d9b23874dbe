"""One model as extractor: question and passages go in, rationale and evidence come out, and no answer is asked for.

    evidence     rationale    of
    <extract>    <reason>     eviomni, lear
    <extract>                 extract_only
    <think>                   cot, with passages: what it thinks is what it found

Its system's prompt, and of its episode the first turn, which ends where the evidence does. Decoding is greedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.assemble import RunContext
from thresher.engine.compressors.options import Compressor
from thresher.engine.episode import Episode, EpisodeConfig, Generate, System
from thresher.engine.protocol.prompts import truncate_passages
from thresher.engine.rollout.rollout import Job
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.measures import compression_ratio
from thresher.rewards.reward import TextSegment
from thresher.rewards.tags import blocks

SPANS = (("extract", "reason"), ("think", None))  # tags of evidence and of rationale; a system's are the first it has


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """The evidence taken from some passages. Texts are stripped, and empty where their span is missing or was not
    closed.

    rationale: None where none is asked for.
    passages: as it was shown them, cut_passages of them cut to fit.
    passage_tokens: length of the passages' texts, evidence_tokens, rationale_tokens: of those, in the extractor's
    tokens.
    reason: "extracted", or the limit that ended it ("turn_tokens", "context", ..), or "ended"; "refined" where nothing
    was written.
    """

    rationale: str | None
    evidence: str
    passages: tuple[Passage, ...]
    cut_passages: int
    passage_tokens: int
    evidence_tokens: int
    rationale_tokens: int
    reason: str

    @property
    def compression_ratio(self) -> float | None:
        """Return passage_tokens / evidence_tokens; None without evidence."""
        return compression_ratio(self.passage_tokens, self.evidence_tokens)


class Extractor:
    """One model as extractor; `context` as `load_run_context` gives them for a system of SPANS that is given passages,
    else UserError. evidence_tokens: evidence that is longer is cut to so many; None: none is."""

    def __init__(self, context: RunContext, evidence_tokens: int | None = None) -> None:
        self.tokenizer: Tokenizer = context.tokenizer
        self.evidence_tokens = evidence_tokens
        self.evidence_tag, self.rationale_tag = spans_of(context.system)
        self._rollout = replace(context, system=first_turn(context.system, self.evidence_tag)).rollout(None)

    def check(self, questions: Sequence[Question]) -> None:
        """Raise UserError for the first whose passages and prompt do not fit into the context."""
        self._rollout.check_prompts(questions)

    def extract(self, questions: Sequence[Question]) -> list[Extraction]:
        """Extract from each question's own passages, cut where they must be. UserError where prompt and passages do not
        fit into the context."""
        run = self._rollout
        given = [question.passages for question in questions]
        questions = truncate_passages(questions, run.system, run.tools, run.renderer).questions
        jobs = [Job(question, number, 0, number) for number, question in enumerate(questions)]
        with console.polling(run.stage):
            trajectories = run.run(jobs, 0.0)
        extractions = []
        for whole, question, trajectory in zip(given, questions, trajectories, strict=True):
            pieces = trajectory.pieces(self.tokenizer)
            evidence = self._cut(_first(pieces, self.evidence_tag))
            rationale = None if self.rationale_tag is None else _first(pieces, self.rationale_tag)
            extractions.append(
                Extraction(
                    rationale=rationale,
                    evidence=evidence,
                    passages=question.passages,
                    cut_passages=sum(a is not b for a, b in zip(whole, question.passages, strict=True)),
                    passage_tokens=sum(len(self.tokenizer.encode(passage.text)) for passage in question.passages),
                    evidence_tokens=len(self.tokenizer.encode(evidence)),
                    rationale_tokens=len(self.tokenizer.encode(rationale or "")),
                    reason=trajectory.reason,
                )
            )
        return extractions

    def _cut(self, evidence: str) -> str:
        ids = self.tokenizer.encode(evidence)
        if self.evidence_tokens is None or len(ids) <= self.evidence_tokens:
            return evidence
        return self.tokenizer.decode_bytes(ids[: self.evidence_tokens]).decode("utf-8", "ignore").strip()


class CompressorExtractor:
    """A compressor in an extractor's place: what it keeps of the passages is the evidence, and there is no rationale.
    Passages are read whole, however long."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def check(self, questions: Sequence[Question]) -> None:
        """Do nothing: nothing has to fit anywhere."""

    def extract(self, questions: Sequence[Question]) -> list[Extraction]:
        evidence = self._compressor.compress(questions)
        lengths = iter(self._compressor.count_tokens([p.text for question in questions for p in question.passages]))
        return [
            Extraction(
                rationale=None,
                evidence=kept,
                passages=question.passages,
                cut_passages=0,
                passage_tokens=sum(next(lengths) for _ in question.passages),
                evidence_tokens=length,
                rationale_tokens=0,
                reason="refined",
            )
            for question, kept, length in zip(questions, evidence, self._compressor.count_tokens(evidence), strict=True)
        ]


def spans_of(system: System) -> tuple[str, str | None]:
    """Return the tags of what is evidence and of what is rationale in a system's first turn."""
    found = next(((tag, before) for tag, before in SPANS if f"<{tag}>" in system.tags), None)
    if found is None or not system.given_passages:
        raise UserError(
            f"extract: {system.name} takes no evidence from passages that it is shown; choose --system eviomni, "
            "--baseline extract_only, or --baseline cot with --set system.options.passages=true"
        )
    tag, before = found
    return tag, before if f"<{before}>" in system.tags else None


def first_turn(system: System, tag: str) -> System:
    """Return the system with everything behind the first turn of its episode left out, which ends where `tag` is
    closed."""

    def episode(question: Question, tools: EpisodeConfig) -> Episode:
        whole = system.episode(question, tools)
        request = next(whole)
        while not isinstance(request, Generate):
            request = whole.send((yield request))
        whole.close()
        turn = yield replace(request, stop=(f"</{tag}>",))
        return "extracted" if turn.stopped_at(f"</{tag}>") else "ended"

    return replace(system, episode=episode)


def _first(pieces: Sequence[TextSegment], tag: str) -> str:
    """Return the text of the policy's first closed span of `tag`; "" without one."""
    return next((span.text for span in blocks(pieces, tag)), "")
