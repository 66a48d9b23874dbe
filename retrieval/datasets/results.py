"""Readers of what other programs write: our own records, FlashRAG's, DPR's results and verl's parquet.

    native     {"id", "question", "golden_answers", "passages", "gold_indices", "metadata"}
    FlashRAG   {"id", "question", "golden_answers", "metadata"}; a HotpotQA context in its metadata becomes passages
    DPR        {"question", "answers", "ctxs": [{"id", "title", "text", "score", "has_answer"}, ..]}
    verl       {"prompt": [{"role", "content"}, ..], "reward_model": {"ground_truth": ..}, "data_source", "extra_info"}

DPR's has_answer says that a string of the answer occurs in a passage, by whatever way; it is not an annotated
supporting fact, so it goes, with the scores, into the metadata, as a list along the passages, and the gold indices stay
unknown. "isgold", which some files add for the passage the annotator read, does make them.

verl's ground truth is a string, a list, or {"target": either}; a string may hold alternatives joined by
<|answer_split|>. The question is the record's "question" if it has one, else that of "extra_info", else what the last
user message says, which is the question alone only where the set was written without instructions: look with
`thresher data show`.
"""

from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import as_object, checked_string, id_field
from thresher.retrieval.datasets.containers import listed, plain
from thresher.retrieval.datasets.multihop import SENTENCE_KEYS, given_paragraphs
from thresher.retrieval.datasets.row import NO_QUESTION, Paragraph, Row, Skipped
from thresher.retrieval.questions import Question, to_question

ANSWER_SPLIT = "<|answer_split|>"
GOLD_FLAGS = ("isgold", "is_gold")
HAS_ANSWER = ("has_answer", "hasanswer")


def read_native(row: Row) -> Question:
    """Our own records, checked as wherever they are read."""
    question = to_question(row.fields, row.id("id"), row.where)
    return Question(
        question.id,
        question.question,
        question.golds,
        plain(question.metadata),
        question.passages,
        question.gold_indices,
    )


def read_flashrag(row: Row) -> Question:
    """FlashRAG's records."""
    metadata = row.rest("id", "question", "golden_answers")
    paragraphs: list[Paragraph] = []
    context = metadata.get("context")
    if isinstance(context, dict) and "title" in context and any(key in context for key in SENTENCE_KEYS):
        paragraphs, facts = given_paragraphs(row, context, metadata.get("supporting_facts"))
        del metadata["context"]
        metadata |= {} if facts is None else {"supporting_facts": facts}
    passages, gold_indices = row.given(paragraphs)
    return Question(
        id=row.id("id"),
        question=row.question(),
        golds=row.golds(row.fields.get("golden_answers")),
        metadata=metadata,
        passages=passages,
        gold_indices=gold_indices,
    )


def read_dpr(row: Row) -> Question:
    """A question and what a retriever found for it, best first."""
    place = f'{row.where}: "ctxs"'
    contexts = [
        as_object(item, f"{place}, item {number}")
        for number, item in enumerate(listed(row.fields.get("ctxs"), place), 1)
    ]
    with_text = [item for item in contexts if str(item.get("text") or "").strip()]
    passages, gold_indices = row.given(
        _dpr_paragraph(item, f"{place}, item {number}") for number, item in enumerate(contexts, 1)
    )
    metadata = row.rest("id", "_id", "q_id", "question", "answers", "answer", "ctxs")
    for name, keys in (("scores", ("score",)), ("has_answer", HAS_ANSWER)):
        values = [next((item[key] for key in keys if key in item), None) for item in with_text]
        if any(value is not None for value in values):
            metadata[name] = plain(values)
    return Question(
        id=row.id("id", "_id", "q_id"),
        question=row.question(),
        golds=row.golds(row.fields.get("answers", row.fields.get("answer"))),
        metadata=metadata,
        passages=passages,
        gold_indices=gold_indices,
    )


def read_verl(row: Row) -> Question:
    """A row of verl's training files, those of Search-R1 and DeepResearcher among them."""
    extra = as_object(row.fields.get("extra_info") or {}, f'{row.where}: "extra_info"')
    model = as_object(row.fields.get("reward_model"), f'{row.where}: "reward_model"')
    truth = model.get("ground_truth")
    target = truth.get("target") if isinstance(truth, dict) else truth
    golds = [
        part for item in _as_list(target) for part in (item.split(ANSWER_SPLIT) if isinstance(item, str) else [item])
    ]
    index = extra.get("index")
    has_own = row.fields.get("id") is not None or index is None
    return Question(
        id=row.id("id") if has_own else id_field(extra, row.number, f'{row.where}: "extra_info"', key="index"),
        question=_verl_question(row, extra),
        golds=row.golds(golds),
        metadata=row.rest("id", "question", "golden_answers", "prompt", "reward_model"),
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


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
