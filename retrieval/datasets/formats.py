"""Formats of question sets: their names, their records, and the conversion of a record to a `Question`.

    native      {"id", "question", "golden_answers", "passages", "gold_indices", "metadata"}
    verl        {"prompt": [{"role", "content"}, ..], "reward_model": {"ground_truth": ..}, "data_source", "extra_info"}
    HotpotQA    {"_id", "question", "answer", "type", "level",
                 "supporting_facts": [[title, sentence], ..], "context": [[title, [sentence, ..]], ..]}
                and, from the hub, "id" and {"title": [..], "sent_id": [..]}, {"title": [..], "sentences": [[..], ..]}
    2Wiki       the same, in either shape or with the lists as JSON in strings, and "evidences", "answer_id"
    MuSiQue     {"id", "question", "answer", "answer_aliases", "answerable",
                 "paragraphs": [{"idx", "title", "paragraph_text", "is_supporting"}, ..]}
    DPR         {"question", "answers", "ctxs": [{"id", "title", "text", "score", "has_answer"}, ..]}
    TriviaQA    {"Question", "QuestionId", "Answer": {"Value", "Aliases": [..], "HumanAnswers": [..]}}, under "Data"
                and, from the hub, {"question", "question_id", "answer": {"value", "aliases": [..]}}
    PopQA       {"id", "question", "possible_answers": "[..]", "subj", "prop", ..}, with a list as JSON in a cell
    FlashRAG    {"id", "question", "golden_answers", "metadata"}; a HotpotQA context in its metadata becomes passages
    Bamboogle   a table with the columns Question and Answer; or {"question", "answer"}
    NQ-open     {"question", "answer": [..]}
    BrowseComp-Plus  see browsecomp.py; its documents are kept in the metadata, as ids of the corpus
    plain       {"question", "answer" or "answers": a string or a list}, with any other keys

A reader returns a `Question`, or raises `Skipped` (a well-formed record without a question, counted by reason) or
UserError (malformed). A paragraph is gold if the supporting facts name its title or MuSiQue marks it; the supporting
sentences are kept in the metadata as pairs. A title of the facts that no paragraph has (HotpotQA's full-wiki setting)
is counted. DPR's has_answer, which is not an annotated fact, is kept in the metadata with the scores; "isgold" gives
the gold indices. verl's ground truth is a string, a list, or {"target": either}; a string may contain alternatives
joined by <|answer_split|>. Its question is "question", else that of "extra_info", else the last user message. To add a
format, write a function Row -> Question, and give it a row in FORMATS.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import Record, as_object, checked_string, id_field, json_kind
from thresher.retrieval.datasets.browsecomp import is_obfuscated, reveal
from thresher.retrieval.datasets.containers import iter_rows, listed, parsed, plain
from thresher.retrieval.passages import Passage, join_sentences
from thresher.retrieval.questions import GOLD_KEYS, NAMED_DOCUMENTS, Question, to_question

UNANSWERABLE = "not answerable from its paragraphs"
FACT_ABSENT = "supporting titles that no given paragraph has"
NO_QUESTION = "no question"
NO_ANSWER = "no gold answer"
EMPTY_PARAGRAPH = "paragraphs without text, left out"
SENTENCE_KEYS = ("sentences", "content")  # the hub's, and FlashRAG's for 2Wiki
ID_KEYS = ("id", "_id", "qid", "question_id", "idx")
DOCUMENT_KEYS = ("EntityPages", "SearchResults", "entity_pages", "search_results")
ANSWER_SPLIT = "<|answer_split|>"
GOLD_FLAGS = ("isgold", "is_gold")
HAS_ANSWER = ("has_answer", "hasanswer")
# Keys that the richer sets have in addition to the question and its answers, and those that ours has.
RICHER = ("context", "paragraphs", "ctxs", "possible_answers", "reward_model")
GIVEN = ("passages", "gold_indices")
TEXT_KEYS = ("text", "contents")


class Skipped(Exception):
    """Raised for a record without a question. The message is the reason, in the same words for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A paragraph given with a question. gold: has a supporting fact, None if unknown. id: None if it has none."""

    title: str
    text: str
    gold: bool | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record. number: its position in the source, from 0. aliases: other names of an answer, by its id (2Wiki).
    canary: the key to BrowseComp-Plus. notes: counts of omissions."""

    fields: Record
    where: str
    number: int = 0
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    canary: str | None = None
    notes: Counter[str] = field(default_factory=Counter)

    def id(self, *keys: str) -> str:
        """Return the id under the first of `keys` that is present and not null, else the row's number."""
        key = next((key for key in keys if self.fields.get(key) is not None), None)
        return str(self.number) if key is None else id_field(self.fields, self.number, self.where, key=key)

    def question(self, key: str = "question") -> str:
        """Return the question, without surrounding white space."""
        value = self.fields.get(key)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise Skipped(NO_QUESTION)
        return checked_string(value, f'{self.where}: "{key}"').strip()

    def golds(self, *values: object) -> tuple[str, ...]:
        """Return the distinct gold answers in strings, numbers and lists of them: stripped, no blank, null or NaN."""
        golds: dict[str, None] = {}
        for value in values:
            for item in value if isinstance(value, list | tuple) else [value]:
                if item is None or (isinstance(item, float) and not math.isfinite(item)):  # pandas writes NaN for null
                    continue
                if isinstance(item, int | float) and not isinstance(item, bool):
                    item = str(item)
                if not isinstance(item, str):
                    raise UserError(
                        f"{self.where}: a gold answer should be a string, found {json_kind(item)}; fix this record"
                    )
                if item.strip():
                    golds[checked_string(item, f"{self.where}: a gold answer").strip()] = None
        if not golds:
            raise Skipped(NO_ANSWER)
        return tuple(golds)

    def given(self, paragraphs: Iterable[Paragraph]) -> tuple[tuple[Passage, ...], tuple[int, ...] | None]:
        """Return passages and the numbers of the gold ones, None if unknown. Counts blank paragraphs in `notes`."""
        passages, gold, known = [], [], False
        for paragraph in paragraphs:
            known = known or paragraph.gold is not None
            if not paragraph.text.strip():
                self.notes[EMPTY_PARAGRAPH] += 1
                continue
            id_ = paragraph.id or content_id(paragraph.title, paragraph.text)
            passages.append(Passage(id_, paragraph.title, paragraph.text))
            if paragraph.gold:
                gold.append(len(passages))
        return tuple(passages), tuple(gold) if known else None

    def rest(self, *used: str) -> dict[str, Any]:
        """Return all fields except `used` and empty ones, as metadata; "metadata" itself is flattened."""
        left = {key: value for key, value in self.fields.items() if key not in used}
        inner = left.get("metadata")
        if isinstance(inner, dict):
            left = {**inner, **{key: value for key, value in left.items() if key != "metadata"}}
        return {str(key): plain(value) for key, value in left.items() if value not in (None, "", [], {})}

    def read(
        self,
        ids: Sequence[str],
        used: Sequence[str],
        golds: Sequence[object],
        paragraphs: Iterable[Paragraph] = (),
        *,
        question: str = "question",
        more: Mapping[str, Any] | None = None,
    ) -> Question:
        """Return the question of this record. Its metadata is `rest` of all keys used, and `more`."""
        passages, gold_indices = self.given(paragraphs)
        return Question(
            id=self.id(*ids),
            question=self.question(question),
            golds=self.golds(*golds),
            metadata={**self.rest(*ids, question, *used), **(more or {})},
            passages=passages,
            gold_indices=gold_indices,
        )


