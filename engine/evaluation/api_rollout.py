"""Trajectories whose turns a server writes: the same episodes, prompts and limits as a policy's, played in text.

    chat          .../v1/chat/completions    the context as messages: prompts and passages the user's, turns the
                                             assistant's; a context that ends in a turn is to be continued
    completion    .../v1/completions         the context as one text: exactly what a policy of ours would read

A trajectory's ids are those of its texts by a tokenizer, without log-probs, and not what the server sampled. Without a
tokenizer a byte is a token, and 4 of them count as one of a limit. A step is one call of the endpoint for all samples;
replies are in its file before they are used. A stop tag that a server left out is put back: the one that it names
(vLLM's stop_reason, SGLang's matched_stop), else that of the span that was opened last.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from thresher.common.console import note
from thresher.common.errors import UserError
from thresher.common.http import CHAT_PATH, HttpAnswer, json_of
from thresher.engine.assemble import PromptContext, make_prompt_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import RetrievalSection
from thresher.engine.decoding.scheduler import SharedPrompt
from thresher.engine.episode import BranchPrompt, EpisodeConfig, Retrieved, System, Turn
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.contexts import context_ids
from thresher.engine.rollout.rollout import EpisodeRunner, Job, Limits, RolloutClock, Sample, Written
from thresher.engine.scoring.endpoint import Endpoint, Messages, Unusable, read_key, shown
from thresher.policy.tokenizer import load_tokenizer, train_bpe
from thresher.retrieval.retriever import Retriever

BYTES_A_TOKEN = 4  # where there is no tokenizer: about what English text has in those of today's models
IN_TOKENS = ("response_tokens", "branch_tokens", "tokens", "evidence_tokens", "rationale_tokens")  # have no value then
COMPLETIONS = "/completions"
MOST_STOPS = 4  # that OpenAI's servers take


def speaks_chat(url: str) -> bool:
    """Return True for the address of a chat: all are but those of completions."""
    path = url.rstrip("/")
    return path.endswith(CHAT_PATH) or not path.endswith(COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Continued:
    """A reply as a turn. full: the limit on its tokens ended it."""

    turn: Turn
    full: bool


class Continues(Protocol):
    def continued(self, asked: Sequence[tuple[Messages, tuple[str, ...], int]], temperature: float) -> list[Continued]:
        """Return the text that follows each context, up to its stop tags, with at most so many tokens. UserError as
        `Endpoint.complete`."""


class ContinuingEndpoint(Endpoint):
    """An Endpoint that continues contexts, by the chat protocol (`chat`) or as completions."""

    def __init__(self, url: str, model: str, **settings: Any) -> None:
        self.chat = speaks_chat(url)
        super().__init__(url, model, path=CHAT_PATH if self.chat else COMPLETIONS, **settings)

    def continued(self, asked: Sequence[tuple[Messages, tuple[str, ...], int]], temperature: float) -> list[Continued]:
        bodies = [self._body(context, stop, most, temperature) for context, stop, most in asked]
        return [
            _continued(json.loads(reply), context, stop)
            for reply, (context, stop, _) in zip(self.replies(bodies), asked, strict=True)
        ]

    def _body(self, context: Messages, stop: tuple[str, ...], most: int, temperature: float) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "temperature": temperature, "max_tokens": most}
        if 0 < len(stop) <= MOST_STOPS:
            body["stop"] = list(stop)
        if self.chat:
            return body | {"messages": [dict(message) for message in context]}
        return body | {"prompt": "".join(message["content"] for message in context)}

    def _read(self, response: HttpAnswer) -> str:
        """Return the text with what is known of its end, as the JSON that is kept."""
        answer = json_of(response)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if self.chat else choice["text"]
            found = {"text": text, "finish": choice.get("finish_reason")}
            found["stop"] = next((choice[key] for key in ("stop_reason", "matched_stop") if choice.get(key)), None)
        except (TypeError, KeyError, IndexError, AttributeError):
            found = {"text": None}
        if not isinstance(found["text"], str):
            where = "choices[0].message.content" if self.chat else "choices[0].text"
            got = shown(response.data[:400].decode("utf-8", "replace"))
            raise Unusable(f"no text at {where}, as such a completion has it, but {got}")
        return json.dumps(found)


def _continued(reply: Mapping[str, Any], context: Messages, stop: Sequence[str]) -> Continued:
    turn = cut(reply["text"].encode("utf-8", "replace").decode(), stop)
    if turn.stop is None and reply["finish"] == "stop":
        before = context[-1]["content"] if context[-1]["role"] == "assistant" else ""
        tag = reply["stop"] if reply["stop"] in stop else _left_open(before + reply["text"], stop)
        if tag is not None:
            turn = Turn(turn.text + tag.encode(), tag)
    return Continued(turn, full=turn.stop is None and reply["finish"] == "length")


def _left_open(text: str, stop: Sequence[str]) -> str | None:
    """Return the closing tag of the span of `stop` that was opened last and not closed; None where there is none."""
    opened = [(text.rfind(tag.replace("</", "<", 1)), tag) for tag in stop]
    at, tag = max(opened, default=(-1, ""))
    return tag if at > text.rfind(tag) else None


def cut(reply: str, stop: Sequence[str]) -> Turn:
    """Return the reply up to the end of the first stop tag in it; all of it where there is none."""
    ends = [(at + len(tag), tag) for tag in stop if (at := reply.find(tag)) >= 0]
    end, tag = min(ends, default=(len(reply), None))
    return Turn(reply[:end].encode("utf-8", "surrogatepass"), tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredBy:
    """The model that answers: `model` of the server at `url`. key_env: environment variable with its key. tokenizer:
    folder of the model's or a similar one."""

    url: str
    model: str
    key_env: str | None = None
    tokenizer: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return what decides trajectories; the URL does not."""
        return {"answered by": [self.model, "chat" if speaks_chat(self.url) else "completion", self.tokenizer]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRunContext(PromptContext):
    """A RunContext with an endpoint in the policy's place."""

    endpoint: ContinuingEndpoint
    answered_by: AnsweredBy

    @property
    def unit(self) -> int:
        """Return how many tokens of the tokenizer count as one of a limit."""
        return 1 if self.answered_by.tokenizer else BYTES_A_TOKEN

    @property
    def unmeasured(self) -> tuple[str, ...]:
        return () if self.answered_by.tokenizer else IN_TOKENS

    def threads(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rollout(self, retriever: Retriever | None) -> "ApiRollout":
        return ApiRollout(
            self.endpoint,
            self.tokenizer,
            retriever,
            self.system,
            self.episode_config,
            self.renderer,
            self.limits,
            (self.recipe.retrieval or RetrievalSection()).shuffle,
            self.unit,
            self.tools,
        )

    def facts(self, seconds: float) -> dict[str, Any]:
        """Return facts for the table; seconds: of a question."""
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
    """Return the context of an evaluation that an endpoint answers. Its replies are kept in the file `answers`.
    UserError as Endpoint, for a key that is not set, and for a chat prompt without a template."""
    endpoint = ContinuingEndpoint(
        by.url,
        by.model,
        key=None if by.key_env is None else read_key(by.key_env),
        timeout=recipe.judge.timeout,
        patience=recipe.judge.retry_seconds,
        concurrency=recipe.judge.concurrency,
        replies=answers,
        say=note,
    )
    tokenizer = load_tokenizer(by.tokenizer, recipe.run.verify) if by.tokenizer else train_bpe((), 256)
    wrapped = recipe.model.prompt == "chat" and not endpoint.chat
    if wrapped and tokenizer.chat_template is None:
        raise UserError(
            "eval: a completion endpoint gets the prompt as it is; for --prompt chat give --tokenizer, a folder with "
            "the model's chat template, or the address of its chat completions"
        )
    context = make_prompt_context(recipe, tokenizer, system)
    known = {one.name: getattr(context, one.name) for one in fields(context)}
    found = ApiRunContext(endpoint=endpoint, answered_by=by, **known)
    limits, renderer = found.limits, found.renderer
    limits = replace(
        limits,
        max_turn_tokens=limits.max_turn_tokens * found.unit,
        max_policy_tokens=limits.max_policy_tokens * found.unit,
        max_context=limits.max_context * found.unit,
    )
    renderer = replace(renderer, chat=wrapped, max_passage_tokens=renderer.max_passage_tokens * found.unit)
    return replace(found, limits=limits, renderer=renderer)


class ApiRollout(EpisodeRunner):
    """Makes trajectories of turns that an endpoint writes. setting: arguments of EpisodeRunner."""

    def __init__(self, endpoint: Continues, *setting: Any) -> None:
        super().__init__(*setting)
        self.endpoint = endpoint

    def run(
        self,
        jobs: Sequence[Job],
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
        recall: bool = False,  # for drafts, which an endpoint has none of
    ) -> list[Trajectory]:
        """Return the trajectories of `jobs`. UserError as the endpoint's."""
        self.clock = RolloutClock()
        started = time.perf_counter()
        trajectories = self.play_all(jobs, ApiWriter(self, temperature), on_progress)
        self.clock.total = time.perf_counter() - started
        return trajectories

    def stream(self, jobs: Sequence[Job], temperature: float) -> Iterator[Trajectory]:
        """Yield every job's trajectory as soon as it has ended, without its branches."""
        for ended in self.play(jobs, ApiWriter(self, temperature)):
            yield from (sample.trajectory for sample in ended)


class ApiWriter:
    """The TurnWriter of an endpoint: a step is one call for all turns that are due."""

    elsewhere = False  # a step waits for the server
    takes_text = True

    def __init__(self, rollout: ApiRollout, temperature: float) -> None:
        self.rollout, self.temperature = rollout, temperature
        self.contexts: dict[Sample, list[dict[str, str]]] = {}
        self.due: list[tuple[Sample, tuple[str, ...]]] = []

    @property
    def idle(self) -> bool:
        return not self.due

    def begin(self, sample: Sample, prompt: SharedPrompt, branch: BranchPrompt | None) -> None:
        """Begin a context: the prompt is the user's; what a branch puts in the policy's place is the assistant's."""
        tokenizer, renderer, ids = self.rollout.tokenizer, self.rollout.renderer, prompt.ids
        sample.trajectory.from_api = True
        written = 0
        if branch is not None:
            shown = takewhile(lambda part: isinstance(part, Retrieved), branch.parts)  # the user's, as the prompt is
            written = len(ids) - len(context_ids(replace(branch, parts=tuple(shown)), (), renderer))
        begin = list(tokenizer.begin_ids)
        sent = ids[len(begin) :] if begin and ids[: len(begin)] == begin else ids  # a server puts them there itself
        user, assistant = sent[: len(sent) - written], sent[len(sent) - written :]
        self.contexts[sample] = [{"role": "user", "content": tokenizer.decode(user)}]
        if assistant:
            self._say(sample, "assistant", tokenizer.decode(assistant))

    def append(self, sample: Sample, ids: list[int]) -> None:
        self._say(sample, "user", self.rollout.tokenizer.decode(ids))

    def begin_turn(self, sample: Sample, stop: tuple[str, ...], lead: bytes) -> None:
        self.due.append((sample, stop))

    def score(self, sample: Sample, ids: list[int], scored_from: int, present: int) -> None:
        raise UserError(
            f"{self.rollout.system.name} asks for log-probs of a text (Score), which a server does not give; play it "
            "with a model folder"
        )

    def step(self) -> list[tuple[Sample, Written]]:
        due, self.due = self.due, []
        asked = [(self.contexts[sample], stop, max(sample.room // self.rollout.unit, 1)) for sample, stop in due]
        found = self.rollout.endpoint.continued(asked, self.temperature)
        return [(sample, self._append_turn(sample, one)) for (sample, _), one in zip(due, found, strict=True)]

    def _append_turn(self, sample: Sample, continued: Continued) -> Written:
        ids = self.rollout.tokenizer.encode(continued.turn.text.decode())
        room = self.rollout.limits.max_context - sample.length
        too_long = len(ids) > room  # the server's tokens may be fewer
        if too_long:
            ids, sample.limit = ids[:room], "context"
        self._say(sample, "assistant", self.rollout.tokenizer.decode_bytes(ids).decode("utf-8", "replace"))
        return Written(ids, stop=None if too_long else continued.turn.stop, full=too_long or continued.full)

    def release(self, sample: Sample, keep: bool) -> None:
        """Do nothing: there is no cache to free."""

    def _say(self, sample: Sample, role: str, text: str) -> None:
        context = self.contexts[sample]
        if context[-1]["role"] != role:
            context.append({"role": role, "content": ""})
        context[-1]["content"] += text


# --- A chat model that is told no stop tags


class WholeReplies:
    """A chat model's replies as turns. It is told no stop tag, so a reply is cut behind the first of its tags. chat: an
    Endpoint, or anything with its `complete`."""

    def __init__(self, chat: Any) -> None:
        self._chat = chat

    def continued(self, asked: Sequence[tuple[Messages, tuple[str, ...], int]], temperature: float) -> list[Continued]:
        replies = self._chat.complete(
            [messages for messages, _, _ in asked], temperature=temperature, max_tokens=asked[0][2]
        )
        return [
            Continued(cut(reply.encode("utf-8", "replace").decode(), stop), full=False)
            for reply, (_, stop, _) in zip(replies, asked, strict=True)
        ]


def chat_rollout(
    chat: Any,
    system: System,
    config: EpisodeConfig,
    retriever: Retriever | None,
    k: int,
    passage_format: str,
    max_tokens: int,
) -> ApiRollout:
    """Return a chat model under `system`, without any limit but `max_tokens` of a reply."""
    tokenizer = train_bpe((), 256)  # a byte is a token
    renderer = Renderer(
        tokenizer=tokenizer,
        tags=system.tags,
        k=k,
        chat=False,
        max_passage_tokens=sys.maxsize,
        passage_format=passage_format,
    )
    limits = Limits(
        max_turn_tokens=max_tokens, max_policy_tokens=sys.maxsize, max_context=sys.maxsize, max_num_seqs=sys.maxsize
    )
    return ApiRollout(WholeReplies(chat), tokenizer, retriever, system, config, renderer, limits)
