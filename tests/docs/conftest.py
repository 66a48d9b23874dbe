"""Fixtures of the documents' tests: the small world, and a separate folder for each document that is run in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from document_play import Play
from document_world import make_world
from documents import Block, Command, blocks
from train_cases import single_threaded

from thresher.policy.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("world")
    before = Path.cwd()
    os.chdir(folder)
    try:
        with single_threaded():
            make_world(folder, tiny_tokenizer)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(scope="session")
def plays(
    world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, Sequence[Command | Block]], Play]]:
    """Yield a function that starts the run of a document, once per document."""
    begun: dict[str, Play] = {}

    def play(document: str, steps: Sequence[Command | Block]) -> Play:
        if document not in begun:
            folder = tmp_path_factory.mktemp("played") / "here"
            shutil.copytree(world, folder, symlinks=True)
            files = [step for step in blocks(document) if step.file] if document.endswith(".md") else []
            for name, text in (block.file for block in files if block.file):
                (folder / name).write_text(text, encoding="utf-8")
            begun[document] = Play(folder, steps)
        return begun[document]

    yield play
    for one in begun.values():
        one.end()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield
