"""Evidence of another model: the question with what an extractor left of its passages, and the answer from that.

The evidence comes from a file of `thresher extract`, by the question's id, and is the one passage of the prompt that
`full_passages` shows whole passages in, and that a generator is tuned on (`sft.format = "qa"`): who answers cannot tell
evidence from a passage by the prompt. A question whose evidence is empty is asked all the same, with none; one that the
file does not know ends the run. Evidence is never cut: one that is longer than rollout.max_passage_tokens, 3,072 as of
whole passages, ends the run too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from thresher.common.errors import UserError
from thresher.common.jsonl import Record, iter_list, string_field
from thresher.common.records import ON_PURPOSE, read_records
from thresher.engine.baselines import common
from thresher.engine.baselines.common import answer_reward, built_in
from thresher.engine.episode import Episode, EpisodeConfig, Generate, Prompt, System, pair_tags
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """file: JSONL with an id and evidence (a string, which may be empty) in every line."""

    file: str | None = None


def system(options: Options) -> System:
    if options.file is None:
        raise UserError(
            "baseline evidence: no file to answer from; add --set system.options.file=FILE, which thresher "
            "extract wrote"
        )
    return answers_from(read_evidence(options.file), options.file, options)


def answers_from(evidence: Mapping[str, str], source: str, options: common.Options | None = None) -> System:
    """A system that answers a question from `evidence[question.id]`; `source` is where an absent one was looked for."""

    def episode(question: Question, tools: EpisodeConfig) -> Episode:
        if question.id not in evidence:
            raise UserError(
                f"{source}: holds no evidence for question {question.id}; extract from these questions first"
            )
        text = evidence[question.id].strip()
        yield Prompt(tools.template, question.question, (Passage("evidence", "", text),) if text else ())
        turn = yield Generate(stop=("</answer>",))
        return "answered" if turn.inside("answer") else "ended"

    return System(
        name="evidence",
        tags=pair_tags("answer"),
        episode=episode,
        reward=answer_reward,
        template=built_in("passages", options or common.Options(), passages=True),
        preset={"rollout": {"max_turns": 1, "max_passage_tokens": 3072}},
    )


def read_evidence(path: str | Path) -> dict[str, str]:
    """Id -> evidence. UserError, naming file and line, for a record without one of them or with an id seen before."""
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
