"""Warm-up transcripts of a system's own episode: a script that knows what leads to the answer writes the turns.

A question brings its evidence as triples (subject, relation, object), as 2WikiMultiHopQA does, under "evidence" or
"evidences". The engine plays the episode of the recipe's system, and the recipe's index answers.

    search_r1, eval_rar, autorefine      a turn for each triple, and one that answers
        <think>I need the relation of subject.</think> <search>subject relation</search>
        <evaluate>subject: relation is object.</evaluate>    how the next turn begins; autorefine: <refine>, search_r1:
                                                             in its <think>
        <think>all triples</think> <answer>..</answer>
    eviomni, lear
        <reason>what each passage says</reason> <extract>all triples</extract> <answer>..</answer>
        and in each branch what it keeps, of which nothing is trained, and the answer

A triple is stated only if a passage, as far as it is shown, names the subject and has the object in its text. A
question with one that none states gives no transcript, nor does one whose episode hits a limit of the recipe. What is
left are episodes that end with a right answer, by the measures of the system's own reward.

Deliberately absent: searches that find nothing, and other words for the same query. What to do then, GRPO can teach.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.assemble import load_retrieval, make_prompt_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.decoding.scheduler import SharedPrompt
from thresher.engine.episode import BranchPrompt, Episode, EpisodeConfig, KeptSpan, Retrieved, System
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.protocol.prompts import Renderer, passage_lines
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import EpisodeRunner, Job, Sample, Written
from thresher.engine.scoring.score import check_all, score
from thresher.engine.training.sft_data import EPISODE, Unused
from thresher.policy.tokenizer import Tokenizer, UnencodableText, load_tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, passage_record, read_questions
from thresher.rewards.tags import escape_tags
from thresher.rewards.text import contains_answer, normalize_answer

EVIDENCE_KEYS = ("evidence", "evidences")
NO_EVIDENCE = "no evidence triples"
NOT_STATED = "no passage that was shown states one of its triples"
CUT = "the part of a passage that states one of its triples was cut off; raise rollout.max_passage_tokens"
LIMITS = {
    "turns": "its searches need more turns than rollout.max_turns",
    "turn_tokens": "a turn is longer than rollout.max_turn_tokens",
    "tokens": "its turns are longer than rollout.max_policy_tokens",
    "context": "it is longer than rollout.max_context",
}
NOT_RIGHT = "the reward of its answer is not that of a right one"

_MARK = "\ue000"  # of the place of a passage's text in its format

Triple = tuple[str, str, str]
Words = list[tuple[str, bool]]  # text, and whether it is a name that can be copied


class Script(Protocol):
    """Writes the turns of one question's episode. problem: why it cannot go on."""

    problem: str | None

    def turn(self, stop: tuple[str, ...]) -> Words: ...

    def shown(self, passages: Sequence[Passage], found: Sequence[Passage]) -> None:
        """Take the passages of a search as far as they are shown, and whole as they were found."""


def triples_of(question: Question, tags: tuple[str, ...]) -> list[Triple]:
    """Return the question's triples, each once, in order, with tags in them escaped; UserError for others than three
    texts."""
    found: Any = next((question.metadata[key] for key in EVIDENCE_KEYS if key in question.metadata), [])
    wanted = "expected a list of triples [subject, relation, object], all texts"
    if not isinstance(found, list):
        raise UserError(f"question {question.id}: its evidence is {found!r}; {wanted}")
    triples: dict[Triple, None] = {}
    for triple in found:
        if not isinstance(triple, list) or [type(part) for part in triple] != [str, str, str]:
            raise UserError(f"question {question.id}: its evidence holds {triple!r}; {wanted}")
        subject, relation, object_ = (escape_tags(part.strip(), tags) for part in triple)
        triples[subject, relation, object_] = None
    return list(triples)


def states(passage: Passage, triple: Triple) -> bool:
    """Return whether a passage names the subject, in its title or text, and its text the object."""
    subject, _, object_ = triple
    return contains_answer(f"{passage.title} {passage.text}", subject) and contains_answer(passage.text, object_)


def _fact(triple: Triple) -> Words:
    subject, relation, object_ = triple
    return [(f" {subject}", True), (f": {relation} is", False), (f" {object_}", True), (".", False)]


