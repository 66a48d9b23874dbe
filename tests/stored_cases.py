"""Files of stored records, as tests read them."""

import shutil
from pathlib import Path
from typing import Any

from thresher.common.records import RecordLog


def stored(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that may still be growing, each as it was appended."""
    assert path.is_file(), path
    return [record for _, record in RecordLog(path).recover()]


def reweighted(source: Path, folder: Path, by: float = 0.01) -> Path:
    """Copy a model folder, with `by` added to every weight; return the copy."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    save_file({name: weight + by for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "hashes.json").unlink(missing_ok=True)
    return folder
