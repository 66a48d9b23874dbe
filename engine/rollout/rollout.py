"""Rollout: many episodes at once, each a sequence of the decoder (engine/decoding/decoder.py).

An episode asks for turns, searches and text of the engine's. A turn goes to the decoder, which writes all sequences
side by side; when it has ended, its text goes to the episode, whose next request is served at once. Searches that are
asked at one step are one call of the retriever; where a server answers it, the others go on writing meanwhile.

Branches of a trajectory are episodes of their own, begun when it has ended; so are its calls, for which it waits. A
caller gives its place in the decoder up meanwhile, so that callers cannot take all places and wait for ever.

What makes a sample independent of the others: its noise is a function of its own seed and position, and the decoder's
sequences are independent of each other. When a server answers decides nothing but who shares a forward.

One sample from here: `begin_samples` makes its episode, `_advance` serves its requests, `_open_turn` hands a turn to
the decoder, and `_take` puts what was written on the trajectory. What happens between the two is decoder.py's.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from random import Random

import numpy as np

from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.decoding.decoder import DecodeClock
from thresher.engine.decoding.decoder_cuda import make_decoder
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.engine.decoding.speculative import TURN_END, Int32s, Speculate
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Feedback,
    Generate,
    KeptSpan,
    Prompt,
    Request,
    Retrieved,
    Search,
    SpawnBranches,
    SubCall,
    System,
    Turn,
    first_prompt,
)
from thresher.engine.protocol.prompts import Renderer, fit, truncate_passages
from thresher.engine.protocol.trajectory import Segment, Trajectory, turns
from thresher.kernels.attention.backends.choice import Backend
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.indexes.given import rank_given
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit, Retriever
from thresher.retrieval.serving.background import Background
from thresher.rewards.tags import escape_tags
from thresher.rewards.transcript import Source

REMEMBERED = 20_000  # trajectories, of different questions, that drafts are looked up in


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens. max_turn_tokens: one turn; max_policy_tokens: all turns together; max_context: the whole trajectory;
    kv_tokens: keys and values held at once (None: `max_running` whole contexts). When they are full, the youngest
    samples wait. attention: the backend that was chosen. share_prefix, reuse, speculate: see Decoder; none changes a
    result where the BLAS is batch-invariant."""

    max_turn_tokens: int
    max_policy_tokens: int
    max_context: int
    max_running: int
    page_size: int = 64
    kv_tokens: int | None = None
    attention: Backend = "torch"
    share_prefix: bool = True
    reuse: bool = True
    speculate: Speculate = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One sample to draw: jobs with the same `group` answer the same question and share its prompt."""

    question: Question
    group: int
    sample: int
    seed: int


def seed_of(*parts: object) -> int:
    """63 bits that depend on all parts, the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


@dataclass(slots=True)
class RolloutClock(DecodeClock):
    """Where the time of a rollout went, in seconds, and how much was done. cut_search_tokens: of retrieved passages,
    beyond the budget of a search."""

    search: float = 0.0
    search_queries: int = 0
    search_calls: int = 0
    cut_search_tokens: int = 0
    branches: int = 0
    branches_without_room: int = 0

    @property
    def rest(self) -> float:
        """As of a decoder, and not spent in searches; 0 where a search passed while the GPU was decoding."""
        return max(self.total - self.decode - self.prefill - self.search, 0.0)


@dataclass(slots=True)
class Sample:
    """A sample that is under way. Its sequence is what the decoder knows of it."""

    job: Job
    episode: Episode
    trajectory: Trajectory
    sequence: TokenSequence
    policy_tokens: int = 0
    max_tokens: int | None = None  # of the turn, where its episode says so
    forks: dict[str, tuple[BranchPrompt, list[int]]] = field(default_factory=dict)  # branches, with their contexts
    reported: bool = True  # to whoever watches; a branch is not
    calls: int = 0
    caller: "tuple[Sample, str] | None" = None  # who waits for it, and its name there