def _facts(triples: Sequence[Triple]) -> Words:
    return [words for triple in triples for words in _fact(triple)]


def _tagged(tag: str, words: Words) -> Words:
    return [(f"<{tag}>", False), *words, (f" </{tag}>", False)]


@dataclass(slots=True)
class Searching:
    """Searches for one triple after the other. note: the tag between which a turn says what was found."""

    answer: str
    triples: Sequence[Triple]
    passages: Sequence[Passage] = ()  # given ones, of which it has none
    note: str = "think"
    stated: int = 0
    noted: bool = True
    problem: str | None = None

    def turn(self, stop: tuple[str, ...]) -> Words:
        done, words = self.triples[: self.stated], Words()
        if not self.noted and self.note != "think":
            words += _tagged(self.note, _fact(done[-1]))
            self.noted = True
            if stop == (f"</{self.note}>",):
                return words
            words.append(("\n", False))
        if self.stated == len(self.triples):
            thought, acts = _facts(done), _tagged("answer", [(f" {self.answer}", True)])
        else:
            subject, relation, _ = self.triples[self.stated]
            thought = _facts(done[-1:]) if self.note == "think" else []
            thought += [(f" I need the {relation} of", False), (f" {subject}", True), (".", False)]
            acts = _tagged("search", [(f" {subject}", True), (f" {relation}", False)])
        return [*words, *_tagged("think", thought), ("\n", False), *acts]

    def shown(self, passages: Sequence[Passage], found: Sequence[Passage]) -> None:
        triple = self.triples[self.stated]
        if any(states(passage, triple) for passage in passages):
            self.stated, self.noted = self.stated + 1, False
        else:
            self.problem = CUT if any(states(passage, triple) for passage in found) else NOT_STATED


@dataclass(slots=True)
class Sifting:
    """Reasons over the passages given, extracts all triples, and answers."""

    answer: str
    triples: Sequence[Triple]
    passages: Sequence[Passage]
    problem: str | None = None

    def __post_init__(self) -> None:
        if not all(any(states(passage, triple) for passage in self.passages) for triple in self.triples):
            self.problem = NOT_STATED

    def turn(self, stop: tuple[str, ...]) -> Words:
        if stop == ("</answer>",):
            return [("\n", False), *_tagged("answer", [(f" {self.answer}", True)])]
        left, reason = list(self.triples), Words()
        for number, passage in enumerate(self.passages, 1):
            here = [triple for triple in left if states(passage, triple)]
            left = [triple for triple in left if triple not in here]
            reason += [(f" [{number}]", False), *(_facts(here) or [(" nothing of use.", False)])]
        return [*_tagged("reason", reason), ("\n", False), *_tagged("extract", _facts(self.triples))]

    def shown(self, passages: Sequence[Passage], found: Sequence[Passage]) -> None:
        """Take nothing: it does not search."""


SCRIPTS: dict[str, Callable[[str, Sequence[Triple], Sequence[Passage]], Script]] = {
    "search_r1": Searching,
    "eval_rar": partial(Searching, note="evaluate"),
    "autorefine": partial(Searching, note="refine"),
    "eviomni": Sifting,
    "lear": Sifting,
}


@dataclass(slots=True)
class PlayedEpisode:
    """One question's episode so far. segments: as a transcript has them. known: all text that it could copy from."""

    question: Question
    script: Script
    answer: str
    known: str
    segments: list[dict[str, Any]] = field(default_factory=list)
    branches: list[tuple[BranchPrompt, list[dict[str, Any]]]] = field(default_factory=list)

    def policy(self, words: Words) -> dict[str, Any]:
        """Return the policy's segment of these words, with the places of the names that stand in what it has seen."""
        text, copied = "", []
        for part, is_name in words:
            if is_name and part.strip() in self.known:
                copied.append([len(text), len(text) + len(part)])
            text += part
        return {"source": "policy", "text": text} | ({"copied": copied} if copied else {})

    def kept(self, branch: BranchPrompt) -> list[dict[str, Any]]:
        """Return a branch's context behind its prompt, in which nothing is trained."""
        written = "".join(each["text"] for each in self.segments if each["source"] == "policy").encode()
        texts = []
        for part in branch.parts:
            assert not isinstance(part, Retrieved)  # no scripted system shows what was found in a branch
            texts.append(written[part.start : part.end].decode() if isinstance(part, KeptSpan) else part)
        return [{"source": "feedback", "text": text} for text in texts]


