"""A user's own system: a Python file at any path, which is imported anew and tested once.

During its import it can import modules and packages in its own folder. They are imported anew too, and removed from
sys.modules afterwards, so that files of equal names next to two systems do not conflict. Later imports do not find
them.

Every error that such a file raises, on import or later in its functions, becomes a UserError that names file and line.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import partial, wraps
from hashlib import blake2b, sha256
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast, get_args

from thresher.common.errors import UserError, as_number
from thresher.common.files import MOST_TEXT, read_bytes
from thresher.engine.config.tables import from_dict
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Fold,
    Prompt,
    Request,
    Score,
    SpawnBranches,
    SubCall,
    System,
)
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult, Source, TextSegment, reward_all

FIRST: tuple[type, ...] = (Prompt,)
AFTER_PROMPT: tuple[type, ...] = tuple(kind for kind in get_args(Request) if kind is not Prompt)
# Errors of a file that become UserError: all except an interrupt.
FAULTS = (Exception, SystemExit, GeneratorExit)
LARGEST = 1e9  # limit of a reward and its parts, because squares are summed over a group and written as JSON

T = TypeVar("T")


def is_path(name: str) -> bool:
    """Return True if the name of a system is the path of a file."""
    return "/" in name or name.endswith(".py")


def own_digest(name: str) -> str | None:
    """Return the SHA-256, in hex, of a user's system file and the files that it imported from its folder. None for the
    name of a built-in system."""
    if not is_path(name):
        return None
    path = Path(name)
    _check_file(path)
    if path.resolve() not in _beside:
        _import_file(path)
    content = read_bytes(path, MOST_TEXT)
    for file in _beside[path.resolve()]:
        content += f"\n{file.relative_to(path.resolve().parent).as_posix()}\n".encode() + file.read_bytes()
    return sha256(content).hexdigest()


def load_own_system(path: Path, options: Mapping[str, Any]) -> System:
    """Return the file's System with its switches set. UserError if the file cannot be imported or makes no System."""
    module = _import_file(path)
    kind, make = getattr(module, "Options", None), getattr(module, "system", None)
    if not (isinstance(kind, type) and is_dataclass(kind) and callable(make)):
        raise UserError(
            f"{path}: a system's file needs a dataclass Options and a function system(options); add what is missing"
        )
    chosen = from_dict(kind, dict(options), "[system.options]")
    made = _called(partial(make, chosen), "system(options)", path)
    if not isinstance(made, System):
        raise UserError(f"{path}: system(options) returned {type(made).__name__}; it should return a System")
    made = replace(
        made,
        episode=partial(_own_episode, path=path, episode=made.episode),
        reward=partial(_own_reward, path=path, reward=made.reward),
        reward_group=made.reward_group and partial(_own_group_reward, path=path, reward_group=made.reward_group),
        answer=_guarded(made.answer, "answer(attempt)", path),
        claims=made.claims and _guarded(made.claims, "claims(attempt)", path),
    )
    for size in (1,) if made.reward_group is None else (1, 2):
        reward_all(made.reward, made.reward_group, [_nothing_written(made)] * size, [0] * size)
    return made


def load_functions(wanted: Mapping[str, str]) -> dict[str, Callable[..., object]]:
    """Return functions of a user's files. wanted: key of the recipe -> path, ":" and function. Each file is imported
    once. UserError for a file that cannot be imported or lacks the function."""
    modules: dict[Path, ModuleType] = {}
    found = {}
    for key, named in wanted.items():
        file, _, name = named.rpartition(":")
        path = Path(file)
        if not path.is_file():
            raise UserError(f"{key}: {file}: no such file; give FILE.py:FUNCTION")
        if path not in modules:
            modules[path] = _import_file(path)
        function = getattr(modules[path], name, None)
        if not callable(function):
            raise UserError(f"{key}: {file} has no function {name}; add it, or name another")
        found[key] = function
    return found