class Rollout:
    """Makes trajectories with one policy. Reusable; the cache's contents are not kept, on CUDA its memory neither."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        retriever: Retriever | None,
        system: System,
        tools: EpisodeConfig,
        renderer: Renderer,
        limits: Limits,
        shuffle: bool = False,
    ) -> None:
        self.policy, self.tokenizer, self.retriever = policy, tokenizer, retriever
        self.system, self.tools, self.renderer, self.limits = system, tools, renderer, limits
        self.shuffle = shuffle
        self.decoder = make_decoder(
            policy,
            tokenizer,
            limits.attention,
            num_blocks=self.blocks_for(limits),
            page_size=limits.page_size,
            max_running=limits.max_running,
            reuse=limits.reuse,
            share_prefix=limits.share_prefix,
            speculate=limits.speculate,
        )
        self.clock = RolloutClock()
        self._written: OrderedDict[str, Int32s] = (
            OrderedDict()
        )  # by question: the last trajectory, which may come again

    @staticmethod
    def blocks_for(limits: Limits) -> int:
        """Blocks of the cache: those of kv_tokens, or `max_running` samples of the whole context; and block 0."""
        a_context = -(-limits.max_context // limits.page_size)
        if limits.kv_tokens is None:
            return 1 + limits.max_running * a_context
        return 1 + max(limits.kv_tokens // limits.page_size, a_context)

    def run(
        self,
        jobs: Sequence[Job],
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
        recall: bool = False,
    ) -> list[Trajectory]:
        """Draw every job's trajectory; returned in the order of the jobs. Temperature 0 is greedy.

        `on_progress` is called with the number of trajectories that have ended since the last call. recall: look drafts
        up in what earlier calls wrote for the same questions, as where a dev set is evaluated again. Not in training:
        with a BLAS that is not batch-invariant a run that was resumed would have other last bits without them.
        """
        self.clock = RolloutClock()
        started = time.perf_counter()
        self.decoder.begin(self.limits.max_context, self.clock)
        recall = recall and bool(self.decoder.speculate)
        run = _Run(self, temperature, on_progress, recall)
        groups: dict[int, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.group, []).append(job)
        samples = [
            sample
            for members in groups.values()
            for sample in run.begin_samples(members, SharedPrompt(self.prompt(members[0].question)), self._episode)
        ]
        with console.stage("rollout", len(samples)) as line:
            run.finish(samples, line)
        self.decoder.end()
        self.clock.total = time.perf_counter() - started
        for sample in samples if recall else ():
            self._written[sample.job.question.id] = ids_by_turns(sample.trajectory)
            self._written.move_to_end(sample.job.question.id)
        while len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        done = {(sample.job.group, sample.job.sample): sample.trajectory for sample in samples}
        return [done[job.group, job.sample] for job in jobs]

    def written_before(self, question: Question) -> Int32s | None:
        """The last trajectory of this question, if there was one: what its next may repeat."""
        return self._written.get(question.id)

    def _episode(self, job: Job) -> Episode:
        return self.system.episode(job.question, self.tools)

    def prompt(self, question: Question, room: int = 0) -> list[int]:
        """The ids of a question's prompt. UserError if they, and `room` tokens more, leave none in the context."""
        ids = self.renderer.prompt(first_prompt(self.system, question, self.tools))
        if len(ids) + room + 1 > self.limits.max_context:
            and_passages = f" and passages of up to {room}" if room else ""
            raise UserError(
                f"question {question.id}: its prompt of {len(ids)} tokens{and_passages} leaves no room in a context "
                f"of {self.limits.max_context}; raise rollout.max_context or shorten the template"
            )
        return ids

    def check_prompts(self, questions: Iterable[Question]) -> None:
        """`prompt` of all questions, before a run begins: of those alone that might not fit, a token being at least
        one byte. Passages that are still to be retrieved are taken to fill their budget."""
        around: dict[str, int] = {}  # the tokens of a template without a question
        budget = self.renderer.max_passage_tokens if self.system.given_passages else 0
        for question in questions:
            request = first_prompt(self.system, question, self.tools)
            if request.template not in around:
                around[request.template] = len(self.renderer.prompt(Prompt(request.template, "")))
            longest = len(escape_tags(request.question, self.system.tags).encode("utf-8", "surrogatepass")) + budget
            if around[request.template] + longest + 1 > self.limits.max_context:
                (shown,) = truncate_passages([question], self.system, self.tools, self.renderer).questions
                self.prompt(shown, room=0 if question.passages else budget)