def content_id(title: str, text: str) -> str:
    """Return an id for a passage: 16 hexadecimal digits of a hash of its content."""
    content = f"{len(title)} {title} {text}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:16]


def read_native(row: Row) -> Question:
    """Read our own records, with the same checks as everywhere."""
    question = to_question(row.fields, row.id("id"), row.where)
    return replace(question, metadata=plain(question.metadata))


def read_hotpotqa(row: Row) -> Question:
    """Read HotpotQA and 2Wiki in either shape. The golds are the answer and the aliases of 2Wiki's "answer_id"."""
    fields = row.fields
    aliases = row.aliases.get(str(fields.get("answer_id")), ()) if "evidences" in fields else ()
    golds = row.golds(fields.get("answer"), aliases)
    paragraphs, facts = given_paragraphs(row, fields.get("context"), fields.get("supporting_facts"))
    used = ("answer", "context", "supporting_facts")
    return row.read(("_id", "id"), used, golds, paragraphs, more={"supporting_facts": facts} if facts else None)


def read_musique(row: Row) -> Question:
    """Read MuSiQue; in its full version, questions that their paragraphs do not answer are skipped."""
    fields, place = row.fields, f'{row.where}: "paragraphs"'
    if fields.get("answerable") is False:
        raise Skipped(UNANSWERABLE)
    paragraphs = (
        _musique_paragraph(item, f"{place}, item {number}")
        for number, item in enumerate(listed(fields.get("paragraphs"), place), 1)
    )
    golds = (fields.get("answer"), fields.get("answer_aliases"))
    return row.read(("id", "_id"), ("answer", "answer_aliases", "paragraphs", "answerable"), golds, paragraphs)


