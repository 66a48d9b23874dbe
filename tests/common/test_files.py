"""Tests that a file or folder is whole or absent, whatever interrupts its writing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thresher.common import files as files_module
from thresher.common.errors import UserError
from thresher.common.files import (
    Unwritable,
    atomic_path,
    atomic_write_bytes,
    atomic_write_text,
    model_folder,
    parse_json_object,
    read_bytes,
    read_text,
    refuse_hub_id,
    staged_folder,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    atomic_write_bytes(target, b"\x00old")
    assert target.read_bytes() == b"\x00old"
    atomic_write_text(target, "neu: ü\r\n")
    assert target.read_bytes() == "neu: ü\r\n".encode()
    assert names(tmp_path) == ["file.txt"]
    (tmp_path / "plain").write_text("")
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="disk"), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError("disk")
    with pytest.raises(Unwritable, match=r"file\.txt: cannot be written \(No such file"), atomic_path(target):
        pass  # a block that writes nothing is an error, not an empty file
    assert target.read_text() == "old" and names(tmp_path) == ["file.txt"]


KILLED = """
import os, signal
from thresher.common.files import Unwritable, {helper}
with {helper}({target!r}) as temporary:
    {write}
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("helper", "write"),
    [("atomic_path", "temporary.write_text('half')"), ("staged_folder", "(temporary / 'a').write_text('half')")],
)
def test_a_kill_leaves_only_a_hidden_temporary(tmp_path: Path, helper: str, write: str) -> None:
    code = KILLED.format(helper=helper, target=str(tmp_path / "target"), write=write)
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False)
    assert done.returncode == -9
    assert [name for name in names(tmp_path) if not (name.startswith(".") and name.endswith(".tmp"))] == []
    # The leftover does not block the next attempt.
    if helper == "atomic_path":
        atomic_write_text(tmp_path / "target", "whole")
    else:
        with staged_folder(tmp_path / "target") as temporary:
            (temporary / "a").write_text("whole")
    assert "target" in names(tmp_path)


def test_a_staged_folder_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "one"
    with staged_folder(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "file").write_text("x")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "x"
    assert names(target.parent) == ["one"]
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "failed") as temporary:
        (temporary / "file").write_text("x")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["runs"]
    with pytest.raises(UserError, match="exists already"), staged_folder(tmp_path / "two") as temporary:
        (temporary / "mine").write_text("x")
        (tmp_path / "two").mkdir()  # created by another process
        (tmp_path / "two" / "theirs").write_text("y")
    assert names(tmp_path) == ["runs", "two"] and names(tmp_path / "two") == ["theirs"]


def test_what_appears_in_the_last_moment_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = files_module.refuse_existing

    def late(path: Path, replace: bool = False) -> None:
        look(path, replace)
        if any(temporary.is_dir() for temporary in tmp_path.glob(".*.tmp")) and not path.exists():
            path.mkdir()  # by another process
            (path / "theirs").write_text("y")

    monkeypatch.setattr(files_module, "refuse_existing", late)
    with pytest.raises(UserError, match="exists already"), staged_folder(tmp_path / "one") as temporary:
        (temporary / "mine").write_text("x")
    assert names(tmp_path) == ["one"] and names(tmp_path / "one") == ["theirs"]


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_existing_target_is_refused_unless_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "one"
    if kind == "folder":
        target.mkdir()
        (target / "old").write_text("old")
    elif kind == "file":
        target.write_text("old")
    else:
        os.symlink(tmp_path / "nowhere", target)
    with pytest.raises(UserError, match="one: exists already"), staged_folder(target):
        raise AssertionError("the block must not run")
    assert names(tmp_path) == ["one"]
    with staged_folder(target, replace=True) as temporary:
        (temporary / "new").write_text("new")
        assert os.path.lexists(target)
    assert names(tmp_path) == ["one"] and names(target) == ["new"]


def test_a_hub_id_is_answered_with_the_command_that_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.2-1B", "a/b_c"):
        owner, own = name.split("/")
        with pytest.raises(
            UserError, match=rf"^{name}: no such folder; .*: hf download {name} --local-dir models/{own}$"
        ):
            refuse_hub_id(name)
        Path(owner).mkdir()
        refuse_hub_id(name)  # if a folder has the owner's name, the name is a wrong path
    for path in ("Qwen3-8B", "models/Qwen3-8B", "/x/Qwen3-8B", "./x/y/z", "../Qwen/Qwen3", "x/b/c", "x b/c", "."):
        refuse_hub_id(path)


def test_what_is_no_models_folder_is_named_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step_000002").mkdir(parents=True)
    (tmp_path / "run" / "recipe.toml").touch()
    for name, expected in (
        ("absent", "absent: no such folder; give a model's folder with --model"),
        ("run/recipe.toml", "recipe.toml: is a file; give the folder that contains it"),
        ("run", r"run: is a run's folder, .* such as .*/run/checkpoints/step_000002$"),
    ):
        with pytest.raises(UserError, match=expected):
            model_folder(tmp_path / name)
    assert model_folder(tmp_path / "run" / "checkpoints" / "step_000002").name == "step_000002"
    with pytest.raises(UserError, match="name a file in it"):
        read_bytes(tmp_path)


def test_what_is_read_whole_is_a_regular_file_of_a_limited_size(tmp_path: Path) -> None:
    """A pipe would block forever, and a device has no end: neither is opened."""
    os.mkfifo(tmp_path / "pipe")
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    (tmp_path / "long").write_bytes(b"x" * 9)
    for path, expected in (
        (tmp_path / "pipe", r"pipe: expected a regular file, found a pipe; name another file"),
        (Path("/dev/zero"), r"/dev/zero: expected a regular file, found a device"),
        (tmp_path / "link", r"link: is a link to a file that does not exist"),
        (tmp_path / "none", r"none: no such file"),
        (tmp_path / "long", r"long: expected a file of at most 8 bytes, found a larger one"),
        (tmp_path / "half \ud800", r"cannot be the name of a file"),
    ):
        with pytest.raises(UserError, match=expected):
            read_bytes(path, 8)
    assert read_bytes(tmp_path / "long", 9) == b"x" * 9
    with pytest.raises(UserError, match="at most 9 bytes"):
        read_bytes("/dev/zero", 9, stream=True)
    (tmp_path / "latin").write_bytes("Müller".encode("latin-1"))
    (tmp_path / "windows").write_bytes("ü\r\nb\r".encode())
    with pytest.raises(UserError, match="latin: not valid UTF-8 at byte 1; convert the file"):
        read_text(tmp_path / "latin")
    assert read_text(tmp_path / "windows") == "ü\nb\n"
    for data, expected in (
        (b'{"a": ' + b"9" * 5000 + b"}", "x: holds a number of more than 4,300 digits"),
        (b"\xff", "x: not valid JSON"),
        (b"[" * 100_000, "x: not valid JSON"),
        (b"[]", "x: expected a JSON object, found list"),
    ):
        with pytest.raises(UserError, match=expected):
            parse_json_object(data, "x")


def test_a_refusal_names_the_path_that_was_asked_for(tmp_path: Path) -> None:
    for made in (staged_folder, atomic_path):
        with pytest.raises(UserError) as error, made(tmp_path / "model") as temporary:
            raise UserError(f"{temporary}: not written; {temporary / 'a'} is no number")
        assert str(error.value) == f"{tmp_path / 'model'}: not written; {tmp_path / 'model' / 'a'} is no number"
    assert names(tmp_path) == []
