"""Prompts: encoding of questions, passages and engine text into token ids, which no other module does.

Templates may emit control tokens and tags. Questions, passages and feedback may not: they are encoded as plain text,
and every tag of the system's grammar in them is escaped after rendering, so that no two pieces can join into a tag.
Passages of a prompt beyond `rollout.max_passage_tokens` are cut before the rollout, so that the passages that are
stored, rewarded and measured are those shown. The longest are cut first, until all cut ones have the same share. A
search's passages are cut to the same budget; the tags around them are never cut.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from thresher.common.errors import UserError
from thresher.engine.chat_calls import correction, tool_response
from thresher.engine.episode import EpisodeConfig, Feedback, Prompt, Result, Retrieved, System, Turn
from thresher.policy.tokenizer import Tokenizer, UnencodableText
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Retriever
from thresher.rewards.tags import escape_tags
from thresher.rewards.text import contains_answer

# Placeholders of the question and the passages while a chat template is rendered.
_QUESTION = "\ue000question\ue000"
_PASSAGES = "\ue000passages\ue000"
CUT_OFF = " [cut off]"  # ends a tool's result that is longer than its limit
MOST_CHARACTERS = 64  # per token, on average: text of a tool beyond this is cut off before it is encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """Render one system's texts into ids.

    k: passages per search. chat: wrap the prompt in the model's chat template. max_passage_tokens: budget of a search's
    passages, and of a prompt's passages, in ids. unit: ids per token of the recipe's limit.
    """

    tokenizer: Tokenizer
    tags: tuple[str, ...]
    k: int
    chat: bool
    max_passage_tokens: int
    passage_format: str
    unit: int = 1

    def __post_init__(self) -> None:
        check_passage_format(self.passage_format)

    def prompt(self, request: Prompt) -> list[int]:
        text = request.template.replace("{question}", _QUESTION).replace("{passages}", _PASSAGES)
        if request.tools:
            check_call_format(self.tokenizer, self.chat)
        if self.chat:
            text = self.tokenizer.chat_prompt(text, request.tools)
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
        """Return the ids that the model expects before a prompt of these ids. There are none in a chat, whose template
        has written them, and none if the prompt begins with them."""
        expected = list(self.tokenizer.begin_ids)
        return [] if self.chat or ids[: len(expected)] == expected else expected

    def _given(self, passages: Sequence[Passage]) -> list[int]:
        """Return the ids of a prompt's passages. UserError if they exceed their budget: every cut is recorded."""
        ids = self.passages(passages)
        if len(ids) > self.max_passage_tokens:
            raise UserError(
                f"a prompt's passages take {-(-len(ids) // self.unit)} tokens, more than rollout.max_passage_tokens = "
                f"{self.max_passage_tokens // self.unit}; raise it, or let the system show a question's own passages, "
                "which are cut"
            )
        return ids

    def passages(self, passages: Sequence[Passage]) -> list[int]:
        """Return the ids of passages, one per line as in a prompt, without a limit of length."""
        try:
            return self.tokenizer.encode(escape_tags(passage_lines(passages, self.passage_format), self.tags))
        except UnencodableText:
            for number, passage in enumerate(passages, start=1):
                try:
                    self.line_tokens(number, passage)
                except UnencodableText as error:
                    raise UnencodableText(f"passage {passage.title!r}: {error}") from None
            raise

    def line_tokens(self, number: int, passage: Passage) -> int:
        """Return the number of tokens of one passage's line, with the line break before it."""
        line = "\n" * (number > 1) + passage_line(number, passage, self.passage_format)
        return len(self.tokenizer.encode(escape_tags(line, self.tags)))

    def retrieved(self, request: Retrieved) -> tuple[list[int], int]:
        """Return the ids of a search's passages, or of the text in their place, between their tags. Return also how
        many of their tokens the budget cut off."""
        if isinstance(request.hits, str):
            passages = self.tokenizer.encode(escape_tags(request.hits, self.tags))
        else:
            passages = self.passages([hit.passage for hit in request.hits])
        encode, most = self.tokenizer.encode_template, self.max_passage_tokens
        return encode(request.before) + passages[:most] + encode(request.after), max(len(passages) - most, 0)

    def cut_text(self, text: str, most: int | None) -> str:
        """Return a tool's text unchanged if it has at most `most` tokens (None: the budget of a search). Otherwise
        return the part that fits, followed by CUT_OFF."""
        most = self.max_passage_tokens if most is None else min(most, self.max_passage_tokens)
        encode = self.tokenizer.encode
        head = text[: MOST_CHARACTERS * most]
        ids = encode(escape_tags(head, self.tags))
        if len(ids) <= most and head == text:
            return text
        kept = ids[: max(most - len(encode(CUT_OFF)), 0)]
        return self.tokenizer.decode_bytes(kept).decode("utf-8", "ignore") + CUT_OFF

    def feedback(self, request: Feedback) -> list[int]:
        template, text = self.tokenizer.encode_template, self.tokenizer.encode(escape_tags(request.text, self.tags))
        return template(request.before) + text + template(request.after)

    def edges(self, request: Retrieved | Feedback) -> tuple[int, int]:
        """Return the numbers of ids at the beginning and end of a request's that belong to its template text."""
        return len(self.tokenizer.encode_template(request.before)), len(self.tokenizer.encode_template(request.after))


