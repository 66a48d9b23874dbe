"""Baselines of one prompt: answers from the model's own knowledge, from the question's passages, or from evidence."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path

from thresher.common.errors import UserError
from thresher.common.jsonl import Record, iter_list, string_field
from thresher.common.records import ON_PURPOSE, read_records
from thresher.engine.baselines.common import Options, baseline, calls, reward_of
from thresher.engine.config.tables import Count
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Generate,
    Prompt,
    SubCall,
    System,
    Turn,
    answer_once,
    answer_without_passages,
    read_template,
)
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult, TextSegment
from thresher.rewards.tags import blocks

SUMMARY = read_template(Path(__file__).with_name("sure_summary.txt"), passages=True)
VALIDITY, RANKING = (read_template(Path(__file__).with_name(f"sure_{name}.txt")) for name in ("validity", "ranking"))


def direct(options: Options) -> System:
    """Make the direct baseline: the model answers from its own knowledge."""
    return baseline("direct", options, ("answer",), answer_without_passages)


@dataclass(frozen=True, kw_only=True)
class CotOptions(Options):
    """passages: show the question's passages, or passages retrieved for it."""

    passages: bool = False


def cot(options: CotOptions) -> System:
    """Make the chain-of-thought baseline (Wei et al. 2022): reason step by step, then answer; by default no examples.

    Closed-book as in Search-R1's and Eval-RAR's tables; with `passages`, over documents as in EviOmni's.
    """
    tags = ("think", "answer")
    if not options.passages:
        return baseline("cot", options, tags, answer_without_passages)
    return baseline("cot", options, tags, answer_once, prompt="cot_passages", given=5)


@dataclass(frozen=True, kw_only=True)
class NaiveRagOptions(Options):
    """k: limit on the number of a question's own passages that are shown, and the default of retrieval.k."""

    k: Count = 5


def naive_rag(options: NaiveRagOptions) -> System:
    """Make the naive RAG baseline: the model answers from the k best passages for the question.

    Passages are retrieved before the prompt, with the question as the query. Of a question's own passages the first k
    are shown; `full_passages` is the baseline for data sets that shuffle theirs.
    """

    k = options.k
    return baseline("naive_rag", options, ("answer",), answer_once, prompt="passages", given=k, most_given=k)


def full_passages(options: Options) -> System:
    """Make the full-passages baseline: the model answers from all passages of the question, in their order."""
    return baseline("full_passages", options, ("answer",), answer_once, prompt="passages", given=5)


def extract_only(options: Options) -> System:
    """Make the extract-only baseline: evidence from the passages without a rationale before it, then the answer.

    This is the vanilla evidence of EviOmni's and LEAR's empirical study (Table 1): the same prompt and tags without the
    reasoning, and at most 100 tokens of evidence (`thresher extract --evidence-tokens 100`).
    """
    tags = ("extract", "answer")
    return baseline("extract_only", options, tags, extract_and_answer, given=5, rollout={"max_turns": 2})


def extract_and_answer(question: Question, config: EpisodeConfig) -> Episode:
    yield Prompt(config.template, question.question, question.passages)
    turn = yield Generate(stop=("</extract>",))
    if not turn.stopped_at("</extract>"):
        return "ended"
    turn = yield Generate(stop=("</answer>",))
    return "answered" if turn.inside("answer") else "ended"


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(Options):
    """file: JSONL; every line has an id and evidence (a string, possibly empty)."""

    file: str | None = None


def evidence(options: EvidenceOptions) -> System:
    """Make the baseline that answers from evidence that an extractor took from the question's passages.

    The evidence comes from a file of `thresher extract`, by the question's id. It is the only passage in the prompt of
    `full_passages`, on which a generator is trained (`sft.format = "qa"`); for empty evidence there is no passage. A
    question missing in the file, or evidence longer than rollout.max_passage_tokens (3,072), ends the run.
    """
    if options.file is None:
        raise UserError(
            "baseline evidence: no file to answer from; add --set system.options.file=FILE, which thresher "
            "extract wrote"
        )
    return answers_from(read_evidence(options.file), options.file, options)


def answers_from(evidence: Mapping[str, str], source: str, options: Options | None = None) -> System:
    """Return a system that answers a question from `evidence[question.id]`. source: name of the file for errors."""

    def episode(question: Question, config: EpisodeConfig) -> Episode:
        if question.id not in evidence:
            raise UserError(
                f"{source}: holds no evidence for question {question.id}; extract from these questions first"
            )
        text = evidence[question.id].strip()
        shown = (Passage("evidence", "", text),) if text else ()
        return (yield from answer_once(replace(question, passages=shown), config))

    preset = {"max_turns": 1, "max_passage_tokens": 3072}
    return baseline(
        "evidence", options or Options(), ("answer",), episode, prompt="passages", shows=True, rollout=preset
    )


