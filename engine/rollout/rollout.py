"""Play many episodes at once and return their trajectories; in `Rollout` the decoder writes the turns.

An episode requests turns, searches, tools, scores and engine text (engine/episode.py). `EpisodeRunner` renders,
searches, calls tools (tools.py), enforces the limits, and begins branches and calls. A `TurnWriter` writes the turns:
here the decoder, in engine/evaluation/api_rollout.py a server. Searches that are due together are one call of the
retriever. Calls of tools run in parallel with the writing. A sample does not depend on the others: its noise is a
function of its seed and position, and the decoder's sequences are independent.

The path of a sample, in the order of the calls:

    Rollout.run -> play_all -> play -> Play.begin_groups -> begin      makes its episode
    serve -> _advance -> _open_turn -> DecoderWriter.begin_turn        serves the episode's requests; a turn is queued
    Play.step -> DecoderWriter.step -> Decoder.begin_turn, .step       submits queued turns, and draws tokens
    serve_written -> _store_turn -> serve                              a finished turn goes on the trajectory

A group may outlive its rollout; unfinished.py continues it, by its `log`.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from operator import itemgetter
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np

from thresher.common.background import Background
from thresher.common.console import Stage
from thresher.common.errors import UserError, shown
from thresher.engine.decoding.blocks import BlockPool
from thresher.engine.decoding.decoder import DecodeClock, Decoder
from thresher.engine.decoding.decoder_cuda import make_decoder
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.engine.decoding.speculative import TURN_END, Int32s, Speculate
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Feedback,
    Fold,
    Generate,
    Prompt,
    Request,
    Result,
    Retrieved,
    Score,
    Search,
    SpawnBranches,
    SubCall,
    System,
    Tool,
    Turn,
)
from thresher.engine.protocol.prompts import PromptBatch, Renderer, first_prompt, truncate_passages, with_passages
from thresher.engine.protocol.trajectory import Segment, Trajectory, present_ids, turns
from thresher.engine.rollout.contexts import branch_episode, branch_seed, context_ids, with_truncated_passages
from thresher.engine.rollout.tools import Call, Toolbox
from thresher.engine.rollout.trees import Growth, Node, Tree, TreeShape, copied, plant, replay
from thresher.engine.store.run_folder import trajectories_of
from thresher.kernels.attention.backends.choice import Backend
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer, UnencodableText
from thresher.retrieval.indexes.bm25 import rank_in_context
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit, Retriever
from thresher.rewards.reward import Source
from thresher.rewards.tags import escape_tags

CALL = re.compile(r"call \d+")  # a call's name among the branches
REMEMBERED = 20_000  # trajectories, of different questions, in which drafts are looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits in tokens. max_turn_tokens: one turn. max_policy_tokens: all turns together. max_context: each context of
    the trajectory. kv_tokens: keys and values held at once (None: `max_num_seqs` whole contexts); when they are full,
    the youngest samples wait. attention: the selected backend. share_prefix, reuse, num_draft_tokens: see Decoder; they
    change no result if the BLAS is batch-invariant."""

    max_turn_tokens: int
    max_policy_tokens: int
    max_context: int
    max_num_seqs: int
    kv_block_size: int = 64
    kv_tokens: int | None = None
    attention: Backend = "torch"
    share_prefix: bool = True
    reuse: bool = True
    num_draft_tokens: Speculate = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One sample to draw. Jobs with the same `group` answer the same question and share its prompt."""

    question: Question
    group: int
    sample: int
    seed: int


def seed_of(*parts: object) -> int:
    """Return 63 bits that depend on all parts, the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


@dataclass(slots=True)
class RolloutClock(DecodeClock):
    """Time of a rollout by its parts, in seconds, and counts of the work. cut_search_tokens: tokens of retrieved
    passages beyond the budget of a search. forks: samples that continued from a node of a tree."""

    search: float = 0.0
    search_queries: int = 0
    search_calls: int = 0
    cut_search_tokens: int = 0
    branches: int = 0
    branches_without_room: int = 0
    forks: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    noisy_tool_calls: int = 0

    @property
    def rest(self) -> float:
        """Return the decoder's `rest` without searches; 0 if searches ran while the GPU was decoding."""
        return max(self.total - self.decode - self.prefill - self.search, 0.0)


@dataclass(slots=True, eq=False)
class Group:
    """Samples of one question, from their jobs to their trajectories.

    log: replies that the samples got from the engine, each with the sample's key: turns and scores, passages, records
    of tools. drawn: by key, the tokens drawn so far of turns that were unfinished when the last rollout ended.
    trajectories: those of the jobs, in their order, once all samples have ended. version: version of the weights that
    computed its first keys and values; 0 if none outlive an update. step: the training step of its questions and seeds,
    if it may outlive a rollout. samples: all that were begun, by key. branches: owner, name and branch. playing: number
    of samples that have not ended.
    """

    jobs: "list[Job]"
    log: "list[tuple[str, Reply]]" = field(default_factory=list)
    drawn: "dict[str, Written]" = field(default_factory=dict)
    trajectories: list[Trajectory] | None = None
    version: int = 0
    step: int | None = None
    samples: "dict[str, Sample]" = field(default_factory=dict)
    branches: list[tuple[Trajectory, str, Trajectory]] = field(default_factory=list)
    playing: int = 0

    @property
    def question(self) -> Question:
        return self.jobs[0].question


