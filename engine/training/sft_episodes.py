"""Warm-up transcripts of a system's own episode, with turns written by a script that knows the way to the answer.

A question has its evidence as triples (subject, relation, object) under "evidence" or "evidences", as in
2WikiMultiHopQA. The engine plays the episode of the recipe's system, which searches the recipe's index.

    search_r1, igpo, mem1, eval_rar, autorefine  a turn for each triple, and one that answers
        <think>I need the relation of subject.</think> <search>subject relation</search>
        <evaluate>subject: relation is object.</evaluate>    how the next turn begins; autorefine: <refine>, search_r1:
                                                             in its <think>
        <think>all triples</think> <answer>..</answer>
    eviomni, lear
        <reason>what each passage says</reason> <extract>all triples</extract> <answer>..</answer>
        and in each branch the answer

A question gives a transcript if each of its triples is stated by a passage, the episode stays within the limits of the
recipe, and its answer is right by the system's reward. A transcript holds the ids of a trajectory, as a rollout has
them. Deliberately absent: searches that find nothing, and other words for the same query. GRPO can teach how to
continue then.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.assemble import load_retrieval, make_prompt_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.decoding.scheduler import SharedPrompt
from thresher.engine.episode import BranchPrompt
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.protocol.prompts import Renderer, passage_lines
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import EpisodeRunner, Sample, Written
from thresher.engine.scoring.score import Scored, check_all, score
from thresher.engine.training.sft_data import EPISODE, Unused
from thresher.policy.tokenizer import Tokenizer, UnencodableText, load_tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, check_apart, read_questions
from thresher.rewards.reward import Source
from thresher.rewards.tags import escape_tags
from thresher.rewards.text import contains_answer

NO_EVIDENCE = "no evidence triples"
NOT_STATED = "no passage that was shown states one of its triples"
CUT = "the part of a passage that states one of its triples was cut off; raise rollout.max_passage_tokens"
LIMITS = {
    "turns": "its searches need more turns than rollout.max_turns",
    "turn_tokens": "a turn is longer than rollout.max_turn_tokens",
    "tokens": "its turns are longer than rollout.max_policy_tokens",
    "context": "it is longer than rollout.max_context",
}
NOT_RIGHT = "its answer does not get the reward of a right one"

Triple = tuple[str, str, str]
# (the sample whose turn is due, answer, triples, stop tags) -> the turn's text
Script = Callable[[Sample, str, Sequence[Triple], tuple[str, ...]], str]


def triples_of(question: Question, tags: tuple[str, ...]) -> list[Triple]:
    """Return the question's distinct triples in order, with tags in them escaped. UserError for triples that are not
    three texts."""
    found: Any = question.metadata.get("evidence", question.metadata.get("evidences", []))
    for triple in found if isinstance(found, list) else [found]:
        if not isinstance(triple, list) or [type(part) for part in triple] != [str, str, str]:
            raise UserError(
                f"question {question.id}: its evidence has {triple!r}; expected a list of triples [subject, "
                "relation, object] of texts"
            )
    escaped = [[escape_tags(part.strip(), tags) for part in triple] for triple in found]
    return list(dict.fromkeys((subject, relation, object_) for subject, relation, object_ in escaped))


def states(passage: Passage, triple: Triple) -> bool:
    """Return whether a passage names the subject, in its title or text, and the object, in its text."""
    subject, _, object_ = triple
    return contains_answer(f"{passage.title} {passage.text}", subject) and contains_answer(passage.text, object_)


def as_shown(passages: Sequence[Passage], renderer: Renderer) -> Iterator[Passage]:
    """Yield the passages of a search, with their texts cut to the token budget."""
    ids, budget = renderer.passages(passages), renderer.max_passage_tokens
    if len(ids) <= budget:
        yield from passages
        return
    shown = len(renderer.tokenizer.decode_bytes(ids[:budget]).decode("utf-8", "ignore"))
    for number, passage in enumerate(passages, 1):
        end = len(escape_tags(passage_lines(passages[:number], renderer.passage_format), renderer.tags))
        yield replace(passage, text=passage.text[: max(len(passage.text) - max(end - shown, 0), 0)])


def _facts(triples: Sequence[Triple]) -> str:
    return "".join(f" {subject}: {relation} is {object_}." for subject, relation, object_ in triples)


def write_search(
    sample: Sample, answer: str, triples: Sequence[Triple], stop: tuple[str, ...], note: str, recall: bool = False
) -> str:
    """Write a turn that searches for the next triple, or the turn that answers. note: the tag around the facts found;
    "": they are in the turn's <think>. recall: state all facts found so far, not only the last."""
    searches, before = len(sample.trajectory.searches), ""
    found, left = _facts(triples[:searches] if recall else triples[:searches][-1:]), triples[searches:]
    if note and sample.trajectory.segments[-2].source is Source.RETRIEVED:
        before = f"<{note}>{found} </{note}>"
        if f"</{note}>" in stop:  # a turn of its own
            return before
        before += "\n"
    if not left:
        return f"{before}<think>{_facts(triples)} </think>\n<answer> {answer} </answer>"
    subject, relation, _ = left[0]
    thought = f"{'' if note else found} I need the {relation} of {subject}."
    return f"{before}<think>{thought} </think>\n<search> {subject} {relation} </search>"


