"""The language in which a paper's protocol is written.

An episode is a generator function. It yields what it needs, one request at a time, and the engine answers; between two
requests it is plain Python. The engine runs thousands of episodes at once and batches whatever is ready, so an episode
never sees a tensor, a batch or another episode.

    Prompt(...)     -> None         the first request, once
    Generate(stop)  -> Turn         the policy writes until a stop tag, the end of text, or a limit
    Search(query)   -> [Hit]        waits for the next retrieval, which serves all waiting episodes in one call
    Tool(name, arguments) -> Result waits for a tool of the recipe, while other episodes go on
    SubCall(context)   -> Turn         a turn of the policy in a context of its own, which the episode waits for
    Score(context, text) -> [float]    log-probs of a text that the policy did not write
    Retrieved(...)  -> None         appends passages, or a text made of them, between a pair of tags
    Feedback(text)  -> None         appends a line of the engine's own
    Fold(context)   -> None         goes on in a new context; what came before is not in it, but for what it keeps
    SpawnBranches(branches)         contexts of their own, in which the policy writes a turn each, for the reward

A branch hides what its context leaves out: the context is put together anew and computed anew from where it differs,
since the hidden states of later tokens have already absorbed what a mask over attention would hide. What is written in
it goes to the reward (RewardInput.branches), and into the loss only where the request says `trained`. A call is such a
context in the middle of an episode: what was written in it may be shown, as retrieved text, and is among the branches
too ("call 1", ..).

A fold puts a new context, made in the same way, in the place of the old one. What the policy sampled is trained in the
context in which it was sampled, once: text that is kept is part of the new context's prompt. An episode that folds when
a context runs full compares `Turn.room` with `EpisodeConfig.room_needed`.

A generator returns the reason why the trajectory ended ("answered", "turns", ...). Limits of tokens and context are the
engine's business: it closes the generator and records its own reason.
"""

import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher.common.errors import UserError
from thresher.common.files import read_text
from thresher.common.renamed import renamed
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit
from thresher.rewards.reward import RewardInput, RewardResult, Source, TextSegment
from thresher.rewards.tags import blocks, final_answer


@dataclass(frozen=True, slots=True)
class Prompt:
    """The opening of a trajectory: a template (which may hold control tokens), with question and passages put in their
    places, `{question}` and `{passages}`. tools: schemas that the chat template lists (engine/chat_calls.py)."""

    template: str
    question: str
    passages: Sequence[Passage] = ()
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Generate:
    """Let the policy write one turn; `stop` lists the closing tags at which it ends (the end of text always ends
    it). After `max_tokens` it ends as well, without a tag, and the episode goes on; a limit of the engine's ends the
    trajectory."""

    stop: tuple[str, ...]
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """among: passages to look in, by BM25, in place of the index or server."""

    query: str
    among: Sequence[Passage] | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A call of a tool that the recipe names. arguments: JSON values by name, as the policy may have written them. They
    are data: nothing in them is executed."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """The text that a tool returned, cut to the tool's limit. error: the call failed, and the text says why in one
    sentence."""

    text: str
    error: bool = False


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Passages to show, or a text in their place, such as what a call made of them; between `before` and `after`
    (template text: the tags are here and nowhere else)."""

    hits: Sequence[Hit] | str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Feedback:
    """A line of the engine's own, between `before` and `after` (template text without the system's tags)."""

    text: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A part of the policy's text so far, from byte `start` to `end`, all its turns counted as one text (in which the
    bytes that open a turn's text, because they trailed the one before, are there once)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BranchPrompt:
    """A context of its own: a prompt, then text kept from the trajectory, template text (str) and what was retrieved,
    in this order. Kept tokens stay whole; of one that straddles a boundary the kept part is encoded anew, byte by byte.

    stop, max_tokens: as in Generate, of the one turn that the policy writes in a branch or a call. A fold has neither:
    its turns are asked for by Generate.
    """

    prompt: Prompt
    parts: tuple[KeptSpan | str | Retrieved, ...]
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """Go on in this context, in the place of the present one. Passages in it that exceed their budget are cut, as those
    of a search. A context that leaves no room for a token ends the trajectory ("context")."""

    context: BranchPrompt