@dataclass(slots=True, eq=False)
class Sample:
    """A sample in progress.

    key: its name in its group: its number, followed by the names of the branch or call that it is.

    length, policy_tokens: tokens of its present context, and of its turns in all contexts. room: token limit of the
    turn. limit: the reason that ends the trajectory if the turn uses up its room; None: the episode continues. lead:
    bytes after the last stop tag, which begin the next turn's text if nothing is appended before it. pending: branches
    that begin after it has ended, with the ids of their contexts, and whether they are trained. reported: whether it is
    one of the run's jobs and not a branch. caller: the sample that waits for this call, and the call's name. growth:
    its tree, while other samples will continue from its nodes. score: the record of the text that is being scored.
    """

    job: Job
    group: Group
    key: str
    episode: Episode
    trajectory: Trajectory
    length: int = 0
    policy_tokens: int = 0
    room: int = 0
    limit: str | None = None
    lead: bytes = b""
    pending: dict[str, tuple[BranchPrompt, list[int], bool]] = field(default_factory=dict)
    reported: bool = True
    calls: int = 0
    caller: "tuple[Sample, str] | None" = None
    growth: "Growth[Job, Sample] | None" = None
    score: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A turn that has ended; or, without ids, the log-probs of a text. full: the turn used up its room. trailing: bytes
    of its last token after the stop tag. versions: as in Segment."""

    ids: list[int]
    logprobs: Sequence[float] = ()
    stop: str | None = None
    trailing: bytes = b""
    full: bool = False
    versions: Sequence[tuple[int, int]] = ()


# What the engine returns to an episode: a turn or scores, passages, or the record of a tool call with its result.
Reply = Written | list[Hit] | dict[str, Any]


class TurnWriter(Protocol):
    """Writer of the turns of one run.

    elsewhere: a GPU does the work, so this process can search in the meantime. idle: no turn is due. takes_text: the
    next step feeds text that is appended before it, instead of a later step.
    """

    elsewhere: bool

    @property
    def idle(self) -> bool: ...

    @property
    def takes_text(self) -> bool: ...

    def begin(self, sample: Sample, prompt: SharedPrompt, branch: BranchPrompt | None) -> None:
        """Begin a new sample with `prompt`, or continue a sample with it in a new context. branch: source of that
        prompt, if it is not a question's."""

    def append(self, sample: Sample, ids: list[int]) -> None:
        """Append engine text."""

    def begin_turn(self, sample: Sample, stop: tuple[str, ...], lead: bytes) -> None:
        """Begin a turn of at most `sample.room` tokens. lead: bytes before it that belong to its text."""

    def score(self, sample: Sample, ids: list[int], scored_from: int, present: int) -> None:
        """Begin to compute the log-probs of the ids from `scored_from` on, given the ids before them. present: number
        of leading ids that are the sample's context, with which its next turn begins. UserError if log-probs are not
        available."""

    def step(self) -> list[tuple[Sample, Written]]:
        """Run a step; return the turns that have ended, and the texts that have been scored."""

    def release(self, sample: Sample, keep: bool) -> None:
        """Free a sample's resources. keep: its branches, other samples or itself will begin with the same tokens."""


