"""Test locks on a file system without any; who holds a lock is tested with the run folder."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from thresher.common.locks import lock_folder, locked_file


def fails(number: int) -> Any:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of_and_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", fails(number))
    file = tmp_path / "out.jsonl"
    with pytest.warns(UserWarning, match=f"^{tmp_path}: this file system has no locks; do not start a second process"):
        os.close(lock_folder(tmp_path))
    with pytest.warns(UserWarning, match=f"^{file}: this file system has no locks"), locked_file(file):
        assert (tmp_path / ".out.jsonl.lock").read_text() == f"{os.getpid()}\n"
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_any_other_failure_of_a_lock_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", fails(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        lock_folder(tmp_path)
