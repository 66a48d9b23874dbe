"""Readers of the sets of a question and short answers, without passages.

    NQ-open     {"question", "answer": [..]}
    TriviaQA    {"Question", "QuestionId", "Answer": {"Value", "Aliases": [..], "HumanAnswers": [..]}}, under "Data"
                and, from the hub, {"question", "question_id", "answer": {"value", "aliases": [..]}}
    PopQA       {"id", "question", "possible_answers": "[..]", "subj", "prop", ..}, a list written as JSON into a cell
    Bamboogle   a table with the columns Question and Answer; or {"question", "answer"}
    plain       {"question", "answer" or "answers": a string or a list}, whatever else there is

TriviaQA's golds are the value first, then its aliases and the answers of people; the normalised forms of them are left
out, since the measures normalise. So are the web pages and articles that come with it: they are documents, not
passages.
"""

from thresher.common.jsonl import as_object
from thresher.retrieval.datasets.containers import listed
from thresher.retrieval.datasets.row import Row
from thresher.retrieval.questions import GOLD_KEYS, Question

ID_KEYS = ("id", "_id", "qid", "question_id", "idx")
DOCUMENT_KEYS = ("EntityPages", "SearchResults", "entity_pages", "search_results")


def read_plain(row: Row) -> Question:
    """Whatever has a question and an answer, NQ-open included."""
    key = next((key for key in GOLD_KEYS if key in row.fields), "answer")
    return Question(
        id=row.id(*ID_KEYS),
        question=row.question(),
        golds=row.golds(row.fields.get(key)),
        metadata=row.rest(*ID_KEYS, "question", *GOLD_KEYS),
    )


def read_triviaqa(row: Row) -> Question:
    """TriviaQA as its authors publish it; the test set, which has no answers, is skipped."""
    answer = as_object(row.fields.get("Answer") or {}, f'{row.where}: "Answer"')
    return Question(
        id=row.id("QuestionId"),
        question=row.question("Question"),
        golds=row.golds(*(answer.get(key) for key in ("Value", "Aliases", "HumanAnswers"))),
        metadata=row.rest("QuestionId", "Question", "Answer", *DOCUMENT_KEYS),
    )


def read_triviaqa_hub(row: Row) -> Question:
    """TriviaQA from the hub. The value of its test set is "<unk>", which is none."""
    answer = as_object(row.fields.get("answer") or {}, f'{row.where}: "answer"')
    value = answer.get("value")
    return Question(
        id=row.id("question_id", "id"),
        question=row.question(),
        golds=row.golds(None if value == "<unk>" else value, answer.get("aliases")),
        metadata=row.rest("question_id", "id", "question", "answer", *DOCUMENT_KEYS),
    )


def read_popqa(row: Row) -> Question:
    """PopQA; its possible answers hold the object and the names it also goes by."""
    answers = row.fields.get("possible_answers")
    return Question(
        id=row.id("id"),
        question=row.question(),
        golds=row.golds(listed(answers, f'{row.where}: "possible_answers"') if answers else None),
        metadata=row.rest("id", "question", "possible_answers"),
    )


def read_bamboogle(row: Row) -> Question:
    """Bamboogle, its columns spelled with capitals or without."""
    question = "Question" if "Question" in row.fields else "question"
    answer = "Answer" if "Answer" in row.fields else "answer"
    return Question(
        id=row.id(*ID_KEYS),
        question=row.question(question),
        golds=row.golds(row.fields.get(answer)),
        metadata=row.rest(*ID_KEYS, question, answer),
    )