@lru_cache(maxsize=8)
def check_call_format(tokenizer: Tokenizer, chat: bool) -> None:
    """Raise UserError if prompts are no chat, or if the model's chat template writes other text between turns than
    engine/chat_calls.py appends."""
    if not chat:
        raise UserError(
            'the system shows its tools with the model\'s chat template; set model.prompt = "chat", and if a server '
            "answers, give its completions and the tokenizer"
        )
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _QUESTION}]
    for role, shown in (("tool", tool_response(Result(_PASSAGES))), ("user", correction(Turn(b"", None), _PASSAGES))):
        text = tokenizer.render_chat([*begun, {"role": role, "content": _PASSAGES}])
        if not text.endswith(f"{_QUESTION}{shown.before}{_PASSAGES}{shown.after}"):
            raise UserError(
                f"the model's chat template writes a message of the role {role!r} differently from Qwen2.5's, which "
                "engine/chat_calls.py follows; let the system use tags of its own"
            )


def check_passage_format(passage_format: str) -> None:
    """Raise UserError for a format that cannot be filled, or that leaves out the passage's text."""
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
    """Return passages as the policy sees them, one per line, before tags are escaped."""
    return "\n".join(passage_line(number, passage, passage_format) for number, passage in enumerate(passages, start=1))


def passage_line(number: int, passage: Passage, passage_format: str) -> str:
    return passage_format.format(number=number, title=passage.title, text=passage.text)