class ScriptedWriter:
    """Writes the turns of scripts, in tokens of log-prob 0. parts: by question."""

    unit = 1

    def __init__(self, tokenizer: Tokenizer, parts: Mapping[str, PlayedEpisode]) -> None:
        self.tokenizer, self.parts = tokenizer, parts
        self.branches: dict[Sample, BranchPrompt] = {}
        self.due: list[tuple[Sample, tuple[str, ...]]] = []

    @property
    def idle(self) -> bool:
        return not self.due

    def begin(self, sample: Sample, prompt: SharedPrompt, branch: BranchPrompt | None) -> None:
        if branch is not None:
            self.branches[sample] = branch

    def append(self, sample: Sample, ids: list[int]) -> None:
        """Do nothing: what a search found comes from the episode."""

    def begin_turn(self, sample: Sample, stop: tuple[str, ...], lead: bytes) -> None:
        self.due.append((sample, stop))

    def step(self) -> list[tuple[Sample, Written]]:
        due, self.due = self.due, []
        return [(sample, self._turn(sample, stop)) for sample, stop in due]

    def _turn(self, sample: Sample, stop: tuple[str, ...]) -> Written:
        part = self.parts[sample.job.question.id]
        if part.script.problem is not None:
            return Written([], full=True)  # as a turn that a limit ends, and the episode with it
        branch = self.branches.get(sample)
        words = part.script.turn(stop) if branch is None else [(f" {part.answer}", True), (" </answer>", False)]
        segment = part.policy(words)
        try:
            ids = self.tokenizer.encode(segment["text"])
        except UnencodableText as error:
            raise UserError(f"question {part.question.id}, its evidence or answer: {error}") from None
        if len(ids) > sample.room:
            return Written(ids[: sample.room], [0.0] * sample.room, full=True)
        if branch is None:
            part.segments.append(segment)
        else:
            part.branches.append((branch, [*part.kept(branch), segment]))
        tag = next(tag for tag in stop if segment["text"].endswith(tag))
        return Written(ids, [0.0] * len(ids), tag)

    def release(self, sample: Sample, keep: bool) -> None:
        """Do nothing: it holds nothing."""


class ScriptedRollout(EpisodeRunner):
    """Makes trajectories whose turns scripts write. parts: of the last run, by question."""

    def run(
        self,
        jobs: Sequence[Job],
        temperature: float,
        on_progress: Callable[[int], None] | None = None,
        recall: bool = False,
    ) -> list[Trajectory]:
        self.parts = {job.question.id: _begin(job.question, self.system) for job in jobs}
        played, self.system = self.system, replace(self.system, episode=partial(self._watched, self.system))
        try:
            return self.play_all(jobs, ScriptedWriter(self.tokenizer, self.parts), on_progress)
        finally:
            self.system = played

    def _watched(self, system: System, question: Question, config: EpisodeConfig) -> Episode:
        """Play the system's episode, and let the script and the transcript have what its searches show."""
        part, renderer = self.parts[question.id], self.renderer
        inner, answer = system.episode(question, config), None
        while True:
            try:
                request = inner.send(answer)
            except StopIteration as stop:
                return str(stop.value)
            if isinstance(request, Retrieved):
                assert not isinstance(request.hits, str)  # no scripted system rewrites what was found
                found = [hit.passage for hit in request.hits]
                text, passages = shown_part(found, renderer)
                part.known += f"\n{text}"
                pieces = (request.before, text, request.after)
                part.segments += [{"source": "retrieved", "text": piece} for piece in pieces if piece]
                part.script.shown(passages, found)
            answer = yield request


def _begin(question: Question, system: System) -> PlayedEpisode:
    answer = escape_tags(question.golds[0].strip(), system.tags)
    script = SCRIPTS[system.name](answer, triples_of(question, system.tags), question.passages)
    known = "\n".join([question.question, *(f"{passage.title} {passage.text}" for passage in question.passages)])
    return PlayedEpisode(question, script, answer, known)


