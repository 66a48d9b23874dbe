"""Statistics of a question file, read as training reads it, and single questions as readable text."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.retrieval.datasets.formats import detect
from thresher.retrieval.questions import Question, iter_questions
from thresher.rewards.measures import ndcg_at, recall_at
from thresher.rewards.text import YES_NO, contains_answer, normalize_answer

READABLE = ("native", "flashrag", "nq-open", "plain", "bamboogle")
BREAKS = re.compile(r"[\t-\r]+")  # line breaks and tabs
SHOWN_WORDS = 40
SHOWN_GOLDS = 8
KINDS = ("hops", "type", "level")  # keys of the metadata by which multi-hop sets classify a question
MUSIQUE_ID = re.compile(r"(\d+)hop\d*__")
CUTOFF = 5  # ranks of Recall and NDCG
LONG_GOLD = 20  # words; no policy is asked for longer answers, so longer golds are most likely errors in the set


def summarize(path: str | Path, on_question: Callable[[int], None] = lambda questions: None) -> dict[str, Any]:
    """Return statistics of a question file, read as training reads it. Lengths are in words.

    "passages as ranked": Recall@5 and NDCG@5 of the questions' passages in their order; passages with a gold string are
    relevant; means over questions with passages. "kinds": the same for each value of hops, type and level.
    """
    fmt = detect(path)
    if fmt.name not in READABLE:
        raise UserError(f"{path}: looks like {fmt.title}; convert it to our records first, with thresher data convert")
    count: Counter[str] = Counter()
    sizes: dict[str, list[int]] = {name: [] for name in ("golds", "passages", "gold passages")}
    words: dict[str, list[int]] = {name: [] for name in ("question", "first gold", "passage")}
    rankings: dict[str, list[tuple[float, float]]] = {"all": []}
    kinds: Counter[str] = Counter()
    asked: set[str] = set()
    distinct: set[int] = set()
    for question in iter_questions(path):
        count["questions"] += 1
        on_question(count["questions"])
        normal = " ".join(question.question.lower().split())
        count["questions asked before"] += normal in asked
        asked.add(normal)
        _count_golds(question, count)
        _count_passages(question, count, distinct)
        named = kinds_of(question)
        kinds.update(named)
        if question.passages:
            relevant = [contains_answer(passage.text, question.golds) for passage in question.passages]
            for name in ("all", *named):
                rankings.setdefault(name, []).append((recall_at(relevant, CUTOFF), ndcg_at(relevant, CUTOFF)))
        sizes["golds"].append(len(question.golds))
        sizes["passages"].append(len(question.passages))
        if question.gold_indices is not None:
            sizes["gold passages"].append(len(question.gold_indices))
        words["question"].append(_words(question.question))
        words["first gold"].append(_words(question.golds[0]))
        words["passage"].extend(_words(passage.text) for passage in question.passages)
    return {
        "format": fmt.name,
        **count,
        "distinct passages": len(distinct),
        "passages as ranked": _ranked(rankings["all"]),
        "kinds": {name: {"questions": kinds[name], **_ranked(rankings.get(name, []))} for name in sorted(kinds)},
        "per question": {name: spread(values) for name, values in sizes.items()},
        "words": {name: spread(values) for name, values in words.items()},
    }


def kinds_of(question: Question) -> list[str]:
    """Return a question's kinds, from its metadata and id: "hops 2", "type bridge", "level hard"."""
    said = {key: question.metadata[key] for key in KINDS if isinstance(question.metadata.get(key), str | int)}
    if "hops" not in said and (found := MUSIQUE_ID.match(question.id)):
        said["hops"] = found[1]
    return [f"{key} {value}" for key, value in said.items()]


def _ranked(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the means of Recall and NDCG; an empty dict if no question has passages."""
    names = (f"recall@{CUTOFF}", f"ndcg@{CUTOFF}")
    return {name: sum(values) / len(values) for name, values in zip(names, zip(*pairs, strict=True), strict=False)}


def spread(values: Sequence[int]) -> dict[str, float] | None:
    """Return minimum, mean, median, 95th percentile (nearest rank) and maximum; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "min": ordered[0],
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[round(0.5 * last)],
        "p95": ordered[round(0.95 * last)],
        "max": ordered[-1],
    }


def excerpt(question: Question, *, whole: bool = False) -> str:
    """Return a question as lines of text: golds, metadata, and passages, with a star for gold ones. It is shortened
    unless `whole`. Line breaks and tabs become spaces; other control characters are kept."""
    lines = [f"id        {question.id}", f"question  {question.question}"]
    golds = question.golds if whole else question.golds[:SHOWN_GOLDS]
    lines += [f"{'' if number else 'golds':<9} {gold if whole else _cut(gold)}" for number, gold in enumerate(golds)]
    if len(golds) < len(question.golds):
        lines.append(f"{'':<9} .. and {len(question.golds) - len(golds)} more")
    for key, value in question.metadata.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"  {key}: {text if whole else _cut(text)}")
    gold = question.gold_indices
    if question.passages:
        known = "which of them are gold is not known" if gold is None else f"{len(gold)} of them gold (*)"
        lines.append(f"passages  {len(question.passages)}, {known}")
    for number, passage in enumerate(question.passages, 1):
        mark = "*" if number in (gold or ()) else " "
        lines.append(
            f"{mark}{number:>3}  [{passage.id}] {passage.title}: {passage.text if whole else _cut(passage.text)}"
        )
    return "\n".join(BREAKS.sub(" ", line) for line in lines)


def _count_golds(question: Question, count: Counter[str]) -> None:
    normal = [normalize_answer(gold) for gold in question.golds]
    count["golds that no answer can match"] += normal.count("")
    count["questions that no answer can match"] += not any(normal)
    count["golds twice"] += len(normal) - len(set(normal))
    count[f"golds of more than {LONG_GOLD} words"] += sum(_words(gold) > LONG_GOLD for gold in question.golds)
    count["yes/no questions"] += bool(YES_NO & set(normal))


def _count_passages(question: Question, count: Counter[str], distinct: set[int]) -> None:
    contents = [hash((passage.title, passage.text)) for passage in question.passages]
    distinct.update(contents)
    count["passages"] += len(contents)
    count["passages twice in a question"] += len(contents) - len(set(contents))
    count["questions with passages"] += bool(contents)
    count["questions with gold indices"] += question.gold_indices is not None
    count["questions with no passage gold"] += question.gold_indices == ()
    count["questions with a gold passage among theirs"] += bool(question.gold_indices)
    text = "\n".join(f"{passage.title} {passage.text}" for passage in question.passages)
    count["questions with a gold answer in their passages"] += contains_answer(text, question.golds)


def _words(text: str) -> int:
    return len(text.split())


def _cut(text: str) -> str:
    words = text.split()
    short = " ".join(words[:SHOWN_WORDS])[: SHOWN_WORDS * 12]
    return short if short == " ".join(words) else f"{short} .."