def read_flashrag(row: Row) -> Question:
    """Read FlashRAG's records."""
    metadata = row.rest("id", "question", "golden_answers")
    context = metadata.get("context")
    paragraphs: list[Paragraph] = []
    if isinstance(context, dict) and "title" in context and any(key in context for key in SENTENCE_KEYS):
        paragraphs, facts = given_paragraphs(row, context, metadata.get("supporting_facts"))
        del metadata["context"]
        metadata |= {} if facts is None else {"supporting_facts": facts}
    question = row.read(("id",), (), (row.fields.get("golden_answers"),), paragraphs)
    return replace(question, metadata=metadata)


def read_dpr(row: Row) -> Question:
    """Read a question and the passages that a retriever found for it, best first."""
    place = f'{row.where}: "ctxs"'
    contexts = [
        as_object(item, f"{place}, item {number}")
        for number, item in enumerate(listed(row.fields.get("ctxs"), place), 1)
    ]
    with_text = [item for item in contexts if str(item.get("text") or "").strip()]
    along = {}
    for name, keys in (("scores", ("score",)), ("has_answer", HAS_ANSWER)):
        values = [next((item[key] for key in keys if key in item), None) for item in with_text]
        if any(value is not None for value in values):
            along[name] = plain(values)
    paragraphs = (_dpr_paragraph(item, f"{place}, item {number}") for number, item in enumerate(contexts, 1))
    golds = (row.fields.get("answers", row.fields.get("answer")),)
    return row.read(("id", "_id", "q_id"), ("answers", "answer", "ctxs"), golds, paragraphs, more=along)


def read_verl(row: Row) -> Question:
    """Read a row of verl's training files, which include those of Search-R1 and DeepResearcher."""
    extra = as_object(row.fields.get("extra_info") or {}, f'{row.where}: "extra_info"')
    model = as_object(row.fields.get("reward_model"), f'{row.where}: "reward_model"')
    truth = model.get("ground_truth")
    target = truth.get("target") if isinstance(truth, dict) else truth
    golds = [
        part
        for item in (target if isinstance(target, list) else [target])
        for part in (item.split(ANSWER_SPLIT) if isinstance(item, str) else [item])
    ]
    has_own = row.fields.get("id") is not None or extra.get("index") is None
    return Question(
        id=row.id("id") if has_own else id_field(extra, row.number, f'{row.where}: "extra_info"', key="index"),
        question=_verl_question(row, extra),
        golds=row.golds(golds),
        metadata=row.rest("id", "question", "golden_answers", "prompt", "reward_model"),
    )


def read_triviaqa(row: Row) -> Question:
    """Read TriviaQA as its authors publish it; the test set, which has no answers, is skipped."""
    answer = as_object(row.fields.get("Answer") or {}, f'{row.where}: "Answer"')
    golds = [answer.get(key) for key in ("Value", "Aliases", "HumanAnswers")]
    return row.read(("QuestionId",), ("Answer", *DOCUMENT_KEYS), golds, question="Question")


def read_triviaqa_hub(row: Row) -> Question:
    """Read TriviaQA from the hub. The value "<unk>" of its test set is not an answer."""
    answer = as_object(row.fields.get("answer") or {}, f'{row.where}: "answer"')
    value = answer.get("value")
    golds = (None if value == "<unk>" else value, answer.get("aliases"))
    return row.read(("question_id", "id"), ("answer", *DOCUMENT_KEYS), golds)