def first_prompt(system: System, question: Question, config: EpisodeConfig) -> Prompt:
    """Return the episode's first request. TypeError if it is not a Prompt."""
    request = next(system.episode(question, config))
    if not isinstance(request, Prompt):
        raise TypeError(f"the episode of {system.name} must begin with a Prompt, not {request}")
    return request


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Questions with the passages that their prompts show, and the numbers of questions and passages that were cut.
    budget: passage tokens per question."""

    questions: list[Question]
    cut_questions: int
    cut_passages: int
    budget: int

    def merged(self, other: "PromptBatch") -> "PromptBatch":
        cut = self.cut_questions + other.cut_questions, self.cut_passages + other.cut_passages
        return PromptBatch([*self.questions, *other.questions], *cut, self.budget)

    def warning(self) -> str | None:
        """Return a sentence on what was cut; None if nothing was."""
        if not self.cut_questions:
            return None
        return (
            f"{self.cut_questions:,} of {len(self.questions):,} questions had passages cut to {self.budget:,} tokens; "
            "raise rollout.max_passage_tokens"
        )


def truncate_passages(
    questions: Sequence[Question], system: System, config: EpisodeConfig, renderer: Renderer
) -> PromptBatch:
    """Return the questions, with the passages of their prompts cut to fit; passages not shown stay unchanged.

    UserError if a budget is too small for the format of a question's passages alone.
    """
    fitted: list[Question] = []
    cut_questions = cut_passages = 0
    for question in questions:
        shown = first_prompt(system, question, config).passages
        lost = {
            id(before): after
            for before, after in zip(shown, fit(shown, renderer, question.id), strict=True)
            if after is not before
        }
        if lost:
            cut_questions, cut_passages = cut_questions + 1, cut_passages + len(lost)
            question = replace(question, passages=tuple(lost.get(id(one), one) for one in question.passages))
        fitted.append(question)
    return PromptBatch(fitted, cut_questions, cut_passages, renderer.max_passage_tokens // renderer.unit)


def fit(passages: Sequence[Passage], renderer: Renderer, question_id: str) -> tuple[Passage, ...]:
    """Return passages whose lines together have at most `renderer.max_passage_tokens` tokens. Passages that need no cut
    are returned unchanged."""
    budget = renderer.max_passage_tokens
    if len(renderer.passages(passages)) <= budget:
        return tuple(passages)
    numbered = list(enumerate(passages, start=1))
    share = _share([renderer.line_tokens(number, passage) for number, passage in numbered], budget)
    while True:
        kept = [_cut(number, passage, share, renderer) for number, passage in numbered]
        if None in kept:
            raise UserError(
                f"question {question_id}: rollout.max_passage_tokens = {budget // renderer.unit} leaves "
                f"{share // renderer.unit} tokens for each "
                f"of {len(passages)} passages, fewer than retrieval.passage_format takes without its text; raise it"
            )
        found = tuple(passage for passage in kept if passage is not None)
        if len(renderer.passages(found)) <= budget:
            return found
        share -= 1  # joined lines may take more tokens than the lines one by one


def _share(lengths: Sequence[int], budget: int) -> int:
    """Return the largest bound on each length with which they sum to at most `budget`; at most the largest length."""
    share = 0
    for place, length in enumerate(sorted(lengths)):
        share = budget // (len(lengths) - place)
        if length > share:
            break
        budget -= length
    return min(share, max(lengths))


def _cut(number: int, passage: Passage, share: int, renderer: Renderer) -> Passage | None:
    """Return the passage with as many whole tokens of its text as fit into a line of `share` tokens. If its line does
    not fit without any text, the title is cut too. None if the format alone takes more."""
    if renderer.line_tokens(number, passage) <= share:
        return passage
    for part in ("text", "title"):
        ids = renderer.tokenizer.encode(getattr(passage, part))
        low, high = 0, min(len(ids), share)
        while low < high:
            middle = (low + high + 1) // 2
            if renderer.line_tokens(number, _headed(passage, part, ids[:middle], renderer)) <= share:
                low = middle
            else:
                high = middle - 1
        passage = _headed(passage, part, ids[:low], renderer)
        if renderer.line_tokens(number, passage) <= share:
            return passage
    return None


def _headed(passage: Passage, part: str, ids: Sequence[int], renderer: Renderer) -> Passage:
    """Return the passage with these tokens as its text or title; an incomplete character at their end is left out."""
    return replace(passage, **{part: renderer.tokenizer.decode_bytes(ids).decode("utf-8", "ignore")})


def with_passages(
    questions: Sequence[Question], retriever: Retriever | None, k: int, most: int | None = None
) -> list[Question]:
    """Return the questions; those without passages get the `k` best that one call of the retriever finds, and of their
    own passages the others keep the first `most` (None: all).

    Retrieved passages have no gold indices. UserError for a question without passages if there is no retriever.
    """
    questions = [_first_passages(question, most) for question in questions]
    bare = [question for question in questions if not question.passages]
    if not bare:
        return list(questions)
    if retriever is None:
        raise UserError(
            f"question {bare[0].id} has no passages, and there is no index or server to search; give questions "
            "with passages, or an index (retrieval.index, --index) or a server (retrieval.url)"
        )
    found = iter(retriever.search([question.question for question in bare], k))
    return [
        question
        if question.passages
        else replace(question, passages=tuple(hit.passage for hit in next(found)), gold_indices=None)
        for question in questions
    ]


def _first_passages(question: Question, most: int | None) -> Question:
    if most is None or len(question.passages) <= most:
        return question
    gold = question.gold_indices
    kept = None if gold is None else tuple(number for number in gold if number <= most)
    return replace(question, passages=question.passages[:most], gold_indices=kept)


def noise_pool(questions: Sequence[Question], retriever: Retriever | None) -> Sequence[Passage]:
    """Return the passages from which noise is drawn: the corpus if the retriever has it in this process (a server keeps
    its own), else the passages of all questions."""
    corpus: Sequence[Passage] | None = getattr(retriever, "corpus", None)
    return [passage for question in questions for passage in question.passages] if corpus is None else corpus


def with_noise(questions: Sequence[Question], pool: Sequence[Passage], count: int, seed: int) -> list[Question]:
    """Add `count` irrelevant passages to each question, as in EviOmni's noise test, at places drawn by (seed,
    question).

    A passage of `pool` is irrelevant if the question does not show it yet and it contains none of the gold answers.
    Gold indices follow their passages. UserError if the pool has too few.
    """
    return [_noisy(question, pool, count, seed) for question in questions] if count else list(questions)


def _noisy(question: Question, pool: Sequence[Passage], count: int, seed: int) -> Question:
    rng = Random(f"noise {seed} {question.id}")
    shown = {passage.text for passage in question.passages}
    added: list[Passage] = []
    for _ in range(100 * count):  # drawn rather than filtered, because the pool may be all of Wikipedia
        if len(added) == count:
            break
        passage = pool[rng.randrange(len(pool))] if pool else None
        if passage and passage.text not in shown and not contains_answer(passage.text, question.golds):
            added.append(passage)
            shown.add(passage.text)
    if len(added) < count:
        raise UserError(
            f"question {question.id}: found only {len(added)} of {count} irrelevant passages among {len(pool)}; "
            "ask for less noise, or draw from a larger corpus"
        )
    gold = set(question.gold_indices or ())
    entries = [(passage, number in gold) for number, passage in enumerate(question.passages, start=1)]
    for passage in added:
        entries.insert(rng.randrange(len(entries) + 1), (passage, False))
    return replace(
        question,
        passages=tuple(passage for passage, _ in entries),
        gold_indices=None
        if question.gold_indices is None
        else tuple(number for number, (_, is_gold) in enumerate(entries, start=1) if is_gold),
    )
