"""One model as extractor: question and passages go in, rationale and evidence come out, and no answer is asked for.

Any model that writes EviOmni's tags will do: its system's prompt, and of its episode the first turn, which ends at
`</extract>`. Decoding is greedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thresher.engine.assemble import Parts
from thresher.engine.episode import Episode, Generate, System, Tools
from thresher.engine.protocol.passages import fit_passages
from thresher.engine.rollout.samples import Job
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.data.formats import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.measures import compression_ratio
from thresher.rewards.papers.eviomni import evidence_of, rationale_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """What was made of some passages. Texts are stripped, and empty where their span is missing or was not closed.

    rationale: None where the extractor writes none.
    passages: as it was shown them, cut_passages of them cut to fit.
    passage_tokens: length of the passages' texts, evidence_tokens: of the evidence, both in the extractor's tokens.
    reason: "extracted", or the limit that ended it ("turn_tokens", "context", ..), or "ended"; "refined" where nothing
    was written.
    """

    rationale: str | None
    evidence: str
    passages: tuple[Passage, ...]
    cut_passages: int
    passage_tokens: int
    evidence_tokens: int
    reason: str

    @property
    def compression_ratio(self) -> float | None:
        """passage_tokens / evidence_tokens; None without evidence."""
        return compression_ratio(self.passage_tokens, self.evidence_tokens)


class Extractor:
    """One model as extractor; `parts` as `load_parts` gives them for a system whose first turn extracts. rationale:
    whether it is asked for one."""

    def __init__(self, parts: Parts, rationale: bool = True) -> None:
        self._rationale = rationale
        self.tokenizer: Tokenizer = parts.tokenizer
        self._rollout = replace(parts, system=first_turn(parts.system)).rollout(None)

    def check(self, questions: Sequence[Question]) -> None:
        """UserError for the first whose passages and prompt do not fit into the context."""
        self._rollout.check_prompts(questions)

    def extract(self, questions: Sequence[Question]) -> list[Extraction]:
        """From each question's own passages, cut where they must be. UserError where prompt and passages do not fit
        into the context."""
        run = self._rollout
        given = [question.passages for question in questions]
        questions = fit_passages(questions, run.system, run.tools, run.renderer).questions
        jobs = [Job(question, number, 0, number) for number, question in enumerate(questions)]
        extractions = []
        for whole, question, trajectory in zip(given, questions, run.run(jobs, 0.0), strict=True):
            pieces = trajectory.pieces(self.tokenizer)
            evidence = evidence_of(pieces)
            extractions.append(
                Extraction(
                    rationale=rationale_of(pieces) if self._rationale else None,
                    evidence=evidence,
                    passages=question.passages,
                    cut_passages=sum(a is not b for a, b in zip(whole, question.passages, strict=True)),
                    passage_tokens=sum(len(self.tokenizer.encode(passage.text)) for passage in question.passages),
                    evidence_tokens=len(self.tokenizer.encode(evidence)),
                    reason=trajectory.reason,
                )
            )
        return extractions


def first_turn(system: System) -> System:
    """The system with everything behind the first turn of its episode left out."""

    def episode(question: Question, tools: Tools) -> Episode:
        whole = system.episode(question, tools)
        request = next(whole)
        while not isinstance(request, Generate):
            request = whole.send((yield request))
        turn = yield request
        whole.close()
        return "extracted" if turn.stopped_at("</extract>") else "ended"

    return replace(system, episode=episode)
