"""What the host keeps of each sequence that is decoded: records without decisions, which are decoder.py's."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thresher.engine.decoding.cache.blocks import Page
from thresher.engine.decoding.drafts import Int32s
from thresher.engine.decoding.stop_tags import Hit

if TYPE_CHECKING:
    import torch  # the scheduler needs none of it


@dataclass(frozen=True, slots=True)
class Draw:
    """How a sequence draws its tokens; kernels/sampling.py says what each does. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """Ids with which several sequences begin. `hidden_H` is the last one's hidden state, once somebody computed it,
    from which all of them draw their first token; `waiting` counts those that have yet to begin; `filling`: one of them
    is about to compute it, and the others wait."""

    ids: list[int]
    waiting: int = 0
    filling: bool = False
    hidden_H: "torch.Tensor | None" = None

    @property
    def last_hidden_H(self) -> "torch.Tensor":
        assert self.hidden_H is not None, "who has nothing to feed draws from it"
        return self.hidden_H


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One stream of tokens. Its ids are complete here whenever no turn is being written; within one, the newest are in
    its lane's arrays.

    stop, room: the turn's stop strings, and how many tokens it may have. finish: why the last turn ended, "stop", "eos"
    or "length"; hit: the stop that ended it. prefilled: tokens that were computed for it without being drawn, those
    again that it had to give up.
    """

    prompt: SharedPrompt
    seed: int
    draw: Draw
    ids: list[int] = field(default_factory=list)
    most: int | None = None  # tokens that it can come to hold, where that is known
    grows: bool = True  # whether it may need blocks beyond those that it was let in with
    number: int = -1  # in the order in which they were handed in
    begun: bool = False
    lane: int = -1
    writing: bool = False
    stop: tuple[str, ...] = ()
    room: int = 0
    turn_start: int = 0
    logprobs: list[float] = field(default_factory=list)  # of the turn's tokens
    stop_state: int = 0  # of the stop automaton, while it has no lane
    finish: str = ""
    hit: Hit | None = None
    page: Page | None = None  # the last full page of it that is in the pool's tree
    noted: int = 0  # tokens up to that page's end
    unready: list[tuple[Page, int]] = field(default_factory=list)  # pages that it is about to fill, up to which token
    prefilled: int = 0
    earlier: Int32s | None = None  # what was written before for the same question, in which drafts are looked up
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.ids = self.ids or list(self.prompt.ids)

    @property
    def turn_ids(self) -> list[int]:
        """The ids of the turn that has just ended."""
        return self.ids[self.turn_start :]