def read_popqa(row: Row) -> Question:
    """Read PopQA; its possible answers are the object and its other names."""
    answers = row.fields.get("possible_answers")
    golds = (listed(answers, f'{row.where}: "possible_answers"') if answers else None,)
    return row.read(("id",), ("possible_answers",), golds)


def read_bamboogle(row: Row) -> Question:
    """Read Bamboogle, whose columns may be capitalised or not."""
    question = "Question" if "Question" in row.fields else "question"
    answer = "Answer" if "Answer" in row.fields else "answer"
    return row.read(ID_KEYS, (answer,), (row.fields.get(answer),), question=question)


def read_browsecomp(row: Row) -> Question:
    """Read BrowseComp-Plus, obfuscated or not. The ids of its evidence and gold documents are put in the metadata."""
    fields = dict(row.fields)
    if row.canary is None and is_obfuscated(fields["query"]):
        raise UserError(
            f'{row.where}: "query" is obfuscated; give thresher data convert --canary TEXT, the line at the end of the '
            "data set's card"
        )
    for key in ("query", "answer"):
        fields[key] = reveal(fields[key], row.canary, f'{row.where}: "{key}"')
    named = {key: _document_ids(row, key) for key in NAMED_DOCUMENTS}
    used = ("answer", "negative_docs", *NAMED_DOCUMENTS)
    return replace(row, fields=fields).read(("query_id",), used, (fields["answer"],), question="query", more=named)


def _document_ids(row: Row, key: str) -> list[str]:
    ids: dict[str, None] = {}
    for number, item in enumerate(listed(row.fields.get(key), f'{row.where}: "{key}"'), 1):
        place = f'{row.where}: "{key}", item {number}'
        id_ = reveal(as_object(item, place).get("docid"), row.canary, f'{place}: "docid"')
        ids[id_field({"docid": id_}, 0, place, key="docid")] = None
    return list(ids)


def read_plain(row: Row) -> Question:
    """Read any record with a question and an answer, including NQ-open's."""
    key = next((key for key in GOLD_KEYS if key in row.fields), "answer")
    return row.read(ID_KEYS, GOLD_KEYS, (row.fields.get(key),))


def given_paragraphs(row: Row, context: object, facts: object) -> tuple[list[Paragraph], list[list[object]] | None]:
    """Return the paragraphs of a context in either shape, and the supporting facts. These are [title, sentence from 0],
    or None if there are none (test sets)."""
    pairs = None if facts is None else _pairs(facts, ("sent_id",), f'{row.where}: "supporting_facts"')
    gold_titles = None if not pairs else {title for title, _ in pairs}
    paragraphs = []
    for title, sentences in _pairs(context, SENTENCE_KEYS, f'{row.where}: "context"'):
        lines = [sentences] if isinstance(sentences, str) else sentences
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise UserError(f'{row.where}: "context": the sentences of {title!r} should be strings; fix this record')
        text = checked_string(join_sentences(lines), f'{row.where}: "context"', may_be_empty=True)
        gold = None if gold_titles is None else title in gold_titles
        paragraphs.append(Paragraph(title=title, text=text, gold=gold))
    if gold_titles is not None:
        row.notes[FACT_ABSENT] += len(gold_titles - {paragraph.title for paragraph in paragraphs})
    return paragraphs, None if not pairs else [list(pair) for pair in pairs]


def _pairs(value: object, others: Sequence[str], where: str) -> list[tuple[str, object]]:
    """Return (title, other) from [[title, other], ..] or {"title": [..], other: [..]}, or either as JSON."""
    found = parsed(value, where)
    if isinstance(found, dict):
        other = next((key for key in others if key in found), others[0])
        titles, values = (listed(found.get(key), f'{where}, "{key}",') for key in ("title", other))
        if len(titles) != len(values):
            raise UserError(f'{where}: {len(titles)} titles but {len(values)} in "{other}"; fix this record')
        pairs = list(zip(titles, values, strict=True))
    elif isinstance(found, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in found):
        pairs = [(pair[0], pair[1]) for pair in found]
    else:
        raise UserError(
            f"{where} should be a list of pairs, or an object of two lists, found {json_kind(found)}; fix this record"
        )
    return [(checked_string(title, f"{where}: a title", may_be_empty=True), other) for title, other in pairs]