def load_own_function(named: str, key: str) -> Callable[..., Any]:
    """Return the function of a user's file that a recipe key names; its exceptions become UserErrors."""
    found = load_functions({key: named})[key]
    file, _, name = named.rpartition(":")

    @wraps(found)
    def guarded(*given: Any, **others: Any) -> Any:
        return _called(partial(found, *given, **others), f"{name}(..)", Path(file))

    return guarded


def _called(call: Callable[[], T], what: str, path: Path) -> T:
    """Call a function of the file; its exceptions become UserErrors."""
    try:
        return call()
    except UserError:
        raise
    except FAULTS as error:
        raise _fault(what, path, error) from error


def _fault(what: str, path: Path, error: BaseException) -> UserError:
    return UserError(f"{path}: {what} raised {described(error, path)}; fix the file")


def _guarded(call: Callable[[RewardInput], T], what: str, path: Path) -> Callable[[RewardInput], T]:
    return lambda attempt: _called(partial(call, attempt), what, path)


def _own_episode(
    question: Question, config: EpisodeConfig, *, path: Path, episode: Callable[[Question, EpisodeConfig], Episode]
) -> Episode:
    """Return the file's episode. UserError if it raises, or yields a request that the engine cannot answer."""
    what = "episode(question, config)"
    running = _called(partial(episode, question, config), what, path)
    answer, wanted = None, FIRST
    while True:
        try:
            request = running.send(answer)
        except StopIteration as stop:
            if wanted is AFTER_PROMPT and isinstance(stop.value, str):
                return stop.value
            expected = "the reason why it ended, after at least a Prompt"
            raise UserError(f"{path}: {what} returned {stop.value!r}; expected {expected}; fix the file") from None
        except UserError:
            raise
        except FAULTS as error:
            raise _fault(what, path, error) from error
        if not isinstance(request, wanted):
            place = "yielded first" if wanted is FIRST else "yielded after its prompt"
            expected = ", ".join(each.__name__ for each in wanted)
            raise UserError(f"{path}: {what} {place} {request!r}; expected {expected}; fix the file")
        allowed: Any = str | BranchPrompt if isinstance(request, Score) else BranchPrompt
        asked = [request.context] if isinstance(request, Fold | SubCall | Score) else []
        asked += request.branches.values() if isinstance(request, SpawnBranches) else []
        if not all(isinstance(context, allowed) for context in asked):
            raise UserError(f"{path}: {what} yielded {request!r}; expected a BranchPrompt as its context; fix the file")
        answer, wanted = (yield request), AFTER_PROMPT


def _own_reward(attempt: RewardInput, *, path: Path, reward: Callable[[RewardInput], RewardResult]) -> RewardResult:
    """Call the file's reward. UserError if it raises, or returns an unusable result."""
    result = _with_numbers(_called(partial(reward, attempt), "reward(attempt)", path))
    if wrong := _wrong(result):
        raise UserError(f"{path}: reward(attempt) returned {wrong}; fix the file")
    return cast(RewardResult, result)


def _own_group_reward(
    attempts: Sequence[RewardInput], *, path: Path, reward_group: Callable[[Sequence[RewardInput]], Any]
) -> Sequence[RewardResult]:
    """Call the file's group reward. UserError as `_own_reward`, and unless it returns one result per attempt."""
    found = _called(partial(reward_group, attempts), "reward_group(attempts)", path)
    if not isinstance(found, list | tuple) or len(found) != len(attempts):
        what = f"{len(found)} results" if isinstance(found, list | tuple) else type(found).__name__
        wrong: str | None = f"{what} for a group of {len(attempts)}; expected a list with a RewardResult for each"
    else:
        found = [_with_numbers(result) for result in found]
        faults = ((number, _wrong(result)) for number, result in enumerate(found, 1))
        wrong = next((f"for attempt {number} of {len(found)} {fault}" for number, fault in faults if fault), None)
    if wrong:
        raise UserError(f"{path}: reward_group(attempts) returned {wrong}; fix the file")
    return cast(Sequence[RewardResult], found)


