"""Files of stored records, as tests read them."""

from pathlib import Path
from typing import Any

from thresher.common.records import RecordLog


def stored(path: Path) -> list[dict[str, Any]]:
    """The records of a file that may still be growing, each as it was handed in."""
    assert path.is_file(), path
    return [record for _, record in RecordLog(path).recover()]
