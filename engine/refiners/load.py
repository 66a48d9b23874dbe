"""A refiner that keeps parts of passages, loaded: of a policy at hand, or of an encoder's folder."""

from pathlib import Path

from thresher.engine.assemble import RunContext
from thresher.engine.refiners.kinds import Refiner, Refining
from thresher.engine.refiners.llmlingua2 import LlmLingua2
from thresher.engine.refiners.recomp import Recomp
from thresher.engine.refiners.selective_context import SelectiveContext
from thresher.retrieval.encoders.learned import load_encoder
from thresher.retrieval.encoders.token_classifier import load_token_classifier


def load_refiner(refining: Refining, folder: Path, device: str, parts: RunContext | None) -> Refiner:
    """parts: those of `folder`, where the refiner is a policy's. UserError for a folder that is no such model."""
    if refining.name == "selective-context":
        assert parts is not None and refining.keep is not None and refining.unit is not None
        return SelectiveContext(parts.policy, parts.tokenizer, refining.keep, refining.unit)
    if refining.name == "recomp":
        assert refining.sentences is not None
        return Recomp(load_encoder(folder, device=device), refining.sentences)
    assert refining.name == "llmlingua-2" and refining.keep is not None
    return LlmLingua2(load_token_classifier(folder, device=device), refining.keep)
