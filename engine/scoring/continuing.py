"""An endpoint that continues texts up to a stop tag: a policy behind a URL, as chat or as plain completion.

    chat          .../v1/chat/completions    the context as messages: prompts and passages the user's, turns the
                                             assistant's; where it ends in a turn, that is what is to be continued
    completion    .../v1/completions         the context as one text: exactly what a policy of ours would read

Servers leave the stop tag out of what they return, and most do not say which it was. So it is put back: the one that
the server names (vLLM's stop_reason, SGLang's matched_stop), else that of the span that was left open last. A text that
ends of itself inside such a span looks the same, and is closed too. A server that ignores `stop` writes on, and is cut.

Deliberately absent: token ids and log-probs, which such a server need not tell, and a reasoner's hidden thoughts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thresher.common.http import HttpAnswer, json_of
from thresher.engine.episode import Turn, cut
from thresher.engine.scoring.endpoint import PATH, Endpoint, Messages, Unusable, shown

COMPLETIONS = "/completions"
MOST_STOPS = 4  # that OpenAI's servers take


def speaks_chat(url: str) -> bool:
    """Whether the address is that of a chat: all are but those of completions."""
    path = url.rstrip("/")
    return path.endswith(PATH) or not path.endswith(COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Continued:
    """One text that came back, and whether the limit on its tokens ended it."""

    turn: Turn
    full: bool


class ContinuingEndpoint(Endpoint):
    """As Endpoint, asked for the continuations of contexts; `chat` says by which of the two protocols."""

    def __init__(self, url: str, model: str, **settings: Any) -> None:
        self.chat = speaks_chat(url)
        super().__init__(url, model, path=PATH if self.chat else COMPLETIONS, **settings)

    def continued(self, asked: Sequence[tuple[Messages, tuple[str, ...], int]], temperature: float) -> list[Continued]:
        """What follows each context, up to its stop tags, with at most so many tokens. UserError as `complete`."""
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
        """The text with what is known of its end, as the JSON that is kept."""
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
    """The closing tag of the span of `stop` that was opened last and not closed; None where there is none."""
    opened = [(text.rfind(tag.replace("</", "<", 1)), tag) for tag in stop]
    at, tag = max(opened, default=(-1, ""))
    return tag if at > text.rfind(tag) else None