@dataclass(frozen=True, slots=True)
class SpawnBranches:
    """Branches of the trajectory, by name. They are written after it, in the same rollout; nothing waits for them.

    trained: their tokens are in the loss, with the advantage of the trajectory, or that of their own reward
    (`RewardResult.branches`) among the branches of this name in the group. What a server wrote is never trained.
    """

    branches: Mapping[str, BranchPrompt]
    trained: bool = False


@dataclass(frozen=True, slots=True)
class SubCall:
    """One turn of the policy in a context of its own, whose Turn the episode gets: it may ask for a text to be read,
    and show what came of it. Passages of its prompt that exceed their budget are cut, as those of a search. A limit
    ends the turn without a tag; a context that leaves it no room ends the trajectory. trained: as of SpawnBranches."""

    context: BranchPrompt
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """Ask for the log-probs of a text that nobody sampled, such as a gold answer: a list, one a token of `text`, which
    is encoded by itself as plain text; under softmax(z / temperature), as of sampled tokens (greedy: at temperature 1).

    context: template text, put behind the present context; or a context of its own, whose `stop` and
    `max_tokens` mean nothing here, and whose passages are cut as those of a SubCall. The trajectory goes on as if
    nothing had been asked: neither is a segment of it, and no token of either is trained on. Each score is recorded in
    Trajectory.scores. A context that leaves the text no room ends the trajectory.
    """

    context: BranchPrompt | str
    text: str


