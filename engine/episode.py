"""The language in which the protocol of a paper is written.

An episode is a generator function. It yields one request at a time, and the engine answers; between two requests it is
plain Python. The engine runs thousands of episodes at once and batches those that are ready, so an episode never sees a
tensor, a batch or another episode.

    Prompt(...)     -> None         the first request, once
    Generate(stop)  -> Turn         the policy writes until a stop tag, the end of text, or a limit
    Search(query)   -> [Hit]        waits for the next retrieval, which serves all waiting episodes in one call
    Tool(name, arguments) -> Result waits for a tool of the recipe, while other episodes continue
    SubCall(context)   -> Turn         a turn of the policy in a separate context, for which the episode waits
    Score(context, text) -> [float]    log-probs of a text that the policy did not write
    Retrieved(...)  -> None         appends passages, or a text made from them, between a pair of tags
    Feedback(text)  -> None         appends a line of engine text
    Fold(context)   -> None         continues in a new context, which holds only what it keeps of the old one
    SpawnBranches(branches)         separate contexts, in each of which the policy writes a turn for the reward

A branch hides text that its context leaves out: the context is assembled anew and computed anew from the first
difference, because the hidden states of later tokens have already absorbed text that an attention mask would hide. The
text written in a branch goes to the reward (RewardInput.branches), and into the loss only if the request sets
`trained`. A call is such a context in the middle of an episode: its text may be shown as retrieved text, and it is
among the branches too ("call 1", ..).

A fold replaces the old context with a new one, assembled in the same way. Tokens that the policy sampled are trained
once, in the context in which they were sampled: kept text is part of the new context's prompt. An episode that folds
when a context is full compares `Turn.room` with `EpisodeConfig.room_needed`.

A generator returns the reason why the trajectory ended ("answered", "turns", ...). The engine enforces limits of tokens
and context: it closes the generator and records its own reason.
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
    """The opening of a trajectory: a template (which may hold control tokens), in which question and passages replace
    `{question}` and `{passages}`. tools: schemas that the chat template lists (engine/chat_calls.py)."""

    template: str
    question: str
    passages: Sequence[Passage] = ()
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Generate:
    """Let the policy write one turn. stop: closing tags at which it ends (the end of text always ends it). After
    `max_tokens` it also ends, without a tag, and the episode continues; a limit of the engine ends the trajectory."""

    stop: tuple[str, ...]
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """Search for passages. among: passages to search by BM25, in place of the index or server."""

    query: str
    among: Sequence[Passage] | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A call of a tool that the recipe names. arguments: JSON values by name, possibly written by the policy. They are
    data: nothing in them is executed."""

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
    """Passages to show, or a text in their place, such as one that a call made from them. before, after: template text
    around them; the tags are in it and nowhere else."""

    hits: Sequence[Hit] | str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Feedback:
    """A line of engine text, between `before` and `after` (template text without the system's tags)."""

    text: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A part of the policy's text so far, from byte `start` to `end`, with all its turns joined to one text. Trailing
    bytes of a turn that also begin the next turn's text are in it once."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BranchPrompt:
    """A separate context: a prompt, followed by parts in the given order: text kept from the trajectory, template text
    (str) and retrieved text. Kept tokens stay whole; of a token that straddles a boundary the kept part is encoded
    anew, byte by byte.

    stop, max_tokens: as in Generate, for the one turn that the policy writes in a branch or a call. A fold uses
    neither, because Generate requests its turns.
    """

    prompt: Prompt
    parts: tuple[KeptSpan | str | Retrieved, ...]
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """Continue in this context, in place of the present one. Passages in it that exceed their budget are cut, as those
    of a search. A context without room for a token ends the trajectory ("context")."""

    context: BranchPrompt


@dataclass(frozen=True, slots=True)
class SpawnBranches:
    """Branches of the trajectory, by name. They are written after it, in the same rollout; no episode waits for them.

    trained: their tokens are in the loss, with the advantage of the trajectory, or with that of their own reward
    (`RewardResult.branches`) among the branches of this name in the group. Turns that a server wrote are never trained.
    """

    branches: Mapping[str, BranchPrompt]
    trained: bool = False


@dataclass(frozen=True, slots=True)
class SubCall:
    """One turn of the policy in a separate context; the episode gets its Turn. An episode can thus have a text read and
    show the result. Passages of its prompt that exceed their budget are cut, as those of a search. A limit ends the
    turn without a tag; a context without room for the turn ends the trajectory. trained: as in SpawnBranches."""

    context: BranchPrompt
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """Request the log-probs of a text that was not sampled, such as a gold answer. The answer is a list with one value
    per token of `text`, which is encoded by itself as plain text. The values are taken under softmax(z / temperature),
    as for sampled tokens (greedy: at temperature 1).

    context: template text, placed after the present context; or a separate context, whose `stop` and `max_tokens` are
    ignored and whose passages are cut as those of a SubCall. The trajectory continues as if nothing had been requested:
    neither text is a segment of it, and no token of either is trained on. Each score is recorded in Trajectory.scores.
    A context without room for the text ends the trajectory.
    """

    context: BranchPrompt | str
    text: str


