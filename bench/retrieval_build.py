"""An index of bare vectors, built in a process of its own: how long it takes and how much memory, from the first byte.

The process does what `thresher index build` does between encoding and tuning, through the same code, and imports what
that needs and no more. Its memory is VmHWM: the most that was resident at once, the part of the vectors' file that was
mapped at that moment included. What a folder holds is built once; a build that was cut off is gone on with, and its
figures say so.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.retrieval.indexes.kinds import INDEX_FILE, Kind, parse_kind
from thresher.retrieval.indexes.structures import SCRATCH, grow, read_structure
from thresher.retrieval.indexes.vector_file import VectorFile

RECORD, BEGUN = "built.json", "begun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A structure on the disk: seconds and bytes of memory of the process that finished it, bytes of the file, and
    whether it had gone on with what another left."""

    folder: Path
    seconds: float
    peak_bytes: int
    disk_bytes: int
    resumed: bool

    def read(self, kind: Kind, vectors: VectorFile) -> Any:
        """Read FAISS's index; a graph gets its vectors."""
        return read_structure(self.folder / INDEX_FILE, kind, vectors)


def built(kind: Kind, vectors: VectorFile, folder: Path, seconds: float) -> Built | None:
    """Build the structure of `kind` over `vectors` in `folder`, unless it is there; None if `seconds` did not suffice.
    RuntimeError, with its last line, when the process fails."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RECORD).is_file():
        arguments = [str(vectors.path), str(vectors.rows), str(vectors.dim), kind.name, str(folder)]
        command = [sys.executable, "-P", "-m", "thresher.bench.retrieval_build", *arguments]
        try:
            subprocess.run(command, timeout=seconds, check=True, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            return None
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
            raise RuntimeError(f"{kind.name} over {vectors.rows} vectors was not built: {lines[-1]}") from None
    record = json.loads((folder / RECORD).read_text("utf-8"))
    return Built(folder=folder, disk_bytes=(folder / INDEX_FILE).stat().st_size, **record)


def _build(path: Path, rows: int, dim: int, name: str, folder: Path) -> None:
    resumed = (folder / BEGUN).exists()
    (folder / BEGUN).touch()
    started = time.perf_counter()
    grow(parse_kind(name, rows, dim), VectorFile(path, rows, dim), folder, lambda what, done, of: None)
    figures = {"seconds": time.perf_counter() - started, "peak_bytes": _peak_bytes(), "resumed": resumed}
    for scratch in SCRATCH:
        (folder / scratch).unlink(missing_ok=True)
    (folder / RECORD).write_text(json.dumps(figures) + "\n", "utf-8")


def _peak_bytes() -> int:
    """Return VmHWM of this process; what its parent had is not in it, as it would be in `ru_maxrss`."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    _build(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
