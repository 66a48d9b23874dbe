"""Reading of whole files, and atomic writing of files and folders.

A run may be killed at any moment, so data is written to a temporary sibling, flushed to the disk, and renamed over its
target. A kill leaves the old file and at most a temporary one, whose name starts with a dot and ends in `.tmp`. There
are no locks here (locks.py): of two concurrent writers of a file the later one wins.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError, shown

# Largest sizes of files that are read whole: any, a tokenizer, JSON, and text (a template, a prompt, a recipe).
MOST_BYTES, MOST_TOKENIZER, MOST_JSON, MOST_TEXT = 2**30, 2**28, 2**26, 2**24
# owner/model; no owner on the Hub can be called "models", a common name for a local folder of models.
_HUB_ID = re.compile(r"(?!models/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def as_path(path: object) -> Path:
    """Return the path as a Path. UserError for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"{shown(path)} is not a path; give a folder as a string or a pathlib.Path")
    return Path(path)


def refuse_hub_id(path: str | Path) -> None:
    """Raise UserError if `path` does not exist and may be a model's name on the Hugging Face Hub. The error has the
    download command. Code that takes a model's folder calls this first; nothing is downloaded automatically."""
    path = as_path(path)
    if _HUB_ID.fullmatch(str(path)) and not path.exists() and not path.parent.is_dir():
        raise UserError(
            f"{path}: no such folder; if it is a model's name on the Hugging Face Hub, download it and give its "
            f"folder: hf download {path} --local-dir models/{path.name}"
        )


def model_folder(path: str | Path) -> Path:
    """Return `path` as the folder of a model. UserError, naming the kind of file, for anything else."""
    refuse_other_folder(path)
    path = Path(path)
    if path.is_file():
        raise UserError(f"{path}: is a file; give the folder that contains it, with weights and tokenizer")
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a model's folder with --model or --set model.path=FOLDER")
    return path


def refuse_other_folder(path: str | Path) -> None:
    """Raise UserError if `path` is a name on the Hub, with the download command, or the folder of a run."""
    refuse_hub_id(path)
    if saved := sorted(Path(path).glob("checkpoints/step_*")):
        raise UserError(f"{path}: is a run's folder, not a model's; give one of its checkpoints, such as {saved[-1]}")


def unreadable(path: Path, error: OSError) -> UserError:
    """Return the error for a file that exists and cannot be read."""
    what = "name a file in it" if isinstance(error, IsADirectoryError) else "check the path and its permissions"
    return UserError(f"{path}: cannot be read ({error.strerror}); {what}")


def check_file(path: str | Path, most: int | None = None) -> None:
    """Raise UserError unless `path` is a readable regular file of at most `most` bytes. A FIFO is not opened."""
    path = Path(path)
    try:
        found = path.stat()
    except OSError as error:
        raise _unopened(path, error) from None
    except ValueError as error:  # a zero byte, or a lone surrogate
        raise UserError(f"{str(path)!r}: cannot be the name of a file ({error}); correct it") from None
    if stat.S_ISDIR(found.st_mode):
        raise unreadable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: expected a regular file, found {_kind(found.st_mode)}; name another file")
    if most is not None and found.st_size > most:
        raise _too_large(path, most)


def read_bytes(path: str | Path, most: int = MOST_BYTES, *, stream: bool = False) -> bytes:
    """Return the content of a file. UserError as `check_file`. stream: pipes and finite devices are allowed."""
    path = Path(path)
    if not stream:
        check_file(path, most)
    data = bytearray()
    try:
        with path.open("rb") as file:
            while len(data) <= most and (part := file.read(min(2**20, most + 1 - len(data)))):
                data += part
    except OSError as error:
        raise _unopened(path, error) from None
    except ValueError as error:
        raise UserError(f"{str(path)!r}: cannot be the name of a file ({error}); correct it") from None
    if len(data) > most:
        raise _too_large(path, most)
    return bytes(data)


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, with line ends converted to line feeds. UserError as `check_file`."""
    data = read_bytes(path, MOST_TEXT)
    return decode_text(data, str(path)).replace("\r\n", "\n").replace("\r", "\n")


def decode_text(data: bytes, where: str) -> str:
    """Decode UTF-8. UserError, naming `where`, for anything else."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not valid UTF-8 at byte {error.start}; convert the file") from None


def _unopened(path: Path, error: OSError) -> UserError:
    if not isinstance(error, FileNotFoundError):
        return unreadable(path, error)
    if path.is_symlink():
        return UserError(f"{path}: is a link to a file that does not exist; complete the folder, or remove the link")
    return UserError(f"{path}: no such file; check the path, or complete the folder")