class EpisodeRunner:
    """Runner of the episodes of one system; reusable. unit: tokens of the trajectory per token of a request's
    `max_tokens`. clock: clock of the last run."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        retriever: Retriever | None,
        system: System,
        config: EpisodeConfig,
        renderer: Renderer,
        limits: Limits,
        shuffle: bool = False,
        unit: int = 1,
        tools: Toolbox | None = None,
    ) -> None:
        self.tokenizer, self.retriever = tokenizer, retriever
        self.system, self.episode_config, self.renderer, self.limits = system, config, renderer, limits
        self.shuffle, self.unit, self.tools = shuffle, unit, tools or Toolbox()
        self.clock = RolloutClock()
        self.under_way: tuple[int, int] | None = None  # of `play_all`: trajectories that have ended, and all of them

    def prompt(self, question: Question, room: int = 0) -> list[int]:
        """Return the ids of a question's prompt. UserError if they and `room` more tokens leave no room in the
        context."""
        try:
            ids = self.renderer.prompt(first_prompt(self.system, question, self.episode_config))
        except UnencodableText as error:
            raise UserError(f"question {question.id}: {error}") from None
        if len(ids) + room + 1 > self.limits.max_context:
            and_passages = f" and passages of up to {room}" if room else ""
            tokens, context = len(ids) // self.unit, self.limits.max_context // self.unit
            raise UserError(
                f"question {question.id}: its prompt of {tokens} tokens{and_passages} leaves no room in a context of "
                f"{context}; raise rollout.max_context or shorten the template"
            )
        return ids

    def check_prompts(self, questions: Iterable[Question]) -> None:
        """Check the prompts of all questions, before a run begins. A token is at least one byte, so only prompts that
        might not fit are encoded; if the tokenizer lacks bytes, all are. Passages still to be retrieved are assumed to
        fill their budget."""
        around: dict[str, int] = {}  # number of tokens of a template and its tools, without a question
        budget = self.renderer.max_passage_tokens if self.system.given_passages else 0
        for question in questions:
            request = first_prompt(self.system, question, self.episode_config)
            form = repr((request.template, request.tools))
            if form not in around:
                around[form] = len(self.renderer.prompt(Prompt(request.template, "", tools=request.tools)))
            longest = len(escape_tags(request.question, self.system.tags).encode("utf-8", "surrogatepass")) + budget
            if self.tokenizer.lacks_bytes or around[form] + longest + 1 > self.limits.max_context:
                (shown,) = truncate_passages([question], self.system, self.episode_config, self.renderer).questions
                self.prompt(shown, room=0 if question.passages else budget)

    def retrieve_and_truncate(self, questions: Sequence[Question]) -> PromptBatch:
        """Return the questions with the passages that their prompts show, truncated to their budget. These are a
        question's own passages, or those found by one search. Questions are unchanged if the system is not given
        passages."""
        if self.system.given_passages:
            questions = with_passages(questions, self.retriever, self.renderer.k, self.system.most_given)
        return truncate_passages(questions, self.system, self.episode_config, self.renderer)

    def run(
        self,
        jobs: Sequence[Job],
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
        recall: bool = False,
    ) -> list[Trajectory]:
        """Return every job's trajectory, in the order of the jobs. Temperature 0 is greedy.

        on_progress: called with the number of trajectories that have ended since its last call. recall: look up drafts
        in trajectories of earlier calls for the same questions, as when a dev set is evaluated again. It is not for
        training: without a batch-invariant BLAS, a resumed run would differ in the last bits.
        """
        raise NotImplementedError

    def play(
        self, jobs: Sequence[Job], writer: TurnWriter, shape: TreeShape | None = None
    ) -> Generator[list[Sample], None, None]:
        """Yield at each step the samples of `jobs` that have ended in it. Branches are in their trajectories once all
        samples of their group have ended. shape: shape of the trees of each group; None: all samples begin at the
        prompt."""
        groups: dict[int, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.group, []).append(job)
        with ExitStack() as stack:
            play = Play(self, writer, stack, shape)
            play.begin_groups([Group(members) for members in groups.values()])
            yield play.take_ended()
            while play.active:
                play.step()
                yield play.take_ended()

    def episode_of(self, job: Job) -> Episode:
        """Return a new episode of a job's question."""
        return self.system.episode(job.question, self.episode_config)

    def play_all(
        self,
        jobs: Sequence[Job],
        writer: TurnWriter,
        on_progress: Callable[[int], None] | None,
        shape: TreeShape | None = None,
    ) -> list[Trajectory]:
        """Run `play` to the end; return the trajectories in the order of the jobs."""
        self.under_way = (0, len(jobs))
        done: dict[tuple[int, int], Trajectory] = {}
        with closing(self.play(jobs, writer, shape)) as steps:
            for ended in steps:
                done |= {(sample.job.group, sample.job.sample): sample.trajectory for sample in ended}
                if ended and on_progress is not None:
                    on_progress(len(ended))
                self.under_way = (len(done), len(jobs))
        self.under_way = None
        return [done[job.group, job.sample] for job in jobs]

    def stage(self) -> Stage | None:
        """Return the progress of `play_all`, for `console.polling`; None if it is not running."""
        under_way = self.under_way  # read once, because the run continues meanwhile
        text = f"{self.clock.sampled_tokens:,} tokens, {self.clock.search_queries:,} searches"
        if self.clock.tool_calls:
            text += f", {self.clock.tool_calls:,} tool calls"
        return None if under_way is None else Stage("rollout", *under_way, text)


