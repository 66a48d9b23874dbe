"""What `thresher bench rollout` asks for: the shapes, and how many tokens each makes an engine read and write.

    demo       the demo's model: 16 short prompts, 8 samples each
    rag        a prompt full of passages; one row for a short answer, one for a reasoned one
    search     three turns, a passage appended behind the first and behind the second
    branches   EviOmni's: reason and evidence are written behind question and passages (q, P), then an answer; two more
               answers are written in contexts that hide a part, (q, P, r) and (q, e)

A sample always has its full length. Somebody who has nothing but a function from contexts to new tokens submits a
context anew for every turn and for every branch: `contexts` lists what a sample then has read for it.

Deliberately absent: real texts and trained weights, which change neither side's arithmetic.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A Qwen2 by its sizes. Its random weights are small enough that the float32 angles of transformers' rotation, the
    largest difference between two right implementations at position 1,000, stay below the proof's bound."""

    num_hidden_layers: int = 4
    hidden_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 768
    vocab_size: int = 1200
    initializer_range: float = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutShape:
    """Lengths in tokens. A prompt is `question` and `passages`; `turns` are written one after the other, `appended`
    tokens of passage between them. With `branches` there are three turns, reason, evidence and answer, and two more
    answers."""

    name: str
    sizes: Sizes
    questions: int
    group: int
    question: int
    turns: tuple[int, ...]
    passages: int = 0
    appended: int = 0
    branches: bool = False
    seed: int = 0

    @property
    def prompt(self) -> int:
        return self.question + self.passages

    @property
    def samples(self) -> int:
        return self.questions * self.group

    @property
    def sampled(self) -> int:
        """Tokens written for one sample, those of its branches included."""
        return sum(self.turns) + (2 * self.turns[-1] if self.branches else 0)

    @property
    def tokens(self) -> int:
        """Tokens written in a round."""
        return self.samples * self.sampled

    @property
    def longest(self) -> int:
        """The whole trajectory."""
        return self.prompt + sum(self.turns) + self.appended * (len(self.turns) - 1)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Lengths of all contexts that are submitted for one sample, the prompt first."""
        if self.branches:
            reason, evidence, _ = self.turns
            hidden = (self.prompt + reason, self.question + evidence)
            return (self.prompt, self.prompt + reason + evidence, *hidden)
        return tuple(
            accumulate(self.turns[:-1], lambda length, turn: length + turn + self.appended, initial=self.prompt)
        )

    @property
    def asked(self) -> int:
        """Tokens of context submitted in a round."""
        return self.samples * sum(self.contexts)

    def record(self) -> dict[str, Any]:
        """As a row keeps it."""
        return {
            "questions": self.questions,
            "group": self.group,
            "prompt": self.prompt,
            "turns": list(self.turns),
            "appended": self.appended,
            "layers": self.sizes.num_hidden_layers,
            "hidden": self.sizes.hidden_size,
            "vocab": self.sizes.vocab_size,
        }


_DEMO = Sizes(num_hidden_layers=2, hidden_size=96, intermediate_size=192, vocab_size=768, initializer_range=0.08)
_RAG = Sizes()

SHAPES: dict[str, tuple[RolloutShape, ...]] = {
    "demo": (RolloutShape(name="demo", sizes=_DEMO, questions=16, group=8, question=40, turns=(64,)),),
    "rag": tuple(
        RolloutShape(name="rag", sizes=_RAG, questions=asked, group=8, question=40, passages=660, turns=(tokens,))
        for tokens, asked in ((48, 8), (200, 4))
    ),
    "search": (
        RolloutShape(name="search", sizes=_RAG, questions=8, group=5, question=150, turns=(40, 40, 40), appended=250),
    ),
    "branches": (
        RolloutShape(
            name="branches",
            sizes=_RAG,
            questions=4,
            group=8,
            question=120,
            passages=700,
            turns=(200, 60, 16),
            branches=True,
        ),
    ),
}
