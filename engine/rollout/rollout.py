"""Rollout: many episodes at once, one forward at a time.

Every step feeds each live sequence whatever it has not yet seen: one sampled token, or a prompt, or a passage that came
back. All of it goes through one forward of the policy, whose new keys and values land in pages. Sequences that are due
then sample a token; a turn that ends hands its text to the episode, whose next request is served at once, except that
searches are gathered, so that all waiting episodes share one call of the retriever.

The samples of one question fork the same pages; the prompt is prefilled once.

What makes a sample repeatable, alone or in a crowd: its noise is a function of its own seed and position; the forward
gives a row the same bits in any company (CPU, float32; see kernels/attention.py and BATCH_STEP); a long input is cut
into chunks by its own length; a running sample is never evicted; searches join at the step in which they were asked.
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
from thresher.engine.rollout.blocks import BlockPool, BlockTable
from thresher.engine.rollout.branches import branch_episode, branch_seed, context_ids
from thresher.engine.rollout.kv_cache import PagedKV, PagedStep
from thresher.engine.rollout.samples import Feed, Job, Live, Opening
from thresher.engine.rollout.scheduler import Group, Scheduler
from thresher.engine.rollout.stop_tags import TagMatcher
from thresher.kernels.logprob import head_logits
from thresher.kernels.sampling import sample
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
class Clock:
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
        index: Retriever | None,
        system: System,
        tools: Tools,
        renderer: Renderer,
        limits: Limits,
        shuffle: bool = False,
    ) -> None:
        self.policy, self.tokenizer, self.index = policy, tokenizer, index
        self.system, self.tools, self.renderer, self.limits = system, tools, renderer, limits
        self.shuffle = shuffle
        self.num_blocks = self.blocks_for(limits)
        self.cache = PagedKV(policy.config, self.num_blocks, limits.page_size, policy.dtype, policy.device)
        self.eos_ids = frozenset(policy.config.eos_token_ids)
        self._matchers: dict[tuple[str, ...], TagMatcher] = {}
        self.clock = Clock()

    @staticmethod
    def blocks_for(limits: Limits) -> int:
        """Pages of the cache: `max_running` samples of the whole context, each with a prompt of its own, and block
        0."""
        return 1 + limits.max_running * (-(-limits.max_context // limits.page_size) + 1)

    @torch.no_grad()
    def run(
        self, jobs: Sequence[Job], temperature: float, on_progress: Callable[[int], None] | None = None
    ) -> list[Trajectory]:
        """Draw every job's trajectory; returned in the order of the jobs. Temperature 0 is greedy.

        `on_progress` is called with the number of trajectories that have ended since the last call.
        """
        self.clock = Clock()
        started = time.perf_counter()
        openings: dict[int, Opening] = {}
        for job in jobs:
            if job.group not in openings:
                openings[job.group] = Opening(self.prompt(job.question), [], self._begin)
            openings[job.group].jobs.append(job)
        run = _Run(self, openings, temperature)
        done = run.finish(on_progress)
        if run.forked:
            self._branch(run.forked, temperature)
        self.clock.total = time.perf_counter() - started
        self.clock.host = self.clock.total - self.clock.decode - self.clock.prefill - self.clock.search
        return [done[job.group, job.sample] for job in jobs]

    def _begin(self, job: Job) -> Episode:
        return self.system.episode(job.question, self.tools)

    def _branch(self, forked: Sequence[Live], temperature: float) -> None:
        """Write the branches of trajectories that have ended, all in one run of their own, and hang them on."""
        openings: dict[int, Opening] = {}
        owners: list[tuple[Trajectory, str]] = []
        for live in forked:
            for name, (branch, ids) in live.forks.items():
                if len(ids) + 1 > self.limits.max_context:
                    self.clock.branches_without_room += 1
                    continue
                number = len(owners)
                job = Job(live.job.question, number, 0, branch_seed(live.job.seed, name))
                openings[number] = Opening(ids, [job], partial(branch_episode, branch))
                owners.append((live.trajectory, name))
        self.clock.branches += len(owners)
        done = _Run(self, openings, temperature).finish(None)
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
    """One call of `Rollout.run`: who is waiting, who is running, and the pages they own."""

    def __init__(self, engine: Rollout, openings: dict[int, Opening], temperature: float) -> None:
        self.engine, self.openings, self.temperature, self.clock = engine, openings, temperature, engine.clock
        self.pool = BlockPool(engine.num_blocks, engine.limits.page_size)
        self.forked: list[Live] = []  # samples that have ended and asked for branches
        groups = [
            Group(number, len(opening.ids), deque(range(len(opening.jobs))))
            for number, opening in self.openings.items()
        ]
        self.scheduler = Scheduler(groups, self.pool, engine.limits.max_running, engine.limits.max_context)
        self.live: list[tuple[Group, int, Live]] = []

    def finish(self, on_progress: Callable[[int], None] | None) -> dict[tuple[int, int], Trajectory]:
        """Step until every job has ended; (group, sample) -> trajectory."""
        done: dict[tuple[int, int], Trajectory] = {}
        while not self.scheduler.idle:
            self._admit()
            self._forward()
            self._sample()
            ended = [entry for entry in self.live if entry[2].trajectory.reason]
            for group, member, live in ended:
                self.pool.release(live.table)
                done[live.job.group, live.job.sample] = live.trajectory
                if live.forks:
                    self.forked.append(live)
                if self.scheduler.finish(group, member):
                    self.pool.release(self.openings[group.number].table)
            if ended:
                self.live = [entry for entry in self.live if not entry[2].trajectory.reason]
                if on_progress is not None:
                    on_progress(len(ended))
        return done

    def _admit(self) -> None:
        admitted: list[Live] = []
        for group, member in self.scheduler.admit():
            opening = self.openings[group.number]
            job = opening.jobs[member]
            episode = opening.begin(job)
            next(episode)  # the prompt, which the opening holds
            trajectory = Trajectory(job.question.id, job.group, job.sample, [Segment(Source.PROMPT, opening.ids)])
            live = Live(job, episode, trajectory, BlockTable(), length=len(opening.ids))
            self.live.append((group, member, live))
            admitted.append(live)
        self._serve([(live, None) for live in admitted])

    def _forward(self) -> None:
        """Feed everything that is pending: new prompts, appended passages, the tokens sampled a step ago."""
        started = time.perf_counter()
        feed = Feed(self.pool)
        for opening in {group.number: self.openings[group.number] for group, _, _ in self.live}.values():
            if opening.hidden_H is None:
                feed.add(opening, opening.table, opening.ids[opening.table.length :])
        for _, _, live in self.live:
            if live.pending and live.table.blocks:
                live.pending = feed.add(live, live.table, live.pending)
        decoded = sum(len(item.ids) == 1 for item in feed.items)
        rows = sum(len(item.ids) for item in feed.items)
        if feed.items:
            self.engine.cache.copy(feed.page_copies)
            step = PagedStep(self.engine.cache, feed.items)
            hidden_TH = self.engine.policy.hidden(step.ids_T, step.positions_T, step)
            last_SH = hidden_TH[step.last_rows]  # a copy: rows of hidden_TH itself would keep all of it alive
            for owner, hidden_H in zip(feed.owners, last_SH, strict=True):
                complete = not owner.pending if isinstance(owner, Live) else owner.table.length == len(owner.ids)
                owner.hidden_H = hidden_H if complete else None
            self.clock.forwards += 1
        for group, _, live in self.live:
            opening = self.openings[group.number]
            if not live.table.blocks and opening.table.length == len(opening.ids):
                live.table = self.pool.fork(opening.table)
                live.hidden_H = opening.hidden_H
                self.clock.shared_tokens += len(opening.ids)
        # A forward that decodes and prefills at once is shared out by rows.
        seconds = time.perf_counter() - started
        self.clock.decode += seconds * decoded / max(rows, 1)
        self.clock.prefill += seconds * (rows - decoded) / max(rows, 1)
        self.clock.prefilled_tokens += rows - decoded

    def _sample(self) -> None:
        """One token for every sequence that is writing and has nothing pending; then serve the turns that ended."""
        due = [
            live for _, _, live in self.live if live.turn is not None and not live.pending and live.hidden_H is not None
        ]
        if not due:
            return
        started = time.perf_counter()
        hidden_BH = torch.stack([live.hidden_H for live in due if live.hidden_H is not None])  # of all, for the type
        logits_BV = head_logits(hidden_BH, self.engine.policy.head_VH[: self.engine.tokenizer.vocab_size])
        ids_B, logprobs_B = sample(
            logits_BV, [live.job.seed for live in due], [live.length for live in due], self.temperature
        )
        ids, logprobs = ids_B.tolist(), logprobs_B.tolist()
        self.clock.decode += time.perf_counter() - started
        self.clock.sampled_tokens += len(due)
        ended: list[tuple[Live, Turn | None]] = []
        for live, token, logprob in zip(due, ids, logprobs, strict=True):
            turn = self._take(live, token, logprob)
            if turn is not None:
                ended.append((live, turn))
        self._serve(ended)

    def _take(self, live: Live, token: int, logprob: float) -> Turn | None:
        """Put a sampled token on the trajectory; the finished turn if it ended one."""
        segment = live.turn
        assert segment is not None
        segment.ids.append(token)
        segment.logprobs.append(logprob)
        live.pending = [token]
        live.length += 1
        live.policy_tokens += 1
        matcher = self.engine.matcher(live.stop)
        live.matcher_state, hit = matcher.step(live.matcher_state, token)
        if hit is not None:
            segment.stop, segment.trailing = hit.tag, len(hit.trailing)
        elif token not in self.engine.eos_ids:
            if len(segment.ids) >= self.engine.limits.max_turn_tokens:
                live.trajectory.reason = "turn_tokens"
            elif live.policy_tokens >= self.engine.limits.max_policy_tokens:
                live.trajectory.reason = "tokens"
            elif live.length >= self.engine.limits.max_context:
                live.trajectory.reason = "context"
            if live.trajectory.reason:
                live.episode.close()
            return None
        live.turn = None
        decode = self.engine.tokenizer.decode_bytes
        before = live.trajectory.segments[-2]  # the prompt at least; `segment` is the last
        lead = decode(before.ids[-1:])[-before.trailing :] if before.trailing else b""
        return Turn(lead + decode(segment.ids), segment.stop)

    def _serve(self, ready: "Sequence[tuple[Live, Turn | None]]") -> None:
        """Answer the episodes' requests until each writes, ends or waits for a search; then search for all at once."""
        waiting = [(live, query) for live, answer in ready for query in self._advance(live, answer)]
        while waiting:
            started = time.perf_counter()
            found = self._index().search([query for _, query in waiting], self.engine.renderer.k)
            self.clock.search += time.perf_counter() - started
            self.clock.search_queries += len(waiting)
            self.clock.search_calls += 1
            again: list[tuple[Live, str]] = []
            for (live, query), hits in zip(waiting, found, strict=True):
                if self.engine.shuffle:
                    Random(f"{live.job.seed} {len(live.trajectory.searches)}").shuffle(hits)
                live.trajectory.searches.append({"query": query, "passages": [hit.passage.id for hit in hits]})
                again.extend((live, next_query) for next_query in self._advance(live, hits))
            waiting = again

    def _index(self) -> Retriever:
        if self.engine.index is None:
            raise UserError(
                f"{self.engine.system.name} searches, and there is nowhere to; set retrieval.index or retrieval.url"
            )
        return self.engine.index

    def _advance(self, live: Live, answer: object) -> list[str]:
        """Send `answer` to the episode and serve what it asks for; a list of the one query it waits for, or empty."""
        trajectory = live.trajectory
        while True:
            try:
                request: Request = live.episode.send(answer)
            except StopIteration as stop:
                trajectory.reason = stop.value or "ended"
                return []
            answer = None
            if isinstance(request, Search):
                return [request.query]
            if isinstance(request, Generate):
                if live.policy_tokens >= self.engine.limits.max_policy_tokens:
                    trajectory.reason = "tokens"
                elif live.length >= self.engine.limits.max_context:
                    trajectory.reason = "context"
                if trajectory.reason:
                    live.episode.close()
                    return []
                live.turn = Segment(Source.POLICY, [])
                trajectory.segments.append(live.turn)
                live.stop = request.stop
                live.matcher_state = self.engine.matcher(request.stop).start()
                return []
            if isinstance(request, Fork):
                written = [token for turn in turns(trajectory) for token in turn.ids]
                for name, branch in request.branches.items():
                    live.forks[name] = (branch, context_ids(branch, written, self.engine.renderer))
                continue
            if isinstance(request, Retrieved):
                segment = Segment(Source.RETRIEVED, self.engine.renderer.retrieved(request))
            elif isinstance(request, Feedback):
                segment = Segment(Source.FEEDBACK, self.engine.renderer.feedback(request))
            else:
                raise TypeError(
                    f"{self.engine.system.name} yielded {request!r}, which is no request that may follow the prompt"
                )
            if live.length + len(segment.ids) >= self.engine.limits.max_context:
                trajectory.reason = "context"
                live.episode.close()
                return []
            trajectory.segments.append(segment)
            live.pending = live.pending + segment.ids
            live.length += len(segment.ids)