Request = Prompt | Generate | Search | Tool | SubCall | Score | Retrieved | Feedback | Fold | SpawnBranches
Episode = Generator[Request, Any, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy: its bytes, the tag that stopped it (None: end of text, or max_tokens), and how many
    tokens the episode's context has left behind it.

    A token may hold a stop tag's end and bytes behind it. They stay in its turn, and where nothing is appended before
    the next they open that one's text too: after `</extract><`, a turn that goes on with `answer>` begins `<answer>`,
    as it does for the reward.
    """

    text: bytes
    stop: str | None
    room: int = field(default=0, compare=False)

    def stopped_at(self, tag: str) -> bool:
        return self.stop == tag

    def inside(self, tag: str) -> str | None:
        """Return the text of the turn's first closed `<tag>` span, stripped; None if there is none or it is empty."""
        found = blocks([TextSegment(Source.POLICY, self.text)], tag)
        return (found[0].text.strip() or None) if found else None


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """Settings of an episode besides its question: its prompt template and the limit on its turns. room_needed: tokens
    that the passages of a search and the turn after them may take; a context with less room may end the trajectory."""

    template: str
    max_turns: int
    room_needed: int = 0


def rewarded_by_group(attempt: RewardInput) -> RewardResult:
    """Raise TypeError: the `reward` of a System that has `reward_group` alone."""
    raise TypeError("the system rewards whole groups; call its reward_group")


def last_answer(attempt: RewardInput) -> str | None:
    """Return the final answer of the transcript, as most systems read it (rewards/tags.py)."""
    return final_answer(attempt.pieces)


@dataclass(frozen=True, slots=True)
class System:
    """One paper's method, as the engine needs it.

    tags: every tag of its grammar, opening and closing; no passage, question or feedback may contain one.
    episode(question, config): the protocol. reward(attempt): the reward with its parts. reward_group(attempts): in
    place of `reward`, the rewards of a group's attempts, in their order; in an evaluation a group has one attempt.
    template: the built-in prompt, with `{question}` where the question goes, and `{passages}` if passages are given.
    preset: the paper's hyperparameters as recipe values, section -> key -> value.
    given_passages: the prompt shows the question's passages; where it comes with none, the engine retrieves them first.
    claims(attempt): (premise, hypothesis) pairs for the entailment judge, whose largest probability becomes
    attempt.entailment; None where the reward needs no judge. wants_verdict: an LLM judge must rate the answer, which is
    answer(attempt), the one that the reward reads; None without one.
    needs_golds: a question without gold answers is refused.
    searches: it asks an index or a server; None: it does if `information` is one of its tags.
    tools: names of tools that its episodes call; the recipe must have them all.
    needs_gold_indices: part of the reward can be earned only where it is known which of the passages are gold.
    """

    name: str
    tags: tuple[str, ...]
    episode: Callable[[Question, EpisodeConfig], Episode]
    reward: Callable[[RewardInput], RewardResult] = rewarded_by_group
    template: str = "{question}"
    preset: dict[str, dict[str, Any]] = field(default_factory=dict)
    given_passages: bool = False
    claims: Callable[[RewardInput], Sequence[tuple[str, str]]] | None = None
    wants_verdict: bool = False
    answer: Callable[[RewardInput], str | None] = last_answer
    needs_gold_indices: bool = False
    needs_golds: bool = True
    searches: bool | None = None
    tools: tuple[str, ...] = ()
    reward_group: Callable[[Sequence[RewardInput]], Sequence[RewardResult]] | None = None

    def __post_init__(self) -> None:
        if self.reward is rewarded_by_group and self.reward_group is None:
            raise TypeError(f"the System {self.name} has neither reward nor reward_group; give it one")

    @property
    def needs_index(self) -> bool:
        return "<information>" in self.tags if self.searches is None else self.searches


def over_given(system: System) -> System:
    """Return the system with every search of it answered from the passages that the question brings, and no index
    needed. UserError, when it searches, for a question that brings none."""

    def episode(question: Question, config: EpisodeConfig) -> Episode:
        inner, answer = system.episode(question, config), None
        while True:
            try:
                request = inner.send(answer)
            except StopIteration as stop:
                return str(stop.value)
            if isinstance(request, Search):
                if not question.passages:
                    raise UserError(f"question {question.id} brings no passages to search; search an index instead")
                request = replace(request, among=question.passages)
            answer = yield request

    return replace(system, episode=episode, searches=False)


def answer_once(question: Question, config: EpisodeConfig) -> Episode:
    """Play the prompt with the question's passages, and one turn that should hold the answer."""
    yield Prompt(config.template, question.question, question.passages)
    turn = yield Generate(stop=("</answer>",))
    return "answered" if turn.inside("answer") else "ended"


def answer_without_passages(question: Question, config: EpisodeConfig) -> Episode:
    """Play `answer_once` with the question alone."""
    return answer_once(replace(question, passages=()), config)


def pair_tags(*names: str) -> tuple[str, ...]:
    """Return ("<think>", "</think>", ..) for ("think", ..)."""
    return tuple(tag for name in names for tag in (f"<{name}>", f"</{name}>"))


def read_preset(path: Path) -> dict[str, dict[str, Any]]:
    """Return a system's preset, a TOML file as a recipe is."""
    return tomllib.loads(read_text(path))


def read_template(path: str | Path, passages: bool = False) -> str:
    """Read a prompt template file; it must hold `{question}` exactly once and, if the system is given passages, so
    `{passages}`."""
    text = read_text(path)
    for place, wanted in (("{question}", 1), ("{passages}", int(passages))):
        if (found := text.count(place)) != wanted:
            expected = f"needs {place} exactly once" if wanted else f"of this system has no use for {place}"
            raise UserError(f"{path}: a prompt template {expected}, found {found}")
    return text


if not TYPE_CHECKING:  # which would let any name pass
    __getattr__ = renamed(
        __name__,
        {"Tools": EpisodeConfig, "Reprefill": BranchPrompt, "Kept": KeptSpan, "Fork": SpawnBranches, "Call": SubCall},
    )
