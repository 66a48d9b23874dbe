"""Fixtures: a small model for the tests of learned encoders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import encoder_folders as folders
import pytest

from thresher.retrieval.encoders.learned import LearnedEncoder, load_encoder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a BERT with random weights in a folder without settings for vectors. Tests must not write to it."""
    return folders.save_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return copy(name) -> a copy of the plain model under that name."""
    return lambda name: Path(shutil.copytree(plain, tmp_path / name))


@pytest.fixture(scope="module")
def encoder(plain: Path) -> LearnedEncoder:
    return load_encoder(plain, pooling="mean", normalize=True)