class Rollout(EpisodeRunner):
    """Runner that samples with one policy. A run begins with an empty cache; on CUDA its memory may be new."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        retriever: Retriever | None,
        system: System,
        config: EpisodeConfig,
        renderer: Renderer,
        limits: Limits,
        shuffle: bool = False,
        tools: Toolbox | None = None,
    ) -> None:
        super().__init__(tokenizer, retriever, system, config, renderer, limits, shuffle, tools=tools)
        self.policy = policy
        self.decoder = make_decoder(
            policy,
            tokenizer,
            limits.attention,
            num_blocks=self.blocks_for(limits),
            block_size=limits.kv_block_size,
            max_running=limits.max_num_seqs,
            reuse=limits.reuse,
            share_prefix=limits.share_prefix,
            speculate=limits.num_draft_tokens,
        )
        self.kept: BlockPool | None = None  # the last rollout's pool for the next one, for rollout.stale_cache
        # Ids of each question's last trajectory.
        self._earlier_ids: OrderedDict[str, Int32s] = OrderedDict()

    @staticmethod
    def blocks_for(limits: Limits) -> int:
        """Return the number of cache blocks: those of kv_tokens, or of `max_num_seqs` whole contexts; and block 0."""
        a_context = -(-limits.max_context // limits.kv_block_size)
        if limits.kv_tokens is None:
            return 1 + limits.max_num_seqs * a_context
        return 1 + max(limits.kv_tokens // limits.kv_block_size, a_context)

    def run(
        self,
        jobs: Sequence[Job],
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
        recall: bool = False,
        shape: TreeShape | None = None,
    ) -> list[Trajectory]:
        """Return the trajectories as EpisodeRunner.run does. shape: shape of each group's trees, which its first jobs
        begin."""
        self.clock = RolloutClock()
        started = time.perf_counter()
        self.decoder.begin(self.limits.max_context, self.clock)
        recall = recall and bool(self.decoder.speculate)
        draw = SamplingParams(temperature=temperature)
        writer = DecoderWriter(self.decoder, draw, self._earlier_ids if recall else {})
        trajectories = self.play_all(jobs, writer, on_progress, shape)
        self.decoder.end()
        self.clock.total = time.perf_counter() - started
        for trajectory in trajectories if recall else ():
            self._earlier_ids[trajectory.question_id] = ids_by_turns(trajectory)
            self._earlier_ids.move_to_end(trajectory.question_id)
        while len(self._earlier_ids) > REMEMBERED:
            self._earlier_ids.popitem(last=False)
        return trajectories


class QueuedTurn(NamedTuple):
    """A turn, or a text to score, that the decoder gets with its next step. drawn: the part that is already drawn."""

    sequence: TokenSequence
    stop: tuple[str, ...] = ()
    room: int = 0
    lead: bytes = b""
    drawn: Written = Written([])


class DecoderWriter:
    """TurnWriter that uses the decoder. earlier: ids in which drafts are looked up, by question. version: version of
    the weights, which is recorded in the turns; None: none is recorded."""

    def __init__(
        self, decoder: Decoder, draw: SamplingParams, earlier: Mapping[str, Int32s], version: int | None = None
    ) -> None:
        self.decoder, self.draw, self.earlier, self.version = decoder, draw, earlier, version
        self.elsewhere = decoder.launches_ahead
        self.sequences: dict[Sample, TokenSequence] = {}
        self.queued: dict[Sample, QueuedTurn] = {}  # for the next step
        self.writing: dict[TokenSequence, tuple[Sample, Written]] = {}  # with the part drawn before

    @property
    def idle(self) -> bool:
        return not self.queued and self.decoder.idle

    @property
    def takes_text(self) -> bool:
        return self.decoder.takes_text

    def begin(self, sample: Sample, prompt: SharedPrompt, branch: BranchPrompt | None) -> None:
        version = sample.group.version
        sequence = self.sequences[sample] = TokenSequence(prompt, sample.job.seed, self.draw, version=version)
        sequence.earlier = self.earlier.get(sample.job.question.id)

    def append(self, sample: Sample, ids: list[int]) -> None:
        self.decoder.append(self.sequences[sample], ids)

    def begin_turn(self, sample: Sample, stop: tuple[str, ...], lead: bytes) -> None:
        if sample.growth is not None:
            self.decoder.keep_states(self.sequences[sample])
        self.queued[sample] = QueuedTurn(self.sequences[sample], stop, sample.room, lead)

    def score(self, sample: Sample, ids: list[int], scored_from: int, present: int) -> None:
        version, prompt = sample.group.version, SharedPrompt(ids)
        sequence = TokenSequence(prompt, 0, self.draw, most=len(ids), scored_from=scored_from, version=version)
        sequence.keep_at = max(present - 1, 0)  # the next turn feeds its last token
        self.queued[sample] = QueuedTurn(sequence)

    def step(self) -> list[tuple[Sample, Written]]:
        self._submit_turns()
        return self._ended_turns(self.decoder.step())

    def _submit_turns(self) -> None:
        for sample, turn in self.queued.items():
            sequence, drawn = turn.sequence, turn.drawn
            self.writing[sequence] = sample, drawn
            if sequence.scored_from:
                self.decoder.score(sequence)
            else:
                self.decoder.begin_turn(sequence, turn.stop, turn.room, turn.lead, (drawn.ids, drawn.logprobs))
        self.queued = {}

    def _ended_turns(self, sequences: Sequence[TokenSequence]) -> list[tuple[Sample, Written]]:
        found = []
        for sequence in sequences:
            sample, drawn = self.writing.pop(sequence)
            if sequence.scored_from:
                self.decoder.release(sequence, keep=True)  # the trajectory continues from its context
                found.append((sample, Written([], sequence.logprobs)))
                continue
            hit, full = sequence.hit, sequence.finish == "length"
            stop, trailing = (None, b"") if hit is None else (hit.tag, hit.trailing)
            written = self._written(sequence, drawn)
            found.append((sample, replace(written, stop=stop, trailing=trailing, full=full)))
        return found

    def _written(self, sequence: TokenSequence, drawn: Written) -> Written:
        """Return a turn so far. drawn: its beginning, from an earlier rollout."""
        ids, versions = sequence.turn_ids, list(drawn.versions)
        if self.version is not None and len(ids) > len(drawn.ids):
            versions.append((self.version, len(ids) - len(drawn.ids)))
        return Written(ids, sequence.logprobs, versions=versions)

    def release(self, sample: Sample, keep: bool) -> None:
        self.decoder.release(self.sequences[sample], keep=keep)


class Play:
    """One run of episodes, with its samples in progress. shape: shape of the trees of each group."""

    def __init__(self, runner: EpisodeRunner, writer: TurnWriter, stack: ExitStack, shape: TreeShape | None) -> None:
        self.runner, self.writer, self.clock, self.stack, self.shape = runner, writer, runner.clock, stack, shape
        stack.callback(self._drop_tools)
        self.replaying = False  # replies come from logs
        self.queries: dict[str, str] = {}  # of a replayed group: open queries, by key
        self.asked: list[tuple[Sample, str]] = []  # queries of the next search
        self.search: tuple[Future[list[list[Hit]]], list[tuple[Sample, str]]] | None = None  # the running one
        self.called: list[tuple[Sample, object]] = []  # callers, with the turns that they waited for
        self.ended: list[Sample] = []  # since the last step
        self.searcher: Background[list[list[Hit]]] | None = None  # for searches in parallel with the writing

    def begin_groups(self, groups: Sequence[Group]) -> None:
        """Begin all samples of these groups that begin at a prompt."""
        self.serve([(sample, None) for group in groups for sample in self._begin_group(group)])

    def _begin_group(self, group: Group) -> list[Sample]:
        jobs, prompt = group.jobs, SharedPrompt(self.runner.prompt(group.question))
        first: Iterable[tuple[Job, Tree[Job, Sample] | None]]
        first = ((job, None) for job in jobs) if self.shape is None else plant(jobs, self.shape)
        return [self.begin(job, group, str(job.sample), prompt, tree=tree) for job, tree in first]

    def begin(
        self,
        job: Job,
        group: Group,
        key: str,
        prompt: SharedPrompt,
        branch: BranchPrompt | None = None,
        tree: "Tree[Job, Sample] | None" = None,
    ) -> Sample:
        """Begin a sample and return it. branch: source of the prompt, if it is a branch. tree: the tree that it
        begins."""
        episode = self.runner.episode_of(job) if branch is None else branch_episode(branch)
        next(episode)  # its Prompt, which is already rendered
        trajectory = Trajectory(job.question.id, job.group, job.sample, [Segment(Source.PROMPT, list(prompt.ids))])
        sample = Sample(job, group, key, episode, trajectory, len(prompt.ids))
        if tree is not None:
            tree.nodes.append(Node(job.sample, 0, copied(sample, trajectory=copied(trajectory)), prompt))
            sample.growth = Growth(tree)
        self._enter(sample, prompt, branch)
        return sample

    def _enter(self, sample: Sample, prompt: SharedPrompt, branch: BranchPrompt | None) -> None:
        """Add a new sample to its group and to the writer."""
        sample.group.samples[sample.key] = sample
        sample.group.playing += 1
        self.writer.begin(sample, prompt, branch)

    @property
    def active(self) -> bool:
        """Return whether any sample has not ended."""
        return bool(self.asked or self.search is not None or self.runner.tools.waiting or not self.writer.idle)

    def step(self) -> None:
        """Answer requests for which there are results, and run a step of the writer."""
        self.search_beside()
        if self.runner.tools.waiting:
            self.serve(self.tool_results())
        if not self.writer.idle:
            self.serve_written(self.writer.step())

    def serve_written(self, written: Iterable[tuple[Sample, Written]]) -> None:
        """Pass the turns and scores that the writer has finished to their episodes."""
        ended = [(sample, self._store_written(sample, one)) for sample, one in written]
        self.serve([(sample, reply) for sample, reply in ended if reply is not None])

    def _drop_tools(self) -> None:
        if self.runner.tools.waiting:
            self.runner.tools.drop()

    def take_ended(self) -> list[Sample]:
        """Return the samples that have ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def _leave_group(self, sample: Sample) -> None:
        """Count a sample as ended. The last one completes its group."""
        group = sample.group
        group.playing -= 1
        if group.playing:
            return
        for owner, name, branch in group.branches:
            owner.branches[name] = branch
        group.trajectories = [group.samples[str(job.sample)].trajectory for job in group.jobs]
        group.samples, group.branches = {}, []
        self.end_group(group)

    def log_reply(self, sample: Sample, reply: Reply) -> None:
        """Record a reply for a sample. A play of a single rollout does not need it."""

    def end_group(self, group: Group) -> None:
        """Record that all samples of a group have ended."""

    # --- Requests of the samples

    def _store_written(self, sample: Sample, written: Written) -> Turn | list[float] | None:
        """Put a finished turn or score on the trajectory; return the reply for its episode, None if that has ended."""
        self.log_reply(sample, written)
        if sample.score is None:
            return self._store_turn(sample, written)
        record, sample.score = sample.score, None
        sample.trajectory.scores.append(record | {"logprobs": list(written.logprobs)})
        return list(written.logprobs)

    def _store_turn(self, sample: Sample, written: Written) -> Turn | None:
        """Put a finished turn on the trajectory and return it; None if a limit ended it and thus the trajectory."""
        segment = sample.trajectory.segments[-1]
        segment.ids.extend(written.ids)
        segment.logprobs.extend(written.logprobs)
        segment.versions = list(written.versions)
        segment.stop, segment.trailing = written.stop, len(written.trailing)
        lead, sample.lead = sample.lead, written.trailing
        sample.length += len(segment.ids)
        sample.policy_tokens += len(segment.ids)
        if written.full and sample.limit is not None:
            self._end(sample, sample.limit)
            return None
        return self._turn(sample, segment, lead)

    def _turn(self, sample: Sample, segment: Segment, lead: bytes = b"") -> Turn:
        room = max(self.runner.limits.max_context - sample.length, 0) // self.runner.unit
        return Turn(lead + self.runner.tokenizer.decode_bytes(segment.ids), segment.stop, room)

    def _end(self, sample: Sample, reason: str) -> None:
        sample.trajectory.reason = reason
        sample.episode.close()
        self.writer.release(sample, keep=bool(sample.pending) or sample.growth is not None)
        # The prefix that a branch shares with its trajectory is mostly still in the cache.
        for name, (branch, ids, trained) in sample.pending.items():
            if len(ids) + 1 > self.runner.limits.max_context:
                self.clock.branches_without_room += 1
                continue
            self.clock.branches += 1
            begun = self._begin_branch(sample, name, branch, ids, trained)
            sample.group.branches.append((sample.trajectory, name, begun.trajectory))
            self.serve([(begun, None)])
        if sample.caller is not None:
            caller, name = sample.caller
            caller.trajectory.branches[name] = sample.trajectory
            turn = next(turns(sample.trajectory), Segment(Source.POLICY, []))
            self.called.append((caller, self._turn(caller, turn)))
        if sample.reported:
            self.ended.append(sample)
        if sample.growth is not None:
            for job, node in sample.growth.tree.end_sample():
                self._fork(job, node, sample.growth.tree)
        self._leave_group(sample)

    def _fork(self, job: Job, node: "Node[Sample]", tree: "Tree[Job, Sample]") -> None:
        """Begin a sample that continues from a node."""
        episode, state = self.runner.episode_of(job), node.state
        request = replay(episode, node.exchanges, self.runner.system.name)
        trajectory = copied(state.trajectory, sample=job.sample, forked=(node.sample, node.turns))
        trajectory.branches = {
            name: replace(one, forked=one.forked or (node.sample, 1)) for name, one in trajectory.branches.items()
        }
        sample = copied(state, job=job, key=str(job.sample), episode=episode, trajectory=trajectory)
        sample.growth = Growth(tree, list(node.exchanges)) if tree.rounds else None
        self.clock.forks += 1
        self._enter(sample, node.prompt, None)
        if isinstance(request, Generate):
            self._open_turn(sample, request)
        else:
            self.serve([(sample, None)])

    def _begin_branch(self, owner: Sample, name: str, branch: BranchPrompt, ids: list[int], trained: bool) -> Sample:
        """Begin a branch or call, with its own context and seed. It is not reported."""
        job = replace(owner.job, seed=branch_seed(owner.job.seed, name))
        begun = self.begin(job, owner.group, f"{owner.key}/{name}", SharedPrompt(ids), branch)
        begun.reported, begun.trajectory.trained = False, trained
        return begun

    def _context(self, sample: Sample, branch: BranchPrompt) -> list[int]:
        """Return the ids of a branch's context."""
        written = [token for turn in turns(sample.trajectory) for token in turn.ids]
        return context_ids(branch, written, self.runner.renderer)

    def _truncated_context(self, sample: Sample, context: BranchPrompt) -> tuple[BranchPrompt, list[int]]:
        """Return a requested context with its prompt's passages truncated, and its ids."""
        context, cut = with_truncated_passages(context, self.runner.renderer, sample.job.question.id)
        self.clock.cut_search_tokens += cut
        return context, self._context(sample, context)

    def _leave_for(self, sample: Sample, context: BranchPrompt) -> tuple[BranchPrompt, list[int]] | None:
        """Release the sample from the writer, for a turn in this context. Return the context with its passages
        truncated, and its ids. If they leave no room for a token, end the sample and return None."""
        context, ids = self._truncated_context(sample, context)
        if len(ids) + 1 > self.runner.limits.max_context:
            self._end(sample, "context")
            return None
        self.writer.release(sample, keep=True)
        return context, ids

    def _call(self, sample: Sample, call: SubCall) -> None:
        """Begin a call; the sample waits until it has ended."""
        if (found := self._leave_for(sample, call.context)) is None:
            return
        sample.calls += 1
        name = f"call {sample.calls}"
        begun = self._begin_branch(sample, name, *found, call.trained)
        begun.caller = (sample, name)
        self._advance(begun, None)

    def _fold(self, sample: Sample, context: BranchPrompt) -> bool:
        """Continue in a new context; return whether there is room in it. The context has its own seed, so that the
        policy may write differently in two equal contexts."""
        if (found := self._leave_for(sample, context)) is None:
            return False
        context, ids = found
        sample.job = replace(sample.job, seed=branch_seed(sample.job.seed, "fold"))
        sample.trajectory.segments.append(Segment(Source.PROMPT, list(ids)))
        sample.length, sample.lead = len(ids), b""
        self.writer.begin(sample, SharedPrompt(ids), context)
        return True

    def _score(self, sample: Sample, request: Score) -> None:
        """Begin to score a text. The sample leaves the writer until the log-probs are complete."""
        context, text, tokenizer = request.context, request.text, self.runner.tokenizer
        where = f"question {sample.job.question.id}: {self.runner.system.name} requests a Score"
        if not isinstance(text, str) or not text:
            raise UserError(f"{where} of {shown(text)}; expected a text that is not empty")
        present = 0
        if isinstance(context, str):
            ids = present_ids(sample.trajectory)
            present, ids = len(ids), ids + tokenizer.encode_template(context)
        else:
            ids = self._truncated_context(sample, context)[1]
        if not ids:
            raise UserError(f"{where} in an empty context; expected at least one token")
        try:
            text_ids = tokenizer.encode(text)
        except UserError as error:
            raise UserError(f"{where} of a text that cannot be encoded: {error}") from None
        if len(ids) + len(text_ids) > self.runner.limits.max_context:
            self._end(sample, "context")
            return
        template = context if isinstance(context, str) else None
        written = sum(1 for _ in turns(sample.trajectory))
        sample.score = {"context": template, "text": text, "turns": written}
        self.writer.release(sample, keep=True)
        self.writer.score(sample, ids + text_ids, len(ids), present)

    def serve(self, ready: "Sequence[tuple[Sample, object]]") -> None:
        """Answer the episodes' requests until each writes, ends or waits for a search; then search for all at once. If
        a server searches, or a GPU writes, the search runs in parallel with the writing."""
        while waiting := self._advance_all(ready):
            if self.replaying:
                self.queries |= {sample.key: query for sample, query in waiting}
                return
            retriever = self._retriever()
            if retriever.elsewhere or (self.writer.elsewhere and not retriever.samples):
                self.asked += waiting
                return
            ready = self._found(waiting, partial(self._search, waiting))

    def search_beside(self, wait: bool = False) -> None:
        """Pass the hits of the running search to the episodes, and begin the next search, for all queries since. wait:
        wait for the hits even if turns are being written.

        The search of a server is collected when it is done. A search in this process runs in a thread. It is collected
        at the writer's next step that takes text, done or not, so that the order of the work does not depend on the
        time it takes.
        """
        idle, a_server = wait or self.writer.idle, self.runner.retriever is not None and self.runner.retriever.elsewhere
        if self.search is not None:
            future, waiting = self.search
            if idle or (future.done() if a_server else self.writer.takes_text):
                self.search = None
                self.serve(self._found(waiting, future.result))
        if self.asked and self.search is None and (a_server or idle or self.writer.takes_text):
            if self.searcher is None:
                self.searcher = self.stack.enter_context(Background[list[list[Hit]]]())
            waiting, self.asked = self.asked, []
            self.search = self.searcher.submit(partial(self._search, waiting)), waiting

    def _search(self, waiting: "Sequence[tuple[Sample, str]]") -> list[list[Hit]]:
        self.clock.search_queries += len(waiting)
        self.clock.search_calls += 1
        return self._retriever().search([query for _, query in waiting], self.runner.renderer.k)

    def _advance_all(self, ready: "Sequence[tuple[Sample, object]]") -> list[tuple[Sample, str]]:
        """Advance the samples; return those that wait for a search, each with its query. Samples whose calls have ended
        also continue."""
        waiting: list[tuple[Sample, str]] = []
        pending = [*ready, *self.called]
        self.called = []
        while pending:
            waiting += [(sample, query) for sample, reply in pending for query in self._advance(sample, reply)]
            pending, self.called = self.called, []
        return waiting

    def _found(
        self, waiting: "Sequence[tuple[Sample, str]]", result: Callable[[], list[list[Hit]]]
    ) -> list[tuple[Sample, object]]:
        """Return the samples with their hits, and count the seconds that `result` takes."""
        started = time.perf_counter()
        found = result()
        self.clock.search += time.perf_counter() - started
        replies = zip(waiting, found, strict=True)
        return [(sample, self.note_found(sample, query, hits)) for (sample, query), hits in replies]

    def note_found(self, sample: Sample, query: str, hits: list[Hit]) -> list[Hit]:
        """Put a search on the trajectory and its hits into the log; return the hits for the episode."""
        self.log_reply(sample, hits)
        shown_hits = list(hits)  # a copy for the episode, shuffled in place
        self._note(sample, query, shown_hits)
        return shown_hits

    def _note(self, sample: Sample, query: str, hits: list[Hit]) -> None:
        if self.runner.shuffle:
            Random(f"{sample.job.seed} {len(sample.trajectory.searches)}").shuffle(hits)
        sample.trajectory.searches.append({"query": query, "passages": [hit.passage.id for hit in hits]})

    def _begin_tool(self, sample: Sample, request: Tool) -> Result | None:
        """Begin a call of a tool; return its result if it is known at once, None if the sample waits."""
        if self.replaying:
            return None
        if sample.group.step is not None:
            self.runner.tools.place, self.runner.tools.step = trajectories_of(sample.group.step), sample.group.step
        call = self.runner.tools.call(sample, sample.trajectory, request, sample.job.question)
        return None if call.result is None else self._store_result(call, call.result)

    def tool_results(self, wait: bool = False) -> list[tuple[Sample, object]]:
        """Return the samples whose calls of tools have ended, with the results. It waits for one if nothing else is in
        progress, or if `wait` is set."""
        wait = wait or (self.writer.idle and not self.asked and self.search is None)
        ended = self.runner.tools.ended(wait)
        return [(call.owner, self._store_result(call, call.result)) for call in ended if call.result is not None]

    def _store_result(self, call: Call, result: Result) -> Result:
        """Put a call of a tool on its trajectory; return its result, cut to the tool's limit."""
        limit = self.runner.tools.limit(call.name)
        try:
            text = self.runner.renderer.cut_text(result.text, None if limit is None else limit * self.runner.unit)
            call.result = Result(text, result.error)
        except UserError:
            call.result = Result("The tool returned a text that the tokenizer cannot encode.", True)
        return self.note_tool(call.owner, call.record())

    def note_tool(self, sample: Sample, record: dict[str, Any]) -> Result:
        """Put the record of a tool call on the trajectory and into the log; return its result."""
        self.log_reply(sample, record)
        sample.trajectory.tools.append(record)
        self.clock.tool_calls += 1
        self.clock.tool_errors += record["error"]
        self.clock.noisy_tool_calls += record.get("noisy", False)
        return Result(record["text"], record["error"])

    def _retriever(self) -> Retriever:
        if self.runner.retriever is None:
            raise UserError(
                f"{self.runner.system.name} searches, but there is no index or server; set retrieval.index or "
                "retrieval.url"
            )
        return self.runner.retriever

    def _advance(self, sample: Sample, reply: object) -> list[str]:
        """Send `reply` to the episode and serve its requests. Return a list of the one query that it waits for, or an
        empty list."""
        renderer = self.runner.renderer
        while True:
            try:
                growth = sample.growth
                request: Request = sample.episode.send(reply) if growth is None else growth.send(sample.episode, reply)
            except StopIteration as stop:
                self._end(sample, stop.value or "ended")
                return []
            reply = None
            if isinstance(request, Search):
                if request.among is None:
                    return [request.query]
                reply = hits = rank_in_context(request.among, request.query, renderer.k)
                self._note(sample, request.query, hits)
                continue
            if isinstance(request, Generate):
                self._note_node(sample)
                self._open_turn(sample, request)
                return []
            if isinstance(request, Tool):
                if (reply := self._begin_tool(sample, request)) is None:
                    return []
                continue
            if isinstance(request, SubCall):
                self._call(sample, request)
                return []
            if isinstance(request, Fold):
                if not self._fold(sample, request.context):
                    return []
                continue
            if isinstance(request, Score):
                self._score(sample, request)
                return []
            if isinstance(request, SpawnBranches):
                for name, branch in request.branches.items():
                    if name in sample.pending or CALL.fullmatch(name) or name == "fold":
                        raise UserError(
                            f"{self.runner.system.name} names a branch {shown(name)}; expected an unused name: "
                            'calls are named "call 1", "call 2", .., and a fold "fold"'
                        )
                    sample.pending[name] = (branch, self._context(sample, branch), request.trained)
                continue
            if isinstance(request, Retrieved):
                ids, cut = renderer.retrieved(request)
                segment = Segment(Source.RETRIEVED, ids, edges=renderer.edges(request))
                self.clock.cut_search_tokens += cut
            elif isinstance(request, Feedback):
                segment = Segment(Source.FEEDBACK, renderer.feedback(request), edges=renderer.edges(request))
            else:
                raise TypeError(
                    f"{self.runner.system.name} yielded {request!r}, which is not a request that may follow the prompt"
                )
            if sample.length + len(segment.ids) >= self.runner.limits.max_context:
                self._end(sample, "context")
                return []
            sample.trajectory.segments.append(segment)
            sample.length += len(segment.ids)
            sample.lead = b""
            self.writer.append(sample, segment.ids)

    def _note_node(self, sample: Sample) -> None:
        """Record the end of a sample's own turn as a node of its tree, if another turn may follow."""
        if (growth := sample.growth) is None or self._room(sample)[0] <= 0:
            return
        written = sum(1 for _ in turns(sample.trajectory))
        if written <= (sample.trajectory.forked or (0, 0))[1]:
            return
        state = copied(sample, trajectory=copied(sample.trajectory), growth=None)
        prompt = SharedPrompt(present_ids(sample.trajectory))
        growth.tree.nodes.append(Node(sample.job.sample, written, state, prompt, tuple(growth.exchanges)))

    def _open_turn(self, sample: Sample, request: Generate) -> None:
        """Begin a turn of the policy, if the limits leave a token for it."""
        room, limit = self._room(sample)
        if room <= 0:
            self._end(sample, limit)
            return
        if request.max_tokens is not None and request.max_tokens < 1:
            raise UserError(
                f"{self.runner.system.name} asks for a turn of {request.max_tokens} tokens; expected max_tokens of at "
                "least 1, or none"
            )
        most = room + 1 if request.max_tokens is None else request.max_tokens * self.runner.unit
        sample.room, sample.limit = (room, limit) if most > room else (most, None)
        sample.trajectory.segments.append(Segment(Source.POLICY, []))
        self.writer.begin_turn(sample, request.stop, sample.lead)

    def _room(self, sample: Sample) -> tuple[int, str]:
        """Return the number of tokens that the limits leave for a turn, and the name of the tightest limit."""
        limits = self.runner.limits
        return min(
            (limits.max_turn_tokens, "turn_tokens"),
            (limits.max_policy_tokens - sample.policy_tokens, "tokens"),
            (limits.max_context - sample.length, "context"),
            key=itemgetter(0),
        )


def ids_by_turns(trajectory: Trajectory) -> Int32s:
    """Return a trajectory's ids, with TURN_END after each turn."""
    ids: list[int] = []
    for segment in trajectory.segments:
        ids += segment.ids
        if segment.source is Source.POLICY:
            ids.append(TURN_END)
    return np.array(ids, np.int32)
