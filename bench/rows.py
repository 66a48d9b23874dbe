"""Where a bench's rows and picture go: looked at before an hour of measuring, and written a row at a time."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError


def append_rows(path: str | Path | None, *rows: dict[str, Any]) -> None:
    """Adds JSON lines to `path`; nothing for None."""
    if path is not None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def check_files(out: str | Path | None, plot: str | Path | None) -> None:
    """UserError for a file that cannot be written, and for a picture without matplotlib; makes the folders."""
    if plot is not None and find_spec("matplotlib") is None:
        raise UserError(f"--plot {plot}: matplotlib is not installed; install it, or leave the picture out")
    for flag, path in (("--out", out), ("--plot", plot)):
        if path is None:
            continue
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if flag == "--out":
                append_rows(path)
            elif Path(path).is_dir():
                raise IsADirectoryError(0, "it is a folder")
        except OSError as error:
            raise UserError(f"{flag} {path}: cannot be written ({error.strerror}); choose another file") from None
