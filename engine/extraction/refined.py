"""A refiner in an extractor's place: what it keeps of the passages is the evidence, and there is no rationale."""

from collections.abc import Sequence

from thresher.engine.extraction.extractor import Extraction
from thresher.engine.refiners.kinds import Refiner
from thresher.retrieval.questions import Question


class RefinedExtractor:
    """Passages are read whole, however long."""

    def __init__(self, refiner: Refiner) -> None:
        self._refiner = refiner

    def check(self, questions: Sequence[Question]) -> None:
        """Nothing has to fit anywhere."""

    def extract(self, questions: Sequence[Question]) -> list[Extraction]:
        evidence = self._refiner.refine(questions)
        lengths = iter(self._refiner.count_tokens([p.text for question in questions for p in question.passages]))
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
            for question, kept, length in zip(questions, evidence, self._refiner.count_tokens(evidence), strict=True)
        ]