def _too_large(path: Path, most: int) -> UserError:
    return UserError(f"{path}: expected a file of at most {most:,} bytes, found a larger one; name another file")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. UserError, naming `where`, for anything else."""
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: line {error.lineno} is not valid JSON ({error.msg}); fetch or write the file again"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); fetch or write the file again") from None
    except ValueError:  # a number with too many digits for Python
        digits = sys.get_int_max_str_digits()
        raise UserError(
            f"{where}: holds a number of more than {digits:,} digits; fetch or write the file again"
        ) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise UserError(f"{where}: expected a JSON object, found {kind}; fetch or write the file again")
    return value


def read_json_object(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    """Return the JSON object in a file of at most `most` bytes. UserError as `check_file` and `parse_json_object`."""
    return parse_json_object(read_bytes(path, most), str(path))


class Unwritable(UserError):
    """Error for a file or folder that cannot be written."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: cannot be written ({error.strerror}); {remedy(error)}")
        self.path, self.error = path, error


def remedy(error: OSError) -> str:
    """Return the advice for a path that cannot be written, as a part of a message."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "make room for it" if full else "choose another path"


def show_bytes(size: float) -> str:
    """Format a size for display, in powers of 1,000: "64.6 GB"."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


def need_room(path: Path, size: int, what: str) -> None:
    """Raise Unwritable if the disk of `path`, which need not exist yet, has fewer than `size` free bytes. what: name
    of the data, for the error. A quota that the system does not report as used space is detected only when reached."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if size > free:
        words = f"{what} needs {show_bytes(size)} of disk, but {show_bytes(free)} are free"
        raise Unwritable(path, OSError(errno.ENOSPC, words))


def append_bytes(path: Path, data: bytes) -> None:
    """Append to a file; the data survives a later kill. Unwritable if it fails, possibly after a partial line."""
    try:
        with path.open("ab", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
    except OSError as error:
        raise Unwritable(path, error) from None


@contextmanager
def writing(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Name `path` in errors of writing it or its temporary sibling; errors of other files are not changed."""
    temporary = temporary or path
    try:
        yield
    except UserError as inner:
        inner.args = (str(inner).replace(os.fspath(temporary), os.fspath(path)),)
        if not isinstance(inner, Unwritable):
            raise
        if inner.path.is_relative_to(temporary):
            raise Unwritable(path / inner.path.relative_to(temporary), inner.error) from None
        raise
    except OSError as error:
        if error.filename is None:
            raise Unwritable(path, error) from None
        if Path(error.filename).is_relative_to(temporary):
            raise Unwritable(path / Path(error.filename).relative_to(temporary), error) from None
        raise


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write to. It is renamed to `path` when the block ends, or deleted if the
    block raises. Unwritable if it cannot be written. The folder must exist."""
    path = Path(path)
    temporary = _temporary_sibling(path)
    try:
        with writing(path, temporary):
            yield temporary
            flush(temporary)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to `path` atomically: readers see the old file or the whole new one. The folder must exist."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a text as by `atomic_write_bytes`, in UTF-8 with unchanged line ends."""
    atomic_write_bytes(path, text.encode("utf-8"))


@contextmanager
def staged_folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a new empty folder next to `path`. It is renamed to `path` when the block ends, or deleted if it raises.

    UserError if `path` exists, unless `replace`; then the old folder is renamed just before the new one gets its name,
    and deleted afterwards. A kill between the two renames leaves the old folder under a temporary name.
    """
    path = Path(path)
    refuse_existing(path, replace)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unwritable(path, error) from None
    temporary = _temporary_sibling(path)
    try:
        with writing(path, temporary):
            temporary.mkdir()
            yield temporary
            for file in sorted(temporary.rglob("*")):
                flush(file)
            refuse_existing(path, replace)
            if replace:
                _move_into_place(temporary, path)
            else:
                try:
                    os.rename(temporary, path)
                except OSError:
                    refuse_existing(path, replace)  # it has appeared since
                    raise
                flush(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _move_into_place(temporary: Path, path: Path) -> None:
    old = _temporary_sibling(path)
    try:
        os.rename(path, old)
    except FileNotFoundError:
        os.rename(temporary, path)
    else:
        try:
            os.rename(temporary, path)
        except BaseException:
            os.rename(old, path)
            raise
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    flush(path.parent)


def delete_folder(path: Path) -> None:
    """Delete a folder. It is renamed first, so a kill leaves no incomplete folder under its name."""
    hidden = path.with_name(f".{path.name}.tmp")
    if hidden.exists():  # left by a kill
        shutil.rmtree(hidden)
    shutil.rmtree(path.rename(hidden))


def refuse_existing(path: Path, replace: bool = False) -> None:
    """Raise UserError if `path` exists, unless it is to be replaced."""
    if not replace and os.path.lexists(path):
        raise UserError(f"{path}: exists already; choose another name or remove it first")


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def flush(path: Path) -> None:
    """Flush the file or folder `path` to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
