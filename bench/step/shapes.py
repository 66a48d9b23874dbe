"""The shapes of `thresher bench step`: what one GRPO step samples and trains, as data.

    demo     the demo's model; 16 short prompts, 8 samples each
    rag      a prompt full of passages, 8 samples each, a reasoned answer; a vocabulary of 20,000
    search   three turns, a passage appended behind the first and the second: 1,000 tokens a trajectory
    0.5B, 1.5B, 7B-lora    Qwen2.5's sizes with random weights, for a GPU; the last trains adapters

A trajectory always has its full length. TRL's GRPOTrainer has no retrieval between turns of its own, and its tool
calling needs a model that calls tools, which random weights never do. So in `search` it gets a prompt that is as long
as ours with all its passages, and samples as many tokens in one turn: the same tokens a trajectory, sampled and given.

Deliberately absent: real texts and trained weights, which change neither side's arithmetic.
"""

from dataclasses import dataclass, replace
from typing import Any

from thresher.bench.rollout import shapes
from thresher.bench.rollout.shapes import RolloutShape, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """lengths: what is sampled, and from what. model: a name of bench/roofline/models.py in bfloat16, for CUDA; None:
    `lengths.sizes` in float32. lora: rank of adapters, which then are all that is trained."""

    lengths: RolloutShape
    model: str | None = None
    lora: int | None = None
    beta: float = 0.02
    lr: float = 1e-5

    @property
    def name(self) -> str:
        return self.lengths.name

    @property
    def peer_prompt(self) -> int:
        """Tokens of the prompt that a peer of one turn gets: all that is given in a trajectory."""
        return self.lengths.longest - sum(self.lengths.turns)

    @property
    def peer_completion(self) -> int:
        return sum(self.lengths.turns)

    @property
    def tokens(self) -> int:
        """Tokens of a step's trajectories, prompts and passages included, each counted for every sample."""
        return self.lengths.samples * self.lengths.longest

    def record(self) -> dict[str, Any]:
        """As a row keeps it."""
        return self.lengths.record() | {"model": self.model, "lora": self.lora, "beta": self.beta, "lr": self.lr}


def _gpu(name: str, model: str, lora: int | None = None) -> StepShape:
    lengths = RolloutShape(name=name, sizes=Sizes(), questions=8, group=8, question=1000, turns=(256,))
    return StepShape(lengths=lengths, model=model, lora=lora)


_DEMO = replace(shapes.SHAPES["demo"][0], question=56)
_RAG = RolloutShape(name="rag", sizes=Sizes(vocab_size=20_000), questions=4, group=8, question=700, turns=(200,))
_SEARCH = RolloutShape(
    name="search", sizes=Sizes(), questions=4, group=5, question=150, turns=(100, 100, 100), appended=275
)

SHAPES: dict[str, StepShape] = {
    "demo": StepShape(lengths=_DEMO),
    "rag": StepShape(lengths=_RAG),
    "search": StepShape(lengths=_SEARCH),
    "0.5B": _gpu("0.5B", "0.5B"),
    "1.5B": _gpu("1.5B", "1.5B"),
    "7B-lora": _gpu("7B-lora", "7B", lora=16),
}