def read_evidence(path: str | Path) -> dict[str, str]:
    """Return id -> evidence. UserError, naming file and line, for a record without both and for a repeated id."""
    evidence: dict[str, str] = {}
    for where, record in _records(Path(path)):
        id_ = string_field(record, "id", where)
        if id_ in evidence:
            raise UserError(f"{where}: the id {id_!r} was used before; keep one record for each question")
        evidence[id_] = string_field(record, "evidence", where, may_be_empty=True)
    return evidence


def _records(path: Path) -> Iterator[tuple[str, Record]]:
    if path.name.removesuffix(".gz").endswith(".json"):
        return iter_list(path)
    return ((f"{path}:{n}", record) for n, record in read_records(path, foreign=True, remedy=ON_PURPOSE))


NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}


@dataclass(frozen=True, kw_only=True)
class SureOptions(Options):
    """candidates: limit on the number of candidates used."""

    candidates: Count = 2


def sure(options: SureOptions) -> System:
    """Make the SuRe baseline (Kim et al. 2024): candidate answers, a summary of the passages for each, and the
    candidate with the best summary.

        question, passages  ->  <candidates>one a line</candidates>
        for each candidate  ->  call: a summary of the passages that argues for it
                                call: does the summary support it?            v = 1 for yes, else 0
        for each two        ->  two calls, in both orders: which summary says more about the question?
                                r = the share of its comparisons that a candidate's summary wins
        answer = the candidate with the largest v + r, the first of equals

    The verdict of a call is the text of its <verdict>: yes or no, 1 or 2. Any other text counts for no candidate
    [assumed]. The reward reads the answer from the candidates and the calls. Preset: 2 candidates, 5 passages for a
    question without its own [assumed].
    """
    most = options.candidates
    made = baseline(
        "sure",
        options,
        ("candidates", "support", "verdict"),
        partial(argue, most=most),
        given=5,
        reward=partial(chosen_reward, most=most),
        answer=partial(chosen, most=most),
    )
    return replace(made, template=made.template.replace("{candidates}", NUMBERS.get(most, str(most))))


def argue(question: Question, config: EpisodeConfig, most: int) -> Episode:
    yield Prompt(config.template, question.question, question.passages)
    turn = yield Generate(stop=("</candidates>",))
    candidates = listed(turn.inside("candidates"), most)
    if len(candidates) < 2:
        return "answered" if candidates else "ended"
    summaries = []
    for candidate in candidates:
        about = f"{question.question}\n\nCandidate answer: {candidate}"
        read: Turn = yield SubCall(BranchPrompt(Prompt(SUMMARY, about, question.passages), (), ("</support>",)))
        summaries.append(read.inside("support") or "none was written")
    for candidate, summary in zip(candidates, summaries, strict=True):
        about = f"{question.question}\n\nCandidate answer: {candidate}\n\nSummary: {summary}"
        yield SubCall(BranchPrompt(Prompt(VALIDITY, about), (), ("</verdict>",)))
    for one, other in permutations(summaries, 2):
        about = f"{question.question}\n\nSummary 1: {one}\n\nSummary 2: {other}"
        yield SubCall(BranchPrompt(Prompt(RANKING, about), (), ("</verdict>",)))
    return "answered"


LIST_MARKER = re.compile(r"(?:[-*•]+|\(?\d{1,2}[.)](?=\s))\s*")


def listed(text: str | None, most: int) -> list[str]:
    """Return the candidates, one per line of `text`, without list markers and duplicates, at most `most`."""
    lines = (LIST_MARKER.sub("", line.strip()) for line in (text or "").splitlines())
    return list(dict.fromkeys(line for line in lines if line))[:most]


def chosen(attempt: RewardInput, most: int) -> str | None:
    """Return the chosen candidate; None if there are no candidates or a call is missing."""
    spans = blocks(attempt.pieces, "candidates")
    candidates = listed(spans[0].text if spans else None, most)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    count, said = len(candidates), [verdict(pieces) for pieces in calls(attempt)]
    if len(said) < count + count * count:
        return None
    scores = [float(said[count + number] == "yes") for number in range(count)]
    for (one, other), won in zip(permutations(range(count), 2), said[2 * count :], strict=True):
        if won in ("1", "2"):
            scores[one if won == "1" else other] += 0.5 / (count - 1)
    return candidates[scores.index(max(scores))]


def chosen_reward(attempt: RewardInput, most: int) -> RewardResult:
    """Return the exact match of the chosen candidate."""
    return reward_of(chosen(attempt, most), attempt)


def verdict(pieces: Sequence[TextSegment]) -> str:
    spans = blocks(pieces, "verdict")
    return spans[0].text.lower().rstrip(".") if spans else ""
