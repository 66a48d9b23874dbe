"""A finished folder for the tests of commands."""

from pathlib import Path

import pytest
from cli_cases import finished_folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder once; a test must not change it."""
    return finished_folder(tmp_path_factory.mktemp("whole"))