def _musique_paragraph(item: object, where: str) -> Paragraph:
    fields: Record = as_object(item, where)
    gold = fields.get("is_supporting")
    if gold is not None and not isinstance(gold, bool):
        raise UserError(f'{where}: "is_supporting" should be true or false, found {json_kind(gold)}; fix this record')
    return Paragraph(
        title=checked_string(fields.get("title", ""), f'{where}: "title"', may_be_empty=True),
        text=checked_string(fields.get("paragraph_text"), f'{where}: "paragraph_text"', may_be_empty=True),
        gold=gold,
    )


def _dpr_paragraph(item: dict[str, Any], where: str) -> Paragraph:
    gold = next((item[key] for key in GOLD_FLAGS if isinstance(item.get(key), bool)), None)
    return Paragraph(
        title=checked_string(item.get("title") or "", f'{where}: "title"', may_be_empty=True),
        text=checked_string(item.get("text") or "", f'{where}: "text"', may_be_empty=True),
        gold=gold,
        id=None if item.get("id") is None else id_field(item, 0, where),
    )


def _verl_question(row: Row, extra: dict[str, Any]) -> str:
    prompt = row.fields.get("prompt")
    said = [prompt] if isinstance(prompt, str) else []
    if isinstance(prompt, list):
        messages = [as_object(item, f'{row.where}: "prompt"') for item in prompt]
        said = [str(message.get("content") or "") for message in messages if message.get("role") == "user"]
    for value in (row.fields.get("question"), extra.get("question"), *said[-1:]):
        if isinstance(value, str) and value.strip():
            return checked_string(value, f"{row.where}: the question").strip()
    if prompt is not None and not isinstance(prompt, str | list):
        raise UserError(f'{row.where}: "prompt" should be a list of messages or a string; fix this record')
    raise Skipped(NO_QUESTION)


@dataclass(frozen=True, slots=True)
class QuestionFormat:
    """A format of published questions. title: its name in a sentence. fits: whether `read` accepts a record. looks:
    whether a record that fits is more likely in this format than in one further down the table; None for always."""

    name: str
    title: str
    read: Callable[[Row], Question]
    fits: Callable[[Record], bool]
    looks: Callable[[Record], bool] | None = None

    def claims(self, record: Record) -> bool:
        """Return whether a file with this first record is read in this format."""
        return self.fits(record) and (self.looks is None or self.looks(record))


def _asks(record: Record) -> bool:
    return "question" in record


def _has(record: Record, keys: Iterable[str]) -> bool:
    return any(key in record for key in keys)


def _asks_with(
    key: str, kinds: Any = object, *, also: str = "", without: Sequence[str] = ()
) -> Callable[[Record], bool]:
    """Return a test for records with a question, `key` with a value of `kinds`, `also`, and none of `without`."""

    def fits(record: Record) -> bool:
        fields = _asks(record) and key in record and (not also or also in record)
        return fields and isinstance(record[key], kinds) and not _has(record, without)

    return fits


def _is_answered(record: Record) -> bool:
    return _asks(record) and any(isinstance(record.get(key), str | list) for key in GOLD_KEYS)


def _is_native(record: Record) -> bool:
    return _is_answered(record) and not _has(record, RICHER)


def _is_plain(record: Record) -> bool:
    return _is_answered(record) and not _has(record, (*RICHER, *GIVEN))


def _is_verl(record: Record) -> bool:
    return isinstance(record.get("reward_model"), dict) and "ground_truth" in record["reward_model"]


def _is_trivia(record: Record) -> bool:
    return "Question" in record and "QuestionId" in record


def _is_bamboogle(record: Record) -> bool:
    if "Question" in record and isinstance(record.get("Answer"), str):
        return True
    return _asks(record) and isinstance(record.get("answer"), str) and not _has(record, (*RICHER, *GIVEN))


def _is_browsecomp(record: Record) -> bool:
    return record.keys() >= {"query_id", "query", "answer"} and _has(record, NAMED_DOCUMENTS)


