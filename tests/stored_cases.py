"""Files of stored records, as tests read them."""

from pathlib import Path
from typing import Any

from thresher.common.records import read_records


def stored(path: Path) -> list[dict[str, Any]]:
    """The records of a file that may still be growing, each as it was handed in."""
    return [record for _, record in read_records(path, growing=True, foreign=True)]
