"""Import FAISS on first use of one of its names.

An installation may lack it: `faiss-cpu` and `faiss-gpu` both provide the module `faiss`, and only the user knows which
one fits the machine. Flat and BM25 indexes, and their fusion, work without it.
"""

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

from thresher.common.errors import UserError


class _Faiss:
    """The module `faiss`, imported when one of its names is read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_module(), name)


# Its type stubs lack half of the names that are used here.
faiss: Any = _Faiss()


def faiss_installed() -> bool:
    """Return whether the module `faiss` can be found; does not import it."""
    try:
        return find_spec("faiss") is not None
    except ValueError:  # it is in sys.modules without a specification
        return False


def need_faiss(what: str) -> None:
    """Raise UserError, which says that `what` needs FAISS, if it is not installed."""
    if not faiss_installed():
        raise UserError(f"{what} needs FAISS, which is not installed; {_REMEDY}")


_REMEDY = (
    "pip install faiss-cpu (faiss-gpu for searches on GPUs), or Thresher's extra [cpu] or [gpu], which installs it; "
    "indexes of kind flat, flat16 and bm25 do not need it"
)


@cache
def _module() -> Any:
    need_faiss("this")
    return importlib.import_module("faiss")
