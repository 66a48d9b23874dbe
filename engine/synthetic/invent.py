"""`thresher data invent`: the invented world of world.py as files, in the formats of a real run.

corpus.jsonl    {"id", "title", "text"}                     training and held-out facts
train.jsonl     {"id", "question", "golden_answers", ..}    questions about training entities
test.jsonl      the same about held-out entities
warmup.jsonl    segmented transcripts for `thresher sft`

and, with --forms, what `study systems` and `reproduce --scale world` read besides (warmup_transcripts.py):

dev.jsonl                               other questions about held-out entities, by which a checkpoint is chosen
given_train.jsonl, given_dev.jsonl, ..  the same questions with passages, gold indices among them
forms.jsonl                             warm-up transcripts of six protocols, prompts included
recitals.jsonl                          copy-task transcripts, which come before them: facts restated
numbers-1.jsonl .. numbered.jsonl       the stages of ARENA's base (number_forms.py)
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thresher.common.files import staged_folder
from thresher.common.jsonl import write_jsonl
from thresher.engine.protocol.prompts import check_passage_format, passage_lines
from thresher.engine.synthetic.number_forms import STAGES, number_transcripts, numbered_transcripts
from thresher.engine.synthetic.warmup_transcripts import (
    GIVEN,
    SEARCHING,
    copy_task_transcripts,
    given_question,
    warmup_transcripts,
)
from thresher.engine.synthetic.world import (
    Fact,
    InventedWorld,
    InventedWorlds,
    Size,
    invent,
    passages,
    transcripts,
    with_paths,
)
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.retrieval.building.build import build_index
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.questions import Question, question_record

COPY_TASKS = 10  # copy-task transcripts for each warm-up transcript of a system
Asked = tuple[Question, list[Fact]]  # a question, and the facts that lead to its answer
K, DIM = 3, 2048  # of the searches in warm-up transcripts: as many passages as the demo's recipe shows


def invent_files(out: str | Path, seed: int, size: Size, passage_format: str, forms: int = 0) -> dict[str, Any]:
    """Write the four files into the new folder `out`, and with `forms` > 0 the others, that many warm-up transcripts of
    each system; returns how much they hold."""
    check_passage_format(passage_format)
    worlds = invent(size, seed)
    corpus = passages([worlds.train, worlds.test], seed)
    asked = {
        "train": with_paths(worlds.train, size.train_questions, size.two_hop, seed, "train"),
        "test": with_paths(worlds.test, size.test_questions, size.two_hop, seed, "test"),
    }
    with staged_folder(out) as staged, tempfile.TemporaryDirectory() as scratch:
        warmup: list[dict[str, Any]] = []
        for number, world in enumerate(worlds.warmup):
            search = _search(world, Path(scratch) / str(number), passage_format)
            count = size.transcripts // size.warmup_worlds
            warmup += transcripts(world, count, size, number, search, BEFORE, AFTER)
        write_jsonl(staged / "corpus.jsonl", ({"id": p.id, "title": p.title, "text": p.text} for p in corpus))
        if forms:
            tested = {question.question for question, _ in asked["test"]}
            asked["dev"] = with_paths(worlds.test, size.dev_questions, size.two_hop, seed, "dev", tested)
        for name, pairs in asked.items():
            write_jsonl(staged / f"{name}.jsonl", (question_record(question) for question, _ in pairs))
        write_jsonl(staged / "warmup.jsonl", warmup)
        if forms:
            _write_given(staged, worlds, asked, seed)
            _write_warmup(staged, worlds, size, seed, forms, Path(scratch), passage_format)
    return {
        "passages": len(corpus),
        "training questions": len(asked["train"]),
        "held-out questions": len(asked["test"]),
        "warm-up transcripts": len(warmup),
        "warm-up that follows its question": size.aware,
        **({"warm-up transcripts of each system": forms} if forms else {}),
    }


def _write_given(folder: Path, worlds: InventedWorlds, asked: Mapping[str, Sequence[Asked]], seed: int) -> None:
    """The same questions with their passages."""
    for name, pairs in asked.items():
        world = worlds.train if name == "train" else worlds.test
        given = (given_question(world, question, path, seed) for question, path in pairs)
        write_jsonl(folder / f"given_{name}.jsonl", map(question_record, given))


def _write_warmup(
    folder: Path, worlds: InventedWorlds, size: Size, seed: int, count: int, scratch: Path, passage_format: str
) -> None:
    """The warm-up of all systems, and of the base that names numbers."""
    mixed = []
    for number, world in enumerate(worlds.warmup):
        search = _search(world, scratch / f"forms-{number}", passage_format)
        for name in (*SEARCHING, *GIVEN):
            mixed += warmup_transcripts(world, name, count // size.warmup_worlds, size, number, search)
    write_jsonl(folder / "forms.jsonl", mixed)
    write_jsonl(folder / "recitals.jsonl", copy_task_transcripts(worlds.warmup, COPY_TASKS * count, seed))
    for stage in STAGES:
        write_jsonl(folder / f"{stage}.jsonl", number_transcripts(worlds.warmup, stage, 3 * count, size, seed))
    write_jsonl(folder / "numbered.jsonl", numbered_transcripts(worlds.warmup, 3 * count, size))


def _search(world: InventedWorld, folder: Path, passage_format: str) -> Callable[[list[str]], list[str]]:
    """What a search in this world shows, as the rollout would render it."""
    corpus = Corpus(passages([world], 0))
    encoder = LexicalEncoder.fit([f"{passage.title} {passage.text}" for passage in corpus], DIM)
    index: Index = build_index(corpus, encoder, folder, embed="title+text")
    return lambda queries: [
        passage_lines([hit.passage for hit in hits], passage_format) for hits in index.search(queries, K)
    ]