class _Run:
    """One call of `Rollout.run`: the samples that are under way."""

    def __init__(
        self, rollout: Rollout, temperature: float, on_progress: Callable[[int], None] | None, recall: bool
    ) -> None:
        self.recall = recall
        self.rollout, self.decoder, self.clock = rollout, rollout.decoder, rollout.clock
        self.draw, self.on_progress = SamplingParams(temperature=temperature), on_progress
        self.samples: dict[TokenSequence, Sample] = {}
        self.branches: list[tuple[Trajectory, str, Trajectory]] = []  # owner, name, branch
        self.searches: deque[tuple[Future[list[list[Hit]]], list[tuple[Sample, str]]]] = deque()
        self.called: list[tuple[Sample, object]] = []  # callers, with the turns that they waited for
        self.ended = 0
        self.searcher: Background[list[list[Hit]]] | None = None  # once a server searches

    def begin_samples(
        self, jobs: Iterable[Job], prompt: SharedPrompt, make_episode: Callable[[Job], Episode]
    ) -> list[Sample]:
        """Samples of one prompt, each at its episode's start."""
        samples = []
        for job in jobs:
            episode = make_episode(job)
            next(episode)  # its Prompt, which has been rendered already
            trajectory = Trajectory(job.question.id, job.group, job.sample, [Segment(Source.PROMPT, list(prompt.ids))])
            sequence = TokenSequence(prompt, job.seed, self.draw)
            if self.recall:
                sequence.earlier = self.rollout.written_before(job.question)
            samples.append(Sample(job, episode, trajectory, sequence))
        return samples

    def finish(self, samples: list[Sample], line: console.Line) -> None:
        """Step until all of them, and the branches that they ask for, have ended; `line` says how far it is."""
        with ExitStack() as self.open:
            self._serve([(sample, None) for sample in samples])
            while self.searches or not self.decoder.idle:
                if self.searches and (self.decoder.idle or self.searches[0][0].done()):
                    self._wait()
                    continue
                ended = [self.samples.pop(sequence) for sequence in self.decoder.step()]
                self._serve([(sample, turn) for sample in ended if (turn := self._take(sample)) is not None])
                line.at(self.ended, self._so_far)
        for owner, name, branch in self.branches:
            owner.branches[name] = branch

    def _so_far(self) -> str:
        return f"{self.clock.sampled_tokens:,} tokens, {self.clock.search_queries:,} searches"

    def _take(self, sample: Sample) -> Turn | None:
        """Put the turn that has ended on the trajectory; None if a limit ended it, and the trajectory with it."""
        sequence, segment, limits = sample.sequence, sample.trajectory.segments[-1], self.rollout.limits
        segment.ids.extend(sequence.turn_ids)
        segment.logprobs.extend(sequence.logprobs)
        sample.policy_tokens += len(segment.ids)
        if sequence.finish == "length" and len(segment.ids) != sample.max_tokens:
            if len(segment.ids) >= limits.max_turn_tokens:
                self._end(sample, "turn_tokens")
            else:
                self._end(sample, "tokens" if sample.policy_tokens >= limits.max_policy_tokens else "context")
            return None
        if sequence.hit is not None:
            segment.stop, segment.trailing = sequence.hit.tag, len(sequence.hit.trailing)
        lead = self._trailing(sample.trajectory.segments[-2])  # the prompt at least; `segment` is the last
        return Turn(lead + self.rollout.tokenizer.decode_bytes(segment.ids), segment.stop)

    def _trailing(self, segment: Segment) -> bytes:
        """What the segment's last token holds behind the stop tag that ended it: it opens the next turn's text."""
        if not segment.trailing:
            return b""
        return self.rollout.tokenizer.decode_bytes(segment.ids[-1:])[-segment.trailing :]

    def _end(self, sample: Sample, reason: str) -> None:
        sample.trajectory.reason = reason
        sample.episode.close()
        self.decoder.release(sample.sequence, keep=bool(sample.forks))
        if sample.forks:
            self._branch(sample)
        if sample.caller is not None:
            caller, name = sample.caller
            caller.trajectory.branches[name] = sample.trajectory
            turn = next(turns(sample.trajectory), Segment(Source.POLICY, []))
            self.called.append((caller, Turn(self.rollout.tokenizer.decode_bytes(turn.ids), turn.stop)))
        self.ended += sample.reported
        if self.on_progress is not None and sample.reported:
            self.on_progress(1)

    def _branch(self, sample: Sample) -> None:
        """Begin the branches of a trajectory that has ended. What they share with it is still in the cache, mostly."""
        for name, (branch, ids) in sample.forks.items():
            if len(ids) + 1 > self.rollout.limits.max_context:
                self.clock.branches_without_room += 1
                continue
            self.clock.branches += 1
            job = Job(sample.job.question, len(self.branches), 0, branch_seed(sample.job.seed, name))
            (begun,) = self.begin_samples([job], SharedPrompt(ids), partial(branch_episode, branch))
            begun.reported = False
            self.branches.append((sample.trajectory, name, begun.trajectory))
            self._serve([(begun, None)])

    def _written(self, sample: Sample) -> list[int]:
        return [token for turn in turns(sample.trajectory) for token in turn.ids]

    def _call(self, sample: Sample, context: BranchPrompt) -> None:
        """Begin a call; the sample goes on when it has ended."""
        context, cut = with_truncated_passages(context, self.rollout.renderer, sample.job.question.id)
        self.clock.cut_search_tokens += cut
        ids = context_ids(context, self._written(sample), self.rollout.renderer)
        if len(ids) + 1 > self.rollout.limits.max_context:
            self._end(sample, "context")
            return
        sample.calls += 1
        name = f"call {sample.calls}"
        self.decoder.release(sample.sequence, keep=True)
        job = Job(sample.job.question, sample.job.group, sample.job.sample, branch_seed(sample.job.seed, name))
        (begun,) = self.begin_samples([job], SharedPrompt(ids), partial(branch_episode, context))
        begun.reported, begun.caller = False, (sample, name)
        self._advance(begun, None)

    def _advance_all(self, ready: "Sequence[tuple[Sample, object]]") -> list[tuple[Sample, str]]:
        """Who waits for a search, and with which query; those whose calls have ended go on with the others."""
        waiting: list[tuple[Sample, str]] = []
        pending = [*ready, *self.called]
        self.called = []
        while pending:
            waiting += [(sample, query) for sample, answer in pending for query in self._advance(sample, answer)]
            pending, self.called = self.called, []
        return waiting

    def _serve(self, ready: "Sequence[tuple[Sample, object]]") -> None:
        """Answer the episodes' requests until each writes, ends or waits for a search; then search for all at once.
        Where a server searches, the others go on writing meanwhile."""
        while waiting := self._advance_all(ready):
            self.clock.search_queries += len(waiting)
            self.clock.search_calls += 1
            retriever, queries = self._retriever(), [query for _, query in waiting]
            if retriever.elsewhere:
                if self.searcher is None:
                    self.searcher = self.open.enter_context(Background[list[list[Hit]]]())
                search = self.searcher.submit(partial(retriever.search, queries, self.rollout.renderer.k))
                self.searches.append((search, waiting))
                return
            started = time.perf_counter()
            found = retriever.search(queries, self.rollout.renderer.k)
            self.clock.search += time.perf_counter() - started
            ready = self._found(waiting, found)

    def _wait(self) -> None:
        """For the search that was asked first; then its episodes go on."""
        started = time.perf_counter()
        search, waiting = self.searches.popleft()
        found = search.result()
        self.clock.search += time.perf_counter() - started
        self._serve(self._found(waiting, found))

    def _found(self, waiting: "Sequence[tuple[Sample, str]]", found: list[list[Hit]]) -> list[tuple[Sample, object]]:
        for (sample, query), hits in zip(waiting, found, strict=True):
            self._note(sample, query, hits)
        return [(sample, hits) for (sample, _), hits in zip(waiting, found, strict=True)]

    def _note(self, sample: Sample, query: str, hits: list[Hit]) -> None:
        if self.rollout.shuffle:
            Random(f"{sample.job.seed} {len(sample.trajectory.searches)}").shuffle(hits)
        sample.trajectory.searches.append({"query": query, "passages": [hit.passage.id for hit in hits]})

    def _retriever(self) -> Retriever:
        if self.rollout.retriever is None:
            raise UserError(
                f"{self.rollout.system.name} searches, and there is nowhere to; set retrieval.index or retrieval.url"
            )
        return self.rollout.retriever

    def _advance(self, sample: Sample, answer: object) -> list[str]:
        """Send `answer` to the episode and serve what it asks for; a list of the one query it waits for, or empty."""
        trajectory, sequence = sample.trajectory, sample.sequence
        while True:
            try:
                request: Request = sample.episode.send(answer)
            except StopIteration as stop:
                self._end(sample, stop.value or "ended")
                return []
            answer = None
            if isinstance(request, Search):
                if request.among is None:
                    return [request.query]
                answer = hits = rank_given(request.among, request.query, self.rollout.renderer.k)
                self._note(sample, request.query, hits)
                continue
            if isinstance(request, Generate):
                self._open_turn(sample, request)
                return []
            if isinstance(request, SubCall):
                self._call(sample, request.context)
                return []
            if isinstance(request, SpawnBranches):
                for name, branch in request.branches.items():
                    ids = context_ids(branch, self._written(sample), self.rollout.renderer)
                    sample.forks[name] = (branch, ids)
                continue
            if isinstance(request, Retrieved):
                ids, cut = self.rollout.renderer.retrieved_and_cut(request)
                segment = Segment(Source.RETRIEVED, ids)
                self.clock.cut_search_tokens += cut
            elif isinstance(request, Feedback):
                segment = Segment(Source.FEEDBACK, self.rollout.renderer.feedback(request))
            else:
                raise TypeError(
                    f"{self.rollout.system.name} yielded {request!r}, which is no request that may follow the prompt"
                )
            if len(sequence.ids) + len(segment.ids) >= self.rollout.limits.max_context:
                self._end(sample, "context")
                return []
            trajectory.segments.append(segment)
            self.decoder.append(sequence, segment.ids)

    def _open_turn(self, sample: Sample, request: Generate) -> None:
        """Begin a turn of the policy, if the limits leave it a token."""
        limits = self.rollout.limits
        policy_room = limits.max_policy_tokens - sample.policy_tokens
        context_room = limits.max_context - len(sample.sequence.ids)
        if policy_room <= 0 or context_room <= 0:
            self._end(sample, "tokens" if policy_room <= 0 else "context")
            return
        lead = self._trailing(sample.trajectory.segments[-1])
        sample.trajectory.segments.append(Segment(Source.POLICY, []))
        self.samples[sample.sequence] = sample
        sample.max_tokens = request.max_tokens
        room = min(limits.max_turn_tokens, policy_room, context_room, request.max_tokens or limits.max_turn_tokens)
        self.decoder.begin_turn(sample.sequence, request.stop, room, lead)


