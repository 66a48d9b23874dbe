"""An evaluation whose turns an endpoint writes: the same episodes, prompts and limits, played in text.

`ApiRollout` does for `thresher eval` what a Rollout of ours does. Its trajectories hold ids as well, of the texts
by a tokenizer, so that rewards, measures and checks are the very same; they are not what the server sampled, and have
no log-probs. Without a tokenizer a byte is a token and 4 of them count as one of a limit.

Questions of a part go forward together: a round is one call of the endpoint, with judge.concurrency requests at once,
and one of the retriever. Everything that came back is in the folder's answers.jsonl before it is used.

Deliberately absent: latency apart from the server's, which other work shares with us, and answers that were kept.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.engine.assemble import PromptContext, make_prompt_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import RetrievalSection
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    Feedback,
    Generate,
    Retrieved,
    Search,
    SpawnBranches,
    SubCall,
    System,
    Turn,
    first_prompt,
)
from thresher.engine.protocol.trajectory import Segment, Trajectory, turns
from thresher.engine.rollout.rollout import Job, RolloutClock, branch_episode, context_ids, with_truncated_passages
from thresher.engine.scoring.continuing import Continued, ContinuingEndpoint, speaks_chat
from thresher.engine.scoring.endpoint import read_key
from thresher.policy.tokenizer import load_tokenizer, train_bpe
from thresher.retrieval.indexes.given import rank_given
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Retriever
from thresher.rewards.transcript import Source

BYTES_A_TOKEN = 4  # where there is no tokenizer: about what English text has in those of today's models
IN_TOKENS = ("response_tokens", "branch_tokens", "tokens", "evidence_tokens", "rationale_tokens")  # have no value then


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredBy:
    """Who answers: `model` of the server at `url`. key_env: the environment variable that holds its key. tokenizer: a
    folder, of the model's or a like one."""

    url: str
    model: str
    key_env: str | None = None
    tokenizer: str | None = None

    def settings(self) -> dict[str, Any]:
        """What of it decides trajectories; servers move."""
        return {"answered by": [self.model, "chat" if speaks_chat(self.url) else "completion", self.tokenizer]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRunContext(PromptContext):
    """As RunContext, with an endpoint in the policy's place."""

    endpoint: ContinuingEndpoint
    answered_by: AnsweredBy

    @property
    def unmeasured(self) -> tuple[str, ...]:
        return () if self.answered_by.tokenizer else IN_TOKENS

    def threads(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rollout(self, retriever: Retriever | None) -> "ApiRollout":
        return ApiRollout(self, retriever)

    def facts(self, seconds: float) -> dict[str, Any]:
        """What the table says of who answered; seconds: for each question."""
        by, endpoint, concurrency = self.answered_by, self.endpoint, self.recipe.judge.concurrency
        kind = "chat" if endpoint.chat else "completion"
        return {
            "model": f"{by.model}, a {kind} endpoint",
            "prompt": "the server's chat template" if endpoint.chat else self.recipe.model.prompt,
            "lengths": f"in tokens of {by.tokenizer}, not the server's"
            if by.tokenizer
            else f"in bytes, {BYTES_A_TOKEN} of which count as a token of a limit",
            "requests": endpoint.requests,
            "latency": f"{seconds:.3g} s a question, of a server asked {concurrency} at once; kept answers cost none",
        }


def load_api_context(recipe: Recipe, system: System | None, by: AnsweredBy, answers: Path) -> ApiRunContext:
    """The parts of an evaluation that an endpoint answers; what it says is kept in the file `answers`. UserError as
    Endpoint, for a key that is not set, and for a prompt that cannot be made."""
    endpoint = ContinuingEndpoint(
        by.url,
        by.model,
        key=None if by.key_env is None else read_key(by.key_env),
        timeout=recipe.judge.timeout,
        patience=recipe.judge.patience,
        concurrency=recipe.judge.concurrency,
        replies=answers,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    tokenizer = load_tokenizer(by.tokenizer, recipe.run.verify) if by.tokenizer else train_bpe((), 256)
    wrapped = recipe.model.prompt == "chat" and not endpoint.chat
    if wrapped and tokenizer.chat_template is None:
        raise UserError(
            "eval: a completion endpoint gets the prompt as it is; for --prompt chat give --tokenizer, a folder with "
            "the model's chat template, or the address of its chat completions"
        )
    frame = make_prompt_context(recipe, tokenizer, system)
    limits, unit = frame.limits, 1 if by.tokenizer else BYTES_A_TOKEN
    limits = replace(
        limits,
        max_turn_tokens=limits.max_turn_tokens * unit,
        max_policy_tokens=limits.max_policy_tokens * unit,
        max_context=limits.max_context * unit,
    )
    renderer = replace(frame.renderer, chat=wrapped, max_passage_tokens=frame.renderer.max_passage_tokens * unit)
    known = {one.name: getattr(frame, one.name) for one in fields(frame)} | {"limits": limits, "renderer": renderer}
    return ApiRunContext(endpoint=endpoint, answered_by=by, **known)


@dataclass(slots=True)
class Play:
    """A trajectory, or a branch or a call of one, under way. context: as messages. limit: what ends it where the turn
    that is due is full (None: the episode goes on). caller: who waits for this call; calls: how many it made."""

    job: Job
    episode: Episode
    trajectory: Trajectory
    context: list[dict[str, str]]
    forks: dict[str, tuple[BranchPrompt, list[int]]] = field(default_factory=dict)
    due: Generate | None = None
    room: int = 0  # for that turn
    limit: str | None = None
    reported: bool = True  # to whoever watches; a branch is not
    caller: "Play | None" = None
    calls: int = 0

    def say(self, role: str, text: str) -> None:
        if self.context[-1]["role"] != role:
            self.context.append({"role": role, "content": ""})
        self.context[-1]["content"] += text

    def end(self, reason: str) -> None:
        self.trajectory.reason = reason
        self.episode.close()


class ApiRollout:
    """Makes trajectories of turns that an endpoint writes; `prompt`, `run` and `clock` are as Rollout's."""

    def __init__(self, parts: ApiRunContext, retriever: Retriever | None) -> None:
        self.tokenizer, self.retriever, self.endpoint = parts.tokenizer, retriever, parts.endpoint
        self.system, self.tools, self.renderer, self.limits = parts.system, parts.tools, parts.renderer, parts.limits
        self.shuffle = (parts.recipe.retrieval or RetrievalSection()).shuffle
        self.unit = 1 if parts.answered_by.tokenizer else BYTES_A_TOKEN
        self.clock = RolloutClock()
        self._on_progress: Callable[[int], None] | None = None

    def prompt(self, question: Question) -> list[int]:
        """The ids of a question's prompt. UserError where they leave no room in the context."""
        ids = self.renderer.prompt(first_prompt(self.system, question, self.tools))
        if len(ids) >= self.limits.max_context:
            raise UserError(
                f"question {question.id}: its prompt of {len(ids) // self.unit} tokens leaves no room in a context of "
                f"{self.limits.max_context // self.unit}; raise rollout.max_context or shorten the template"
            )
        return ids

    def run(
        self,
        jobs: Sequence[Job],
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
        recall: bool = False,  # of drafts, which are none of ours here
    ) -> list[Trajectory]:
        """Every job's trajectory, in the order of the jobs. UserError as the endpoint's."""
        self.clock, self._on_progress = RolloutClock(), on_progress
        started = time.perf_counter()
        plays = [
            self._begin(job, self.system.episode(job.question, self.tools), self.prompt(job.question)) for job in jobs
        ]
        ready: list[tuple[Play, object]] = [(play, None) for play in plays]
        while due := self._serve(ready):
            asked = [(play.context, play.due.stop, max(play.room // self.unit, 1)) for play in due if play.due]
            written = self.endpoint.continued(asked, temperature)
            ready = [(play, self._take(play, one)) for play, one in zip(due, written, strict=True)]
        self.clock.total = time.perf_counter() - started
        return [play.trajectory for play in plays]

    def _begin(self, job: Job, episode: Episode, ids: list[int], written: int = 0) -> Play:
        """At its episode's start. ids: of its prompt, of which the last `written` stand in the policy's place."""
        next(episode)  # its Prompt, which has been rendered already
        begin = list(self.tokenizer.begin_ids)
        shown = ids[len(begin) :] if begin and ids[: len(begin)] == begin else ids  # a server puts them there itself
        prompt, rest = shown[: len(shown) - written], shown[len(shown) - written :]
        trajectory = Trajectory(job.question.id, job.group, job.sample, [Segment(Source.PROMPT, ids)], from_api=True)
        play = Play(job, episode, trajectory, [{"role": "user", "content": self.tokenizer.decode(prompt)}])
        if rest:
            play.say("assistant", self.tokenizer.decode(rest))
        return play

    def _serve(self, ready: Sequence[tuple[Play, object]]) -> list[Play]:
        """Answer the episodes' requests until each has a turn due or has ended, branches among them; those due."""
        due: list[Play] = []
        while ready:
            searching: list[tuple[Play, str]] = []
            begun: list[tuple[Play, object]] = []
            for play, answer in ready:
                waits_for = self._advance(play, answer)
                if isinstance(waits_for, str):
                    searching.append((play, waits_for))
                elif waits_for is not None:
                    begun.append((waits_for, None))
                elif not play.trajectory.reason:
                    due.append(play)
                else:
                    begun += [(branch, None) for branch in self._branches(play)]
                    if play.caller is not None:
                        begun.append((play.caller, self._called(play)))
                    if self._on_progress is not None and play.reported:
                        self._on_progress(1)
            ready = [*begun, *self._search(searching)]
        return due

    def _search(self, searching: Sequence[tuple[Play, str]]) -> list[tuple[Play, object]]:
        if not searching:
            return []
        assert self.retriever is not None  # load_retrieval refused a system that searches without one
        found = self.retriever.search([query for _, query in searching], self.renderer.k)
        for (play, query), hits in zip(searching, found, strict=True):
            searches = play.trajectory.searches
            if self.shuffle:
                Random(f"{play.job.seed} {len(searches)}").shuffle(hits)
            searches.append({"query": query, "passages": [hit.passage.id for hit in hits]})
        return [(play, hits) for (play, _), hits in zip(searching, found, strict=True)]

    def _advance(self, play: Play, answer: object) -> "str | Play | None":
        """Send `answer` to the episode and serve what it asks for; the query or the call that it waits for. None where
        a turn is due or the trajectory has ended, as it may have before."""
        trajectory = play.trajectory
        while not trajectory.reason:
            try:
                request = play.episode.send(answer)
            except StopIteration as stop:
                play.end(stop.value or "ended")
                break
            answer = None
            if isinstance(request, Search):
                if request.among is None:
                    return request.query
                answer = hits = rank_given(request.among, request.query, self.renderer.k)
                found = [hit.passage.id for hit in hits]
                trajectory.searches.append({"query": request.query, "passages": found})
                continue
            if isinstance(request, SubCall):
                return self._call(play, request.context)
            if isinstance(request, Generate):
                self._open_turn(play, request)
                break
            if isinstance(request, SpawnBranches):
                for name, branch in request.branches.items():
                    play.forks[name] = (branch, context_ids(branch, _written(play), self.renderer))
            elif isinstance(request, Retrieved):
                self._append(play, Source.RETRIEVED, self.renderer.retrieved(request))
            elif isinstance(request, Feedback):
                self._append(play, Source.FEEDBACK, self.renderer.feedback(request))
            else:
                raise TypeError(f"{self.system.name} yielded {request!r}, which may not follow the prompt")
        return None

    def _append(self, play: Play, source: Source, ids: list[int]) -> None:
        if len(play.trajectory) + len(ids) >= self.limits.max_context:
            play.end("context")
            return
        play.trajectory.segments.append(Segment(source, ids))
        play.say("user", self.tokenizer.decode(ids))

    def _open_turn(self, play: Play, request: Generate) -> None:
        """A turn is due, if the limits leave it a token."""
        limits = self.limits
        most = None if request.max_tokens is None else request.max_tokens * self.unit
        rooms = {
            "turn_tokens": limits.max_turn_tokens,
            "tokens": limits.max_policy_tokens - play.trajectory.count(Source.POLICY),
            "context": limits.max_context - len(play.trajectory),
        }
        play.limit = min(rooms, key=rooms.__getitem__)
        play.due, play.room = request, rooms[play.limit]
        if play.room <= 0:
            play.end(play.limit)
        elif most is not None and most <= play.room:
            play.room, play.limit = most, None

    def _take(self, play: Play, written: Continued) -> Turn | None:
        """Put what came back on the trajectory; None if a limit ended it there."""
        ids = self.tokenizer.encode(written.turn.text.decode())
        room = self.limits.max_context - len(play.trajectory)
        stop = written.turn.stop if len(ids) <= room else None  # the server's tokens may be fewer
        segment = Segment(Source.POLICY, ids[:room], stop=stop)
        play.trajectory.segments.append(segment)
        text = self.tokenizer.decode_bytes(segment.ids)
        play.say("assistant", text.decode("utf-8", "replace"))
        if len(ids) > room or (written.full and play.limit is not None):
            play.end("context" if len(ids) > room or play.limit is None else play.limit)
            return None
        return Turn(text, stop)

    def _branches(self, play: Play) -> list[Play]:
        """Begin the branches of a trajectory that has ended."""
        begun = []
        for number, (name, (branch, ids)) in enumerate(play.forks.items()):
            if len(ids) + 1 > self.limits.max_context:
                self.clock.branches_without_room += 1
                continue
            self.clock.branches += 1
            begun.append(self._begin_branch(play, name, Job(play.job.question, number, 0, play.job.seed), branch, ids))
        return begun

    def _begin_branch(self, play: Play, name: str, job: Job, branch: BranchPrompt, ids: list[int]) -> Play:
        shown = takewhile(lambda part: isinstance(part, Retrieved), branch.parts)  # the user's, as the prompt is
        kept = len(ids) - len(context_ids(replace(branch, parts=tuple(shown)), (), self.renderer))
        begun = self._begin(job, branch_episode(branch, job), ids, kept)
        begun.reported = False
        play.trajectory.branches[name] = begun.trajectory
        return begun

    def _call(self, play: Play, context: BranchPrompt) -> Play | None:
        """Begin a call, as Rollout does; None where its context leaves it no room, which ends the trajectory."""
        context, cut = with_truncated_passages(context, self.renderer, play.job.question.id)
        self.clock.cut_search_tokens += cut
        ids = context_ids(context, _written(play), self.renderer)
        if len(ids) + 1 > self.limits.max_context:
            play.end("context")
            return None
        play.calls += 1
        begun = self._begin_branch(play, f"call {play.calls}", play.job, context, ids)
        begun.caller = play
        return begun

    def _called(self, play: Play) -> Turn:
        """What a call that has ended wrote."""
        turn = next(turns(play.trajectory), Segment(Source.POLICY, []))
        return Turn(self.tokenizer.decode_bytes(turn.ids), turn.stop)


def _written(play: Play) -> list[int]:
    return [token for turn in turns(play.trajectory) for token in turn.ids]