def _is_bare(record: Record) -> bool:
    return record.keys() <= {"id", "_id", "question", "answer"}


FORMATS = (
    QuestionFormat("native", "our own records", read_native, _is_native, lambda r: _has(r, GIVEN)),
    QuestionFormat("verl", "verl's training rows", read_verl, _is_verl),
    QuestionFormat(
        "2wiki", "2WikiMultiHopQA", read_hotpotqa, _asks_with("context", list | dict | str, also="evidences")
    ),
    QuestionFormat(
        "hotpotqa",
        "HotpotQA as its authors publish it (lists of pairs)",
        read_hotpotqa,
        _asks_with("context", list, without=("evidences",)),
    ),
    QuestionFormat(
        "hotpotqa-hub",
        "HotpotQA from the hub (objects of lists)",
        read_hotpotqa,
        _asks_with("context", dict, without=("evidences",)),
    ),
    QuestionFormat("musique", "MuSiQue", read_musique, _asks_with("paragraphs", list | str)),
    QuestionFormat("dpr", "DPR's retrieval results", read_dpr, _asks_with("ctxs", list)),
    QuestionFormat("triviaqa", "TriviaQA as its authors publish it", read_triviaqa, _is_trivia),
    QuestionFormat("triviaqa-hub", "TriviaQA from the hub", read_triviaqa_hub, _asks_with("answer", dict)),
    QuestionFormat("popqa", "PopQA", read_popqa, _asks_with("possible_answers")),
    QuestionFormat("flashrag", "FlashRAG's questions", read_flashrag, _asks_with("golden_answers", without=GIVEN)),
    QuestionFormat("bamboogle", "Bamboogle", read_bamboogle, _is_bamboogle, lambda r: "Question" in r),
    QuestionFormat("nq-open", "NQ-open", read_plain, _asks_with("answer", list, without=(*RICHER, *GIVEN)), _is_bare),
    QuestionFormat("browsecomp-plus", "BrowseComp-Plus", read_browsecomp, _is_browsecomp),
    QuestionFormat("plain", "plain questions and answers", read_plain, _is_plain),
)
NAMES = tuple(fmt.name for fmt in FORMATS)


def find_format(name: str) -> QuestionFormat:
    """Return the format called `name`. UserError if there is none."""
    for fmt in FORMATS:
        if fmt.name == name:
            return fmt
    near = get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose auto or one of {', '.join(NAMES)}"
    raise UserError(f"unknown format {name!r}; {hint}")


def detect(path: str | Path) -> QuestionFormat:
    """Return the format of the first record of `path`. UserError if it is in none of the formats."""
    where, record = next(iter_rows(path), (None, None))
    if where is None or record is None:
        raise UserError(f"{path}: holds no questions; expected at least one")
    fmt = format_of(record)
    if fmt is None:
        raise UserError(f"{where}: {_unlike(record)}")
    return fmt


def format_of(record: Record) -> QuestionFormat | None:
    """Return the first format that claims a record, None if none does."""
    return next((fmt for fmt in FORMATS if fmt.claims(record)), None)


def require(fmt: QuestionFormat, record: Record, where: str) -> None:
    """Raise UserError, starting with `where`, unless `record` fits `fmt`; the error names the likely format."""
    if fmt.fits(record):
        return
    other = format_of(record)
    if other is None:
        raise UserError(f"{where}: {_unlike(record, fmt)}")
    raise UserError(
        f"{where}: expected {fmt.title}, and this record looks like {other.title}; give --format {other.name} for "
        "such a file"
    )


def _unlike(record: Record, fmt: QuestionFormat | None = None) -> str:
    keys = ", ".join(sorted(str(key) for key in record)[:8]) or "none"
    if not _asks(record) and any(key in record for key in TEXT_KEYS):
        return f"a passage of a corpus (keys: {keys}), not a question; give the file that holds the questions"
    expected = "no question set in a known format" if fmt is None else f"not {fmt.title}"
    return (
        f"{expected} (keys: {keys}); the formats are {', '.join(NAMES)}, so convert the file to one of them, the "
        f'simplest being {{"id", "question", "golden_answers": [..]}}'
    )