def ids_by_turns(trajectory: Trajectory) -> Int32s:
    """A trajectory's ids, with the ends of its turns."""
    ids: list[int] = []
    for segment in trajectory.segments:
        ids += segment.ids
        if segment.source is Source.POLICY:
            ids.append(TURN_END)
    return np.array(ids, np.int32)


# --- Branches: contexts of their own, in which the policy writes once more; and calls, which their caller waits for
#
# A masked part is absent from a branch's input, and nothing that was computed from it is used: a branch may share the
# trajectory's cached blocks up to the first token in which the two differ, and computes all that follows. So a branch
# is an ordinary sample with its own prompt: the prompt's template, the kept part of the policy's text, and text of the
# engine's. All of it is PROMPT there; only what the policy then writes is POLICY.


def context_ids(branch: BranchPrompt, written: Sequence[int], renderer: Renderer) -> list[int]:
    """The ids of a branch's context; `written` are all tokens that the policy sampled before the fork."""
    ids = renderer.prompt(branch.prompt)
    for part in branch.parts:
        if isinstance(part, KeptSpan):
            ids += kept_ids(part, written, renderer.tokenizer)
        elif isinstance(part, Retrieved):
            ids += renderer.retrieved(part)
        else:
            ids += renderer.tokenizer.encode_template(part)
    return ids


