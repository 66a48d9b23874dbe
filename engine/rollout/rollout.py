"""Rollout: many episodes at once, one forward at a time (continuous batching).

Every step feeds each running sample what it has not yet seen: one sampled token, or a prompt, or a passage that came
back. All of it goes through one forward of the policy, whose new keys and values land in the cache's blocks. Samples
that are due then draw a token; a turn that ends hands its text to the episode, whose next request is served at once,
except that searches are gathered, so that all waiting episodes share one call of the retriever.

The samples of one question share the blocks of their prompt, which is prefilled once.

What makes a sample independent of the batch's composition: its noise is a function of its own seed and position; the
forward is batch-invariant (CPU, float32; kernels/matmul.py says where); a long input is cut into chunks by its own
length; a running sample is never evicted; searches join at the step in which they were asked.

One sample from here: `_admit` begins its episode (scheduler.py says when), `_advance` opens a turn, and until the turn
ends each step runs `_forward` (kv_cache.py, then the policy: its model, kernels/layers.py, kernels/attention.py),
`_sample` (kernels/sampling.py) and `_take`, which records the id and its log-prob (stop_tags.py finds the turn's end).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from thresher.engine.episode import (
    Episode,
    Feedback,
    Fork,
    Generate,
    Prompt,
    Request,
    Retrieved,
    Search,
    System,
    Tools,
    Turn,
    first_prompt,
)
from thresher.engine.protocol.passages import fit_passages
from thresher.engine.protocol.render import Renderer
from thresher.engine.protocol.trajectory import Segment, Trajectory, turns
from thresher.engine.rollout.branches import branch_episode, branch_seed, context_ids
from thresher.engine.rollout.kv_cache import BlockPool, BlockTable, ForwardBatch, PagedKV, PagedStep
from thresher.engine.rollout.samples import Job, PrefillGroup, Sample
from thresher.engine.rollout.scheduler import Group, Scheduler
from thresher.engine.rollout.stop_tags import TagMatcher
from thresher.kernels import sampling
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Retriever
from thresher.rewards.errors import UserError
from thresher.rewards.tags import escape_tags
from thresher.rewards.transcript import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens. max_turn_tokens: one turn; max_policy_tokens: all turns together; max_context: the whole trajectory."""

    max_turn_tokens: int
    max_policy_tokens: int
    max_context: int
    max_running: int
    page_size: int = 16


@dataclass(slots=True)
class RolloutClock:
    """Where the time of a rollout went, in seconds, and how much was done."""

    decode: float = 0.0
    prefill: float = 0.0
    search: float = 0.0
    host: float = 0.0
    total: float = 0.0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0
    forwards: int = 0
    search_queries: int = 0
    search_calls: int = 0
    branches: int = 0
    branches_without_room: int = 0