def _with_numbers(result: object) -> object:
    """Return the result with numbers of other types, such as NumPy's, as floats."""
    if not isinstance(result, RewardResult) or not isinstance(result.parts, dict):
        return result
    return replace(result, reward=_float(result.reward), parts={key: _float(x) for key, x in result.parts.items()})


def _float(value: Any) -> Any:
    if value is None or isinstance(value, int | float) or (found := as_number(value)) is None:
        return value
    return found


def _wrong(result: object) -> str | None:
    if not isinstance(result, RewardResult):
        return f"{type(result).__name__}; it should return a RewardResult"
    if not isinstance(result.parts, dict):
        return f"parts of {type(result.parts).__name__}; they should be a dict of numbers"
    for name, value in {"reward": result.reward, **result.parts}.items():
        if value is None and name != "reward":
            continue  # a part that was not measured
        if not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
            huge = isinstance(value, int) and value.bit_length() > 64  # which Python may refuse to convert to a string
            found = "a huge number" if huge else repr(value)
            return f"{name} = {found}, which is not a finite number of at most {LARGEST:.0e}"
    if not isinstance(result.answer, str | None):
        return f"an answer of {type(result.answer).__name__}; it should be a string, or None if there is none"
    return None


def _nothing_written(system: System) -> RewardInput:
    """Return an input without text or branches. Every reward must be able to score it, because a policy may end its
    text at once. Judges have answered, and a passage is shown if the system shows passages."""
    return RewardInput(
        pieces=[TextSegment(Source.PROMPT, b"Who?"), TextSegment(Source.POLICY, b"")],
        golds=("somebody",),
        question="Who?",
        passages=[("Somebody", "It was somebody.")] * system.given_passages,
        entailment=None if system.claims is None else 0.0,
        verdict=False if system.wants_verdict else None,
    )


def _import_file(path: Path) -> ModuleType:
    """Import the file as a module; every call executes it again."""
    _check_file(path)
    # Dataclasses look their module up by name, so the name must be unique.
    name = f"thresher_own_system_{blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        with _importing_beside(path.resolve()):
            exec(compile(read_bytes(path, MOST_TEXT), str(path), "exec"), module.__dict__)
    except FAULTS as error:
        del sys.modules[name], _beside[path.resolve()]
        raise UserError(f"{path}: importing it raised {described(error, path)}; fix the file") from error
    return module


_beside: dict[Path, list[Path]] = {}  # file of a system -> files that it imported from its folder


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """Search the folder of `path` first for modules in the block. Afterwards the modules found there are recorded and
    removed from sys.modules."""
    folder, known, writing = path.parent, set(sys.modules), sys.dont_write_bytecode
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # no __pycache__ next to the user's file
    try:
        yield
    finally:
        sys.dont_write_bytecode = writing
        sys.path.remove(str(folder))
        found = [name for name in sys.modules if name not in known and _lies_in(folder, name)]
        files = [file for name in found if (file := getattr(sys.modules[name], "__file__", None))]
        _beside[path] = sorted(Path(file).resolve() for file in files)
        for name in found:
            del sys.modules[name]


def _lies_in(folder: Path, name: str) -> bool:
    """Return True if a loaded module is directly in the folder, or belongs to a package there."""
    top = sys.modules.get(name.partition(".")[0])
    places = list(getattr(top, "__path__", ())) or [getattr(top, "__file__", None)]
    return any(place is not None and Path(place).resolve().parent == folder for place in places)


def _check_file(path: Path) -> None:
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{path}: no such Python file; name a system, or the path of a file that ends in .py")


def described(error: BaseException, path: Path) -> str:
    """Describe an error of the user's file briefly, with the last line of that file in its traceback."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    words = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{type(error).__name__}{f' ({words})' if words else ''}{f' at line {line}' if line else ''}"