def write_evidence(sample: Sample, answer: str, triples: Sequence[Triple], stop: tuple[str, ...]) -> str:
    """Write a turn that reasons over the given passages and extracts all triples, or one that answers."""
    if stop == ("</answer>",):  # a branch's context already opens the answer
        return f"\n<answer> {answer} </answer>" if sample.reported else f" {answer} </answer>"
    left, reason = list(triples), ""
    for number, passage in enumerate(sample.job.question.passages, 1):
        here = [triple for triple in left if states(passage, triple)]
        left = [triple for triple in left if triple not in here]
        reason += f" [{number}]{_facts(here) or ' nothing of use.'}"
    return f"<reason>{reason} </reason>\n<extract>{_facts(triples)} </extract>"


SCRIPTS: dict[str, Script] = {
    "search_r1": partial(write_search, note=""),
    "igpo": partial(write_search, note=""),
    "mem1": partial(write_search, note="", recall=True),
    "eval_rar": partial(write_search, note="evaluate"),
    "autorefine": partial(write_search, note="refine"),
    "eviomni": write_evidence,
    "lear": write_evidence,
}


class ScriptedWriter:
    """Writer of a script's turns. All tokens have log-prob 0, including those of texts that are scored."""

    elsewhere = False
    takes_text = True

    def __init__(self, tokenizer: Tokenizer, script: Script, tags: tuple[str, ...]) -> None:
        self.tokenizer, self.script, self.tags = tokenizer, script, tags
        self.due: list[tuple[Sample, tuple[str, ...]]] = []
        self.scored: list[tuple[Sample, Written]] = []

    @property
    def idle(self) -> bool:
        return not self.due and not self.scored

    def begin(self, sample: Sample, prompt: SharedPrompt, branch: BranchPrompt | None) -> None:
        """Do nothing, like `append` and `release`, because a script reads the trajectory."""

    def append(self, sample: Sample, ids: list[int]) -> None: ...

    def release(self, sample: Sample, keep: bool) -> None: ...

    def begin_turn(self, sample: Sample, stop: tuple[str, ...], lead: bytes) -> None:
        self.due.append((sample, stop))

    def score(self, sample: Sample, ids: list[int], scored_from: int, present: int) -> None:
        self.scored.append((sample, Written([], [0.0] * (len(ids) - scored_from))))

    def step(self) -> list[tuple[Sample, Written]]:
        due, self.due, scored, self.scored = self.due, [], self.scored, []
        return scored + [(sample, self._turn(sample, stop)) for sample, stop in due]

    def _turn(self, sample: Sample, stop: tuple[str, ...]) -> Written:
        question = sample.job.question
        answer = escape_tags(question.golds[0].strip(), self.tags)
        text = self.script(sample, answer, triples_of(question, self.tags), stop)
        try:
            ids = self.tokenizer.encode(text)
        except UnencodableText as error:
            raise UserError(f"question {question.id}, its evidence or answer: {error}") from None
        if len(ids) > sample.room:
            return Written(ids[: sample.room], [0.0] * sample.room, full=True)
        return Written(ids, [0.0] * len(ids), next(tag for tag in stop if text.endswith(tag)))