class Rollout:
    """Generates trajectories with one policy. Reusable; the cache's memory is kept, its contents are not."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer,
        retriever: Retriever | None,
        system: System,
        tools: Tools,
        renderer: Renderer,
        limits: Limits,
        shuffle: bool = False,
    ) -> None:
        self.policy, self.tokenizer, self.retriever = policy, tokenizer, retriever
        self.system, self.tools, self.renderer, self.limits = system, tools, renderer, limits
        self.shuffle = shuffle
        self.num_blocks = self.blocks_for(limits)
        self.cache = PagedKV(policy.config, self.num_blocks, limits.page_size, policy.dtype, policy.device)
        self.eos_ids = frozenset(policy.config.eos_token_ids)
        self._matchers: dict[tuple[str, ...], TagMatcher] = {}
        self.clock = RolloutClock()

    @staticmethod
    def blocks_for(limits: Limits) -> int:
        """Blocks of the cache: `max_running` samples of the whole context, each with its own prompt, and block 0."""
        return 1 + limits.max_running * (-(-limits.max_context // limits.page_size) + 1)

    @torch.no_grad()
    def run(
        self, jobs: Sequence[Job], temperature: float, on_progress: Callable[[int], None] | None = None
    ) -> list[Trajectory]:
        """Draw every job's trajectory; returned in the order of the jobs. Temperature 0 is greedy.

        `on_progress` is called with the number of trajectories that have ended since the last call.
        """
        self.clock = RolloutClock()
        started = time.perf_counter()
        prefills: dict[int, PrefillGroup] = {}
        for job in jobs:
            if job.group not in prefills:
                prefills[job.group] = PrefillGroup(self.prompt(job.question), [], self._begin)
            prefills[job.group].jobs.append(job)
        run = _Run(self, prefills, temperature)
        done = run.finish(on_progress)
        if run.forked:
            self._branch(run.forked, temperature)
        self.clock.total = time.perf_counter() - started
        self.clock.host = self.clock.total - self.clock.decode - self.clock.prefill - self.clock.search
        return [done[job.group, job.sample] for job in jobs]

    def _begin(self, job: Job) -> Episode:
        return self.system.episode(job.question, self.tools)

    def _branch(self, forked: Sequence[Sample], temperature: float) -> None:
        """Write the branches of trajectories that have ended, all in one run of their own, and hang them on."""
        prefills: dict[int, PrefillGroup] = {}
        owners: list[tuple[Trajectory, str]] = []
        for sample in forked:
            for name, (branch, ids) in sample.forks.items():
                if len(ids) + 1 > self.limits.max_context:
                    self.clock.branches_without_room += 1
                    continue
                number = len(owners)
                job = Job(sample.job.question, number, 0, branch_seed(sample.job.seed, name))
                prefills[number] = PrefillGroup(ids, [job], partial(branch_episode, branch))
                owners.append((sample.trajectory, name))
        self.clock.branches += len(owners)
        done = _Run(self, prefills, temperature).finish(None)
        for number, (trajectory, name) in enumerate(owners):
            trajectory.branches[name] = done[number, 0]

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
                (shown,) = fit_passages([question], self.system, self.tools, self.renderer).questions
                self.prompt(shown, room=0 if question.passages else budget)

    def matcher(self, stop: tuple[str, ...]) -> TagMatcher:
        if stop not in self._matchers:
            self._matchers[stop] = TagMatcher(self.tokenizer, stop)
        return self._matchers[stop]


class _Run:
    """One call of `Rollout.run`: who is waiting, who is running, and the blocks they own."""

    def __init__(self, rollout: Rollout, prefills: dict[int, PrefillGroup], temperature: float) -> None:
        self.rollout, self.prefills, self.temperature, self.clock = rollout, prefills, temperature, rollout.clock
        self.pool = BlockPool(rollout.num_blocks, rollout.limits.page_size)
        self.forked: list[Sample] = []  # samples that have ended and asked for branches
        groups = [
            Group(number, len(prefill.ids), deque(range(len(prefill.jobs))))
            for number, prefill in self.prefills.items()
        ]
        self.scheduler = Scheduler(groups, self.pool, rollout.limits.max_running, rollout.limits.max_context)
        self.running: list[tuple[Group, int, Sample]] = []

    def finish(self, on_progress: Callable[[int], None] | None) -> dict[tuple[int, int], Trajectory]:
        """Step until every job has ended; (group, sample) -> trajectory."""
        done: dict[tuple[int, int], Trajectory] = {}
        while not self.scheduler.idle:
            self._admit()
            self._forward()
            self._sample()
            ended = [entry for entry in self.running if entry[2].trajectory.reason]
            for group, member, sample in ended:
                self.pool.release(sample.table)
                done[sample.job.group, sample.job.sample] = sample.trajectory
                if sample.forks:
                    self.forked.append(sample)
                if self.scheduler.finish(group, member):
                    self.pool.release(self.prefills[group.number].table)
            if ended:
                self.running = [entry for entry in self.running if not entry[2].trajectory.reason]
                if on_progress is not None:
                    on_progress(len(ended))
        return done

    def _admit(self) -> None:
        admitted: list[Sample] = []
        for group, member in self.scheduler.admit():
            prefill = self.prefills[group.number]
            job = prefill.jobs[member]
            episode = prefill.begin(job)
            next(episode)  # the prompt, which the prefill holds
            trajectory = Trajectory(job.question.id, job.group, job.sample, [Segment(Source.PROMPT, prefill.ids)])
            sample = Sample(job, episode, trajectory, BlockTable(), length=len(prefill.ids))
            self.running.append((group, member, sample))
            admitted.append(sample)
        self._serve([(sample, None) for sample in admitted])

    def _forward(self) -> None:
        """Feed everything that is pending: new prompts, appended passages, the tokens sampled a step ago."""
        started = time.perf_counter()
        batch = ForwardBatch[Sample | PrefillGroup](self.pool)
        for prefill in {group.number: self.prefills[group.number] for group, _, _ in self.running}.values():
            if prefill.hidden_H is None:
                batch.add(prefill, prefill.table, prefill.ids[prefill.table.length :])
        for _, _, sample in self.running:
            if sample.pending and sample.table.blocks:
                sample.pending = batch.add(sample, sample.table, sample.pending)
        decoded = sum(len(item.ids) == 1 for item in batch.items)
        rows = sum(len(item.ids) for item in batch.items)
        if batch.items:
            self.rollout.cache.copy(batch.block_copies)
            step = PagedStep(self.rollout.cache, batch.items)
            hidden_TH = self.rollout.policy.hidden(step.ids_T, step.positions_T, step)
            last_BH = hidden_TH[step.last_rows]  # a copy: rows of hidden_TH itself would keep all of it alive
            for owner, hidden_H in zip(batch.owners, last_BH, strict=True):
                complete = not owner.pending if isinstance(owner, Sample) else owner.table.length == len(owner.ids)
                owner.hidden_H = hidden_H if complete else None
            self.clock.forwards += 1
        for group, _, sample in self.running:
            prefill = self.prefills[group.number]
            if not sample.table.blocks and prefill.table.length == len(prefill.ids):
                sample.table = self.pool.fork(prefill.table)
                sample.hidden_H = prefill.hidden_H
                self.clock.shared_tokens += len(prefill.ids)
        # A forward that decodes and prefills at once is shared out by rows.
        seconds = time.perf_counter() - started
        self.clock.decode += seconds * decoded / max(rows, 1)
        self.clock.prefill += seconds * (rows - decoded) / max(rows, 1)
        self.clock.prefilled_tokens += rows - decoded

    def _sample(self) -> None:
        """One token for every sequence that is writing and has nothing pending; then serve the turns that ended."""
        due = [
            sample
            for _, _, sample in self.running
            if sample.turn is not None and not sample.pending and sample.hidden_H is not None
        ]
        if not due:
            return
        started = time.perf_counter()
        hidden_BH = torch.stack([one.hidden_H for one in due if one.hidden_H is not None])  # of all: for the type
        logits_BV = sampling.head_logits(hidden_BH, self.rollout.policy.head_VH[: self.rollout.tokenizer.vocab_size])
        ids_B, logprobs_B = sampling.sample(
            logits_BV, [sample.job.seed for sample in due], [sample.length for sample in due], self.temperature
        )
        ids, logprobs = ids_B.tolist(), logprobs_B.tolist()
        self.clock.decode += time.perf_counter() - started
        self.clock.sampled_tokens += len(due)
        ended: list[tuple[Sample, Turn | None]] = []
        for sample, token, logprob in zip(due, ids, logprobs, strict=True):
            turn = self._take(sample, token, logprob)
            if turn is not None:
                ended.append((sample, turn))
        self._serve(ended)

    def _take(self, sample: Sample, token: int, logprob: float) -> Turn | None:
        """Put a sampled token on the trajectory; the finished turn if it ended one."""
        segment = sample.turn
        assert segment is not None
        segment.ids.append(token)
        segment.logprobs.append(logprob)
        sample.pending = [token]
        sample.length += 1
        sample.policy_tokens += 1
        matcher = self.rollout.matcher(sample.stop)
        sample.matcher_state, hit = matcher.step(sample.matcher_state, token)
        if hit is not None:
            segment.stop, segment.trailing = hit.tag, len(hit.trailing)
        elif token not in self.rollout.eos_ids:
            if len(segment.ids) >= self.rollout.limits.max_turn_tokens:
                sample.trajectory.reason = "turn_tokens"
            elif sample.policy_tokens >= self.rollout.limits.max_policy_tokens:
                sample.trajectory.reason = "tokens"
            elif sample.length >= self.rollout.limits.max_context:
                sample.trajectory.reason = "context"
            if sample.trajectory.reason:
                sample.episode.close()
            return None
        sample.turn = None
        decode = self.rollout.tokenizer.decode_bytes
        before = sample.trajectory.segments[-2]  # the prompt at least; `segment` is the last
        lead = decode(before.ids[-1:])[-before.trailing :] if before.trailing else b""
        return Turn(lead + decode(segment.ids), segment.stop)

    def _serve(self, ready: "Sequence[tuple[Sample, Turn | None]]") -> None:
        """Answer the episodes' requests until each writes, ends or waits for a search; then search for all at once."""
        waiting = [(sample, query) for sample, answer in ready for query in self._advance(sample, answer)]
        while waiting:
            started = time.perf_counter()
            found = self._retriever().search([query for _, query in waiting], self.rollout.renderer.k)
            self.clock.search += time.perf_counter() - started
            self.clock.search_queries += len(waiting)
            self.clock.search_calls += 1
            again: list[tuple[Sample, str]] = []
            for (sample, query), hits in zip(waiting, found, strict=True):
                if self.rollout.shuffle:
                    Random(f"{sample.job.seed} {len(sample.trajectory.searches)}").shuffle(hits)
                sample.trajectory.searches.append({"query": query, "passages": [hit.passage.id for hit in hits]})
                again.extend((sample, next_query) for next_query in self._advance(sample, hits))
            waiting = again

    def _retriever(self) -> Retriever:
        if self.rollout.retriever is None:
            raise UserError(
                f"{self.rollout.system.name} searches, and there is nowhere to; set retrieval.index or retrieval.url"
            )
        return self.rollout.retriever

    def _advance(self, sample: Sample, answer: object) -> list[str]:
        """Send `answer` to the episode and serve what it asks for; a list of the one query it waits for, or empty."""
        trajectory = sample.trajectory
        while True:
            try:
                request: Request = sample.episode.send(answer)
            except StopIteration as stop:
                trajectory.reason = stop.value or "ended"
                return []
            answer = None
            if isinstance(request, Search):
                return [request.query]
            if isinstance(request, Generate):
                if sample.policy_tokens >= self.rollout.limits.max_policy_tokens:
                    trajectory.reason = "tokens"
                elif sample.length >= self.rollout.limits.max_context:
                    trajectory.reason = "context"
                if trajectory.reason:
                    sample.episode.close()
                    return []
                sample.turn = Segment(Source.POLICY, [])
                trajectory.segments.append(sample.turn)
                sample.stop = request.stop
                sample.matcher_state = self.rollout.matcher(request.stop).start()
                return []
            if isinstance(request, Fork):
                written = [token for turn in turns(trajectory) for token in turn.ids]
                for name, branch in request.branches.items():
                    sample.forks[name] = (branch, context_ids(branch, written, self.rollout.renderer))
                continue
            if isinstance(request, Retrieved):
                segment = Segment(Source.RETRIEVED, self.rollout.renderer.retrieved(request))
            elif isinstance(request, Feedback):
                segment = Segment(Source.FEEDBACK, self.rollout.renderer.feedback(request))
            else:
                raise TypeError(
                    f"{self.rollout.system.name} yielded {request!r}, which is no request that may follow the prompt"
                )
            if sample.length + len(segment.ids) >= self.rollout.limits.max_context:
                trajectory.reason = "context"
                sample.episode.close()
                return []
            trajectory.segments.append(segment)
            sample.pending = sample.pending + segment.ids
            sample.length += len(segment.ids)
