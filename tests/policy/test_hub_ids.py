"""Tests that a Hub name in place of a model folder is answered with how to download it, wherever folders are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.policy import load_policy, load_tokenizer
from thresher.policy.config import read_config
from thresher.retrieval.encoders.heads import load_classifier
from thresher.retrieval.encoders.learned import load_encoder

NAME = "Qwen/Qwen3-8B"
ANSWER = f"{NAME}: no such folder; .* hf download {NAME} --local-dir models/Qwen3-8B"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_readers() -> None:
    readers: list[Callable[[str], Any]] = [read_config, load_policy, load_tokenizer, load_encoder, load_classifier]
    for read in readers:
        with pytest.raises(UserError, match=ANSWER):
            read(NAME)


@pytest.mark.parametrize(
    "words",
    [
        f"generate --model {NAME} --prompt x",
        f"index build --corpus corpus.jsonl --encoder {NAME} --out index",
        f"init --config config.json --tokenizer {NAME} --out new",
        f"extract --model {NAME} --questions questions.jsonl --index index --out out.jsonl",
    ],
    ids=lambda words: words.split()[0],
)
def test_commands(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "A", "text": "b"}\n')
    (tmp_path / "questions.jsonl").write_text('{"id": "q", "question": "Who?", "golden_answers": ["A"]}\n')
    (tmp_path / "config.json").write_text("{}")
    assert cli.run(words.split()) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"hf download {NAME} --local-dir models/Qwen3-8B" in said
