"""Our side of `thresher bench rollout`: the Generator, or the rollout with an episode.

The Generator answers `demo` and `rag`, which are one turn. `search` and `branches` are episodes: a passage is appended
to a living sample, and the hidden contexts are the engine's branches. Every turn must have one length, so its tag is
too long for chance to spell, and it ends by its number of tokens.

Deliberately absent: scoring. What is sampled is kept only for the proof and for the counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from thresher.bench.rollout.plan import play
from thresher.bench.rollout.setting import RolloutSetting
from thresher.engine.decoding.generator import GenerateRequest, GenerateResult, Generator
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Generate,
    KeptSpan,
    Prompt,
    Retrieved,
    Search,
    SpawnBranches,
    System,
)
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.rollout.rollout import Job, Limits, Rollout
from thresher.kernels.attention.backends.choice import resolve_attention
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit as Found
from thresher.retrieval.retriever import Retriever
from thresher.rewards.result import RewardResult
from thresher.rewards.transcript import Source

TEMPLATE = "{question}{passages}"
STOP = "</NotToBeSpelledByChance>"


@dataclass(frozen=True, slots=True)
class Written:
    """A sequence of ids, and of those at `positions` the log-prob that was recorded when they were sampled."""

    ids: list[int]
    positions: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Work:
    """What a round did, as far as the side can tell: tokens prefilled, forwards, the host's share of the time."""

    prefilled: int | None = None
    forwards: int | None = None
    host_share: float | None = None
    drafted: int = 0
    accepted: int = 0
    written: list[Written] = field(default_factory=list)


def make_ours(setting: RolloutSetting) -> "RolloutSide | GeneratorSide":
    """The Generator where the shape is one turn, else the rollout."""
    return GeneratorSide(setting) if len(setting.shape.turns) == 1 else RolloutSide(setting)


class GeneratorSide:
    """The public Generator: contexts in, samples out. What a sample's prefill cost is in its result."""

    name = "generator"

    def __init__(self, setting: RolloutSetting) -> None:
        self.setting, self.rounds = setting, 0
        self.generator = Generator(setting.policy, setting.tokenizer, max_running=setting.shape.samples)

    def run(self) -> Work:
        self.rounds += 1
        work = Work(prefilled=0)

        def ask(contexts: list[list[int]], copies: int, tokens: int) -> list[list[int]]:
            first = self.rounds * 1_000_000 + len(work.written)
            requests = [
                GenerateRequest(prompt_ids=ids, max_new_tokens=tokens, n=copies, seed=first + number)
                for number, ids in enumerate(contexts)
            ]
            answers = self.generator.generate(requests)
            for context, results in zip(contexts, answers, strict=True):
                for result in results:
                    _note(work, context, result)
            return [list(result.token_ids) for results in answers for result in results]

        play(self.setting, ask)
        clock = self.generator.clock
        work.forwards, work.host_share = clock.forwards, clock.rest / clock.total
        return work


def _note(work: Work, context: Sequence[int], result: GenerateResult) -> None:
    start = len(context)
    positions = list(range(start, start + len(result.token_ids)))
    work.written.append(Written([*context, *result.token_ids], positions, list(result.logprobs)))
    work.prefilled = (work.prefilled or 0) + result.prefill_tokens_computed
    work.drafted += result.drafted
    work.accepted += result.accepted