def with_truncated_passages(context: BranchPrompt, renderer: Renderer, question_id: str) -> tuple[BranchPrompt, int]:
    """A call's context, the passages of its prompt cut to the budget of a search; and how many tokens of all its
    passages that budget costs."""
    asked = context.prompt.passages
    passages = fit(asked, renderer, question_id)
    cut = len(renderer.passages(asked)) - len(renderer.passages(passages))
    cut += sum(renderer.retrieved_and_cut(part)[1] for part in context.parts if isinstance(part, Retrieved))
    return replace(context, prompt=replace(context.prompt, passages=passages)), cut


def kept_ids(kept: KeptSpan, written: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Tokens of `written` between two of its bytes: whole where they lie inside, else one token for each byte kept."""
    ids, start = [], 0
    for token in written:
        text = tokenizer.token_bytes(token)
        end = start + len(text)
        if kept.start <= start and end <= kept.end:
            ids.append(token)
        elif inside := text[max(kept.start - start, 0) : max(kept.end - start, 0)]:
            ids += tokenizer.byte_ids(inside)
        start = end
    return ids


def branch_episode(branch: BranchPrompt, _: Job) -> Episode:
    yield branch.prompt  # rendered already, with what was kept
    turn = yield Generate(branch.stop, branch.max_tokens)
    return "ended" if turn.stop is None else "answered"


def branch_seed(seed: int, name: str) -> int:
    """The noise of a branch is its own: 63 bits that depend on the trajectory's seed and the branch's name."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest()) >> 1