def episode_records(recipe: Recipe, path: str | Path) -> tuple[list[dict[str, Any]], list[Unused], int]:
    """Return the transcripts of a file's questions, the questions that give none, and the number of all questions.

    UserError if the recipe's system has no script, or if a question is also in the recipe's data.
    """
    context = make_prompt_context(recipe, load_tokenizer(recipe.model.path))
    system, tokenizer, renderer = context.system, context.tokenizer, context.renderer
    if system.name not in SCRIPTS:
        raise UserError(f"--kind {EPISODE} has no script for the system {system.name}; it has {', '.join(SCRIPTS)}")
    questions = read_questions(path)
    others = (recipe.data.train, recipe.data.dev) if recipe.data else ()
    check_apart([(path, questions), *((other, read_questions(other)) for other in others if other)])
    retriever = load_retrieval(recipe, system)
    shuffle = recipe.retrieval is not None and recipe.retrieval.shuffle
    runner = EpisodeRunner(
        tokenizer, retriever, system, context.episode_config, renderer, context.limits, shuffle=shuffle
    )
    usable = [question for question in questions if triples_of(question, system.tags)]
    usable = runner.retrieve_and_truncate(usable).questions
    writer = ScriptedWriter(tokenizer, SCRIPTS[system.name], system.tags)
    scored = score(usable, runner.play_all(jobs_of(usable), writer, None), system, tokenizer)
    check_all(scored, tokenizer, system.tags, context.limits.max_context)
    records: list[dict[str, Any]] = []
    unused = [Unused(question.id, NO_EVIDENCE) for question in questions if not triples_of(question, system.tags)]
    for entry in scored:
        if problem := why_unusable(entry, runner):
            unused.append(Unused(entry.question.id, problem))
        else:
            records += transcripts_of(entry.question, entry.trajectory, tokenizer, system.name)
    return records, unused, len(questions)


def why_unusable(entry: Scored, runner: EpisodeRunner) -> str | None:
    """Return the reason why an episode gives no transcript; None if it gives one."""
    trajectory, triples = entry.trajectory, triples_of(entry.question, runner.system.tags)
    found: list[Sequence[Passage]] = [entry.question.passages] * len(triples)
    if not runner.system.given_passages:
        assert runner.retriever is not None
        found = []
        for search in trajectory.searches:  # searched again: the hits are still in the retriever's cache
            (hits,) = runner.retriever.search([search["query"]], runner.renderer.k)
            by_id = {hit.passage.id: hit.passage for hit in hits}
            found.append([by_id[id_] for id_ in search["passages"]])
    for triple, passages in zip(triples, found, strict=False):  # an episode ended by a limit has fewer searches
        if not any(states(passage, triple) for passage in as_shown(passages, runner.renderer)):
            return CUT if any(states(passage, triple) for passage in passages) else NOT_STATED
    if trajectory.reason != "answered" or not entry.result.parts.get("em"):
        return LIMITS.get(trajectory.reason, NOT_RIGHT)
    return None


def transcripts_of(
    question: Question, trajectory: Trajectory, tokenizer: Tokenizer, system: str
) -> list[dict[str, Any]]:
    """Return the transcript of an episode, and one for each branch. A folded episode's transcript has all its
    contexts."""
    contexts = {question.id: trajectory}
    contexts |= {f"{question.id} {name}": branch for name, branch in trajectory.branches.items()}
    return [
        {
            "id": id_,
            "question": question.question,
            "segments": context.to_dict(tokenizer)["segments"],
            "metadata": {"kind": EPISODE, "system": system},
        }
        for id_, context in contexts.items()
    ]