class RolloutSide:
    """The engine's rollout around an episode whose turns have the lengths of the shape."""

    name = "rollout"

    def __init__(self, setting: RolloutSetting) -> None:
        self.setting, self.rounds = setting, 0
        shape = setting.shape
        system = System("bench", (STOP,), self._episode, _no_reward, TEMPLATE)
        self.given = {
            f"q{number}": [Passage(f"p{number}", "", text)] if text else []
            for number, text in enumerate(setting.passages)
        }
        self.questions = [Question(f"q{number}", text, ()) for number, text in enumerate(setting.questions)]
        self.rollout = Rollout(
            setting.policy,
            setting.tokenizer,
            Shelf(setting.appended),
            system,
            EpisodeConfig(TEMPLATE, len(shape.turns)),
            Renderer(
                tokenizer=setting.tokenizer,
                tags=system.tags,
                k=1,
                chat=False,
                max_passage_tokens=max(shape.passages, shape.appended, 1),
                passage_format="{text}",
            ),
            Limits(
                max_turn_tokens=max(shape.turns) + 1,
                max_policy_tokens=sum(shape.turns) + 1,
                max_context=shape.longest + 1,
                max_num_seqs=shape.samples,
                attention=resolve_attention(
                    "auto", setting.policy.device, setting.policy.dtype, setting.policy.config.head_dim, "rollout"
                ),
            ),
        )

    def sample(self) -> list[Trajectory]:
        """A round's trajectories, each with the lengths of the shape; other seeds in every round."""
        shape = self.setting.shape
        self.rounds += 1
        jobs = [
            Job(question, group, sample, (self.rounds * shape.questions + group) * shape.group + sample)
            for group, question in enumerate(self.questions)
            for sample in range(shape.group)
        ]
        trajectories = self.rollout.run(jobs, 1.0)
        for trajectory in trajectories:
            self._check(trajectory)
        return trajectories

    def run(self) -> Work:
        trajectories = self.sample()
        clock = self.rollout.clock
        everything = [one for trajectory in trajectories for one in (trajectory, *trajectory.branches.values())]
        return Work(
            prefilled=clock.prefilled_tokens,
            forwards=clock.forwards,
            host_share=clock.rest / clock.total,
            written=[Written(one.ids(), one.policy_positions(), one.policy_logprobs()) for one in everything],
        )

    def _episode(self, question: Question, tools: EpisodeConfig) -> Episode:
        shape = self.setting.shape
        prompt = Prompt(tools.template, question.question, self.given[question.id])
        yield prompt
        lengths: list[int] = []  # of the turns, in bytes
        for turn, tokens in enumerate(shape.turns):
            if turn and shape.appended:
                hits = yield Search(f"{question.id[1:]} {turn - 1}")
                yield Retrieved(hits, "", "")
            if turn and turn + 1 == len(shape.turns) and shape.branches:
                yield SpawnBranches(_hidden(prompt, tools.template, lengths, tokens))
            written = yield Generate((STOP,), tokens)
            lengths.append(len(written.text))
        return "ended"

    def _check(self, trajectory: Trajectory) -> None:
        """RuntimeError unless every length is that of the shape: else there is nothing to compare."""
        shape = self.setting.shape
        found = [_lengths(trajectory.segments), *(_lengths(b.segments) for b in trajectory.branches.values())]
        wanted = [(shape.longest - sum(shape.turns), shape.turns)]
        if shape.branches:
            wanted += [(context, shape.turns[-1:]) for context in shape.contexts[2:]]
        if found != wanted:
            raise RuntimeError(f"a sample's lengths are {found}, not {wanted} ({trajectory.reason})")


def _lengths(segments: Sequence[Segment]) -> tuple[int, tuple[int, ...]]:
    """Tokens that were given, and those of each turn."""
    turns = tuple(len(segment.ids) for segment in segments if segment.source is Source.POLICY)
    return sum(len(segment.ids) for segment in segments) - sum(turns), turns


def _hidden(prompt: Prompt, template: str, lengths: Sequence[int], tokens: int) -> dict[str, BranchPrompt]:
    """EviOmni's contexts: (q, P, r) and (q, e); lengths: bytes of reason and evidence."""
    reason, evidence = lengths
    bare = Prompt(template, prompt.question)
    return {
        "rationale": BranchPrompt(prompt, (KeptSpan(0, reason),), (STOP,), tokens),
        "evidence": BranchPrompt(bare, (KeptSpan(reason, reason + evidence),), (STOP,), tokens),
    }


class Shelf(Retriever):
    """Answers "question turn" with the passage that stands there."""

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.texts = texts

    def check_k(self, k: int) -> None:
        pass

    def _find(self, queries: list[str], k: int) -> list[list[Found]]:
        places = [tuple(map(int, query.split())) for query in queries]
        return [[Found(-1, Passage(f"{q}-{turn}", "", self.texts[q][turn]), 1.0)] for q, turn in places]


def _no_reward(attempt: object) -> RewardResult:
    raise RuntimeError("the bench rewards nothing")
