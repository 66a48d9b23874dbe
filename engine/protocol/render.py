"""Text into token ids: the only place where the engine encodes anything, and never what the policy wrote.

Templates may emit control tokens and tags. Questions, passages and feedback may emit neither: they are encoded as plain
text, and every tag of the system's grammar that they hold is escaped after rendering, so that no two pieces can
join into one. What a search brings is cut to a budget of tokens, the tags around it never; a prompt's passages come cut
(engine/protocol/passages.py), so that what is stored and scored is what was shown.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from thresher.engine.episode import Feedback, Prompt, Retrieved
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.data.formats import Passage
from thresher.rewards.errors import UserError
from thresher.rewards.tags import escape_tags

# What stands for the question and the passages while a chat template is rendered.
_QUESTION, _PASSAGES = "\ue000question\ue000", "\ue000passages\ue000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """How one system's texts become ids.

    k: passages per search. chat: wrap the prompt in the model's chat template. max_passage_tokens: budget of a search,
    and of a prompt's passages.
    """

    tokenizer: Tokenizer
    tags: tuple[str, ...]
    k: int
    chat: bool
    max_passage_tokens: int
    passage_format: str

    def __post_init__(self) -> None:
        check_passage_format(self.passage_format)

    def prompt(self, request: Prompt) -> list[int]:
        text = request.template.replace("{question}", _QUESTION).replace("{passages}", _PASSAGES)
        if self.chat:
            text = self.tokenizer.chat_prompt(text)
        ids: list[int] = []
        # A space before the question is encoded with it: the tokenizer makes one token of " Who", as in running text.
        for part in re.split(f"( ?{_QUESTION}|{_PASSAGES})", text):
            if part.endswith(_QUESTION):
                question = part.removesuffix(_QUESTION) + request.question
                ids += self.tokenizer.encode(escape_tags(question, self.tags))
            elif part == _PASSAGES:
                ids += self._given(request.passages)
            else:
                ids += self.tokenizer.encode_template(part)
        return self.begin(ids) + ids

    def begin(self, ids: list[int]) -> list[int]:
        """What the model expects before a prompt of these ids: nothing in a chat, whose template has written it, nor
        where they begin with it."""
        expected = list(self.tokenizer.begin_ids)
        return [] if self.chat or ids[: len(expected)] == expected else expected

    def _given(self, passages: Sequence[Passage]) -> list[int]:
        """A prompt's passages, whole. UserError where they exceed their budget: nothing is cut unrecorded."""
        ids = self.passages(passages)
        if len(ids) > self.max_passage_tokens:
            raise UserError(
                f"a prompt's passages take {len(ids)} tokens, more than rollout.max_passage_tokens = "
                f"{self.max_passage_tokens}; raise it, or let the system show a question's own passages, which are cut"
            )
        return ids

    def passages(self, passages: Sequence[Passage]) -> list[int]:
        """Passages one a line, as a prompt shows them, of whatever length."""
        return self.tokenizer.encode(escape_tags(passage_lines(passages, self.passage_format), self.tags))

    def line_tokens(self, number: int, passage: Passage) -> int:
        """The tokens of one passage's line, with the break before it."""
        line = "\n" * (number > 1) + passage_line(number, passage, self.passage_format)
        return len(self.tokenizer.encode(escape_tags(line, self.tags)))

    def retrieved(self, request: Retrieved) -> list[int]:
        return self.retrieved_and_cut(request)[0]

    def retrieved_and_cut(self, request: Retrieved) -> tuple[list[int], int]:
        """A search's passages, or the text in their place, between their tags; and how many of their tokens the budget
        cut off."""
        if isinstance(request.hits, str):
            passages = self.tokenizer.encode(escape_tags(request.hits, self.tags))
        else:
            passages = self.passages([hit.passage for hit in request.hits])
        encode, most = self.tokenizer.encode_template, self.max_passage_tokens
        return encode(request.before) + passages[:most] + encode(request.after), max(len(passages) - most, 0)

    def feedback(self, request: Feedback) -> list[int]:
        return self.tokenizer.encode(escape_tags(request.text, self.tags))


def check_passage_format(passage_format: str) -> None:
    """UserError for a format that cannot be filled, or that leaves the passage's text out."""
    try:
        filled = passage_format.format(number=1, title="", text=_QUESTION)
    except (LookupError, ValueError, AttributeError) as error:
        raise UserError(
            f"retrieval.passage_format {passage_format!r} cannot be filled ({type(error).__name__}: {error}); "
            "use {number}, {title} and {text}, and write a bare brace twice"
        ) from None
    if _QUESTION not in filled:
        raise UserError(f"retrieval.passage_format {passage_format!r} leaves out the passage; put {{text}} into it")


def passage_lines(passages: Sequence[Passage], passage_format: str) -> str:
    """Passages as the policy sees them, one a line, before tags are escaped."""
    return "\n".join(passage_line(number, passage, passage_format) for number, passage in enumerate(passages, start=1))


def passage_line(number: int, passage: Passage, passage_format: str) -> str:
    return passage_format.format(number=number, title=passage.title, text=passage.text)