def shown_part(found: Sequence[Passage], renderer: Renderer) -> tuple[str, list[Passage]]:
    """Return a search's passages as the model sees them, and those of them that it sees, the last with what the budget
    leaves of its text."""
    whole, budget = list(found), renderer.max_passage_tokens
    while whole and len(renderer.passages(whole)) > budget:
        whole.pop()
    if len(whole) == len(found):
        return escape_tags(passage_lines(found, renderer.passage_format), renderer.tags), whole
    ids = renderer.passages(found)[:budget]
    text, cut = renderer.tokenizer.decode_bytes(ids).decode("utf-8", "ignore"), found[len(whole)]
    before = passage_lines([*whole, replace(cut, text=_MARK)], renderer.passage_format).partition(_MARK)[0]
    before = escape_tags(before, renderer.tags)
    return text, [*whole, replace(cut, text=text.removeprefix(before))] if text.startswith(before) else whole


def episode_records(recipe: Recipe, path: str | Path) -> tuple[list[dict[str, Any]], list[Unused], int]:
    """Return the transcripts of a file's questions, those that give none, and the number of all questions.

    UserError where the recipe's system has no script, or a question is one of the recipe's too.
    """
    context = make_prompt_context(recipe, load_tokenizer(recipe.model.path))
    system, tokenizer = context.system, context.tokenizer
    if system.name not in SCRIPTS:
        raise UserError(f"--kind {EPISODE} has no script for the system {system.name}; it has {', '.join(SCRIPTS)}")
    questions = read_questions(path)
    check_apart(questions, path, recipe)
    usable = [question for question in questions if triples_of(question, system.tags)]
    reasons = dict.fromkeys((question.id for question in questions), NO_EVIDENCE)
    rollout = ScriptedRollout(
        tokenizer,
        load_retrieval(recipe, system),
        system,
        context.episode_config,
        context.renderer,
        context.limits,
        shuffle=recipe.retrieval is not None and recipe.retrieval.shuffle,
    )
    usable = rollout.retrieve_and_truncate(usable).questions if usable else []
    with console.progress_line("episodes", len(usable)) as line:
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            line.to(done, "")

        trajectories = rollout.run(jobs_of(usable), 0.0, progress)
    scored = score(usable, trajectories, system, tokenizer)
    check_all(scored, tokenizer, system.tags, context.limits.max_context)
    records: list[dict[str, Any]] = []
    for entry in scored:
        part, reason = rollout.parts[entry.question.id], entry.trajectory.reason
        if part.script.problem is None and reason == "answered" and entry.result.parts["em"]:
            records += transcripts_of(part, context.episode_config.template, system)
            del reasons[entry.question.id]
        else:
            reasons[entry.question.id] = part.script.problem or LIMITS.get(reason, NOT_RIGHT)
    unused = [Unused(id_, reason) for id_, reason in reasons.items()]
    return records, unused, len(questions)


def transcripts_of(part: PlayedEpisode, template: str, system: System) -> list[dict[str, Any]]:
    """Return an episode's transcript, and one of each branch, with their prompts."""
    asked = {"id": part.question.id, "question": part.question.question, "template": template}
    ends = {"metadata": {"kind": EPISODE, "system": system.name}}
    given = {"passages": [passage_record(passage) for passage in part.question.passages]}
    records = [asked | (given if system.given_passages else {}) | {"segments": part.segments} | ends]
    for number, (branch, segments) in enumerate(part.branches, 1):
        shown = {"passages": [passage_record(passage) for passage in branch.prompt.passages]}
        records.append(asked | {"id": f"{part.question.id} branch {number}"} | shown | {"segments": segments} | ends)
    return records


def check_apart(questions: Sequence[Question], path: str | Path, recipe: Recipe) -> None:
    """Raise UserError where two of these questions, the recipe's training questions and its dev questions have a
    question in common, by its id or by its normalised text."""
    files = [(str(path), questions)]
    if recipe.data is not None:
        files += [(name, read_questions(name)) for name in (recipe.data.train, recipe.data.dev) if name is not None]
    for (one, first), (other, second) in combinations(files, 2):
        ids, texts = {each.id for each in first}, {normalize_answer(each.question) for each in first}
        for question in second:
            if question.id in ids or normalize_answer(question.question) in texts:
                raise UserError(
                    f"{other}: question {question.id} is in {one} too; give warm-up, training and dev set questions of "
                    "their own"
                )
