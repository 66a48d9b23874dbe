"""A finished folder for the commands."""

from pathlib import Path

import pytest
from cli_cases import finished_folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return finished_folder(tmp_path_factory.mktemp("whole"))
