"""Readers of the sets whose questions come with numbered paragraphs and supporting facts.

    HotpotQA   {"_id", "question", "answer", "type", "level",
                "supporting_facts": [[title, sentence], ..], "context": [[title, [sentence, ..]], ..]}
               and, from the hub, "id" and {"title": [..], "sent_id": [..]}, {"title": [..], "sentences": [[..], ..]}
    2Wiki      the same, in either shape or with the lists as JSON in strings, and "evidences", "answer_id"
    MuSiQue    {"id", "question", "answer", "answer_aliases", "answerable",
                "paragraphs": [{"idx", "title", "paragraph_text", "is_supporting"}, ..]}

A paragraph is gold if it holds a supporting fact: if the facts name its title, or MuSiQue marks it. Which sentence of
it was meant is left in the metadata, where it is kept as pairs for both shapes. A title that the facts name and no
paragraph has (HotpotQA's full-wiki setting) is counted; the question stays.
"""

from collections.abc import Sequence

from thresher.common.errors import UserError
from thresher.common.jsonl import Record, as_object, checked_string, json_kind
from thresher.retrieval.data.formats import join_sentences
from thresher.retrieval.datasets.containers import listed, parsed
from thresher.retrieval.datasets.row import Paragraph, Row, Skipped
from thresher.retrieval.questions import Question

UNANSWERABLE = "not answerable from its paragraphs"
FACT_ABSENT = "supporting titles that no given paragraph has"
SENTENCE_KEYS = ("sentences", "content")  # the hub's, and FlashRAG's for 2Wiki


def read_hotpotqa(row: Row) -> Question:
    """HotpotQA in either shape."""
    return _with_context(row, row.golds(row.fields.get("answer")))


def read_2wiki(row: Row) -> Question:
    """2Wiki; the golds are the answer and, where a file of aliases was given, the other names of its "answer_id"."""
    aliases = row.aliases.get(str(row.fields.get("answer_id")), ())
    return _with_context(row, row.golds(row.fields.get("answer"), aliases))


def read_musique(row: Row) -> Question:
    """MuSiQue; the questions of its full version that its paragraphs do not answer are skipped."""
    if row.fields.get("answerable") is False:
        raise Skipped(UNANSWERABLE)
    passages, gold_indices = row.given(
        _musique_paragraph(item, f'{row.where}: "paragraphs", item {number}')
        for number, item in enumerate(listed(row.fields.get("paragraphs"), f'{row.where}: "paragraphs"'), 1)
    )
    return Question(
        id=row.id("id", "_id"),
        question=row.question(),
        golds=row.golds(row.fields.get("answer"), row.fields.get("answer_aliases")),
        metadata=row.rest("id", "_id", "question", "answer", "answer_aliases", "paragraphs", "answerable"),
        passages=passages,
        gold_indices=gold_indices,
    )


def given_paragraphs(row: Row, context: object, facts: object) -> tuple[list[Paragraph], list[list[object]] | None]:
    """Paragraphs of a context in either shape, and the supporting facts as pairs [title, sentence from 0], None where
    there are none to know (test sets)."""
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


def _with_context(row: Row, golds: tuple[str, ...]) -> Question:
    paragraphs, facts = given_paragraphs(row, row.fields.get("context"), row.fields.get("supporting_facts"))
    passages, gold_indices = row.given(paragraphs)
    metadata = row.rest("_id", "id", "question", "answer", "context", "supporting_facts")
    return Question(
        id=row.id("_id", "id"),
        question=row.question(),
        golds=golds,
        metadata=metadata if facts is None else {**metadata, "supporting_facts": facts},
        passages=passages,
        gold_indices=gold_indices,
    )


def _pairs(value: object, others: Sequence[str], where: str) -> list[tuple[str, object]]:
    """(title, other) from [[title, other], ..], from {"title": [..], other: [..]}, or from either as JSON in a string.
    UserError, starting with `where`."""
    found = parsed(value, where)
    if isinstance(found, dict):
        other = next((key for key in others if key in found), others[0])
        titles, values = (listed(found.get(key), f'{where}, "{key}",') for key in ("title", other))
        if len(titles) != len(values):
            raise UserError(f'{where}: {len(titles)} titles beside {len(values)} in "{other}"; fix this record')
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