Request = Prompt | Generate | Search | Tool | SubCall | Score | Retrieved | Feedback | Fold | SpawnBranches
Episode = Generator[Request, Any, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy: its bytes, the tag that stopped it (None: end of text, or max_tokens), and the number of
    tokens left in the episode's context after it.

    A token may hold the end of a stop tag and further bytes. These stay in its turn. If nothing is appended before the
    next turn, they also begin that turn's text: after `</extract><`, a turn that continues with `answer>` begins
    `<answer>`, as it does for the reward.
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
    """Raise TypeError: the `reward` of a System that has only `reward_group`."""
    raise TypeError("the system rewards whole groups; call its reward_group")


def last_answer(attempt: RewardInput) -> str | None:
    """Return the final answer of the transcript, as most systems read it (rewards/tags.py)."""
    return final_answer(attempt.pieces)


@dataclass(frozen=True, slots=True)
class System:
    """Method of one paper, in the form that the engine needs.

    tags: every tag of its grammar, opening and closing; no passage, question or feedback may contain one.
    episode(question, config): the protocol. reward(attempt): the reward with its parts. reward_group(attempts): in
    place of `reward`, the rewards of a group's attempts, in their order; in an evaluation a group has one attempt.
    template: the built-in prompt, with `{question}` for the question, and `{passages}` if passages are given.
    preset: the paper's hyperparameters as recipe values, section -> key -> value.
    given_passages: the prompt shows the question's passages; if it has none, the engine retrieves them first.
    most_given: it shows only this many of a question's own passages, the first; None: all.
    claims(attempt): (premise, hypothesis) pairs for the entailment judge, whose largest probability becomes
    attempt.entailment; None if the reward needs no judge. wants_verdict: an LLM judge must rate the answer.
    answer(attempt): the answer that the reward reads and the judge rates; None without one.
    needs_golds: a question without gold answers is refused.
    searches: whether it uses an index or a server; None: it does if `information` is one of its tags.
    tools: names of tools that its episodes call; the recipe must have them all.
    needs_gold_indices: part of the reward can be earned only if it is known which of the passages are gold.
    """

    name: str
    tags: tuple[str, ...]
    episode: Callable[[Question, EpisodeConfig], Episode]
    reward: Callable[[RewardInput], RewardResult] = rewarded_by_group
    template: str = "{question}"
    preset: dict[str, dict[str, Any]] = field(default_factory=dict)
    given_passages: bool = False
    most_given: int | None = None
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
    """Return the system with all its searches answered from the question's own passages, without an index. A search
    raises UserError for a question without passages."""

    def episode(question: Question, config: EpisodeConfig) -> Episode:
        inner, answer = system.episode(question, config), None
        while True:
            try:
                request = inner.send(answer)
            except StopIteration as stop:
                return str(stop.value)
            if isinstance(request, Search):
                if not question.passages:
                    raise UserError(f"question {question.id} has no passages to search; search an index instead")
                request = replace(request, among=question.passages)
            answer = yield request

    return replace(system, episode=episode, searches=False)


def answer_once(question: Question, config: EpisodeConfig) -> Episode:
    """Yield the prompt with the question's passages, then request one turn that should hold the answer."""
    yield Prompt(config.template, question.question, question.passages)
    turn = yield Generate(stop=("</answer>",))
    return "answered" if turn.inside("answer") else "ended"


def answer_without_passages(question: Question, config: EpisodeConfig) -> Episode:
    """Return the episode `answer_once` with the question alone."""
    return answer_once(replace(question, passages=()), config)


def pair_tags(*names: str) -> tuple[str, ...]:
    """Return ("<think>", "</think>", ..) for ("think", ..)."""
    return tuple(tag for name in names for tag in (f"<{name}>", f"</{name}>"))


def read_preset(path: Path) -> dict[str, dict[str, Any]]:
    """Return a system's preset from a TOML file in the format of a recipe."""
    return tomllib.loads(read_text(path))


def read_template(path: str | Path, passages: bool = False) -> str:
    """Read a prompt template file. It must hold `{question}` exactly once; `{passages}` once if the system is given
    passages, else not at all."""
    text = read_text(path)
    for place, wanted in (("{question}", 1), ("{passages}", int(passages))):
        if (found := text.count(place)) != wanted:
            expected = f"needs {place} exactly once" if wanted else f"of this system must not contain {place}"
            raise UserError(f"{path}: a prompt template {expected}, found {found}")
    return text


if not TYPE_CHECKING:  # a type checker would then accept any name
    __getattr__ = renamed(
        __name__,
        {"Tools": EpisodeConfig, "Reprefill": BranchPrompt, "Kept": KeptSpan, "Fork": SpawnBranches, "Call": SubCall},
    )
