"""Plain rewards over plain prompts: the question is the prompt, and the policy answers in one turn, without tags.

    reward = sum_k weight_k f_k(attempt)

f_k are the user's functions, each named as FILE.py:FUNCTION, or passed to `thresher.engine.GRPO`. Gold answers are not
needed. The first parameter of a function gets the text that the policy wrote, or the whole RewardInput if it is
annotated as such or named `attempt`. Other parameters are filled by name: `question`, `golds`, `passages`, or another
key of the question's record; **columns gets all keys. The function returns a number (of Python, NumPy or torch), or a
RewardResult, whose parts become measures too.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError, as_number, shown
from thresher.engine.episode import Episode, EpisodeConfig, Generate, Prompt, System, read_preset
from thresher.engine.systems._own_file import FAULTS, LARGEST, described, load_own_function
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult

IN_PROCESS = "python:"  # prefix of the name of a function that was passed to GRPO and is in no file
given: dict[str, Callable[..., Any]] = {}  # name -> function, passed to GRPO by this program or loaded from files
TRL_LISTS = ("prompts", "completions", "completion_ids")  # arguments of TRL's reward functions


@dataclass(frozen=True, kw_only=True)
class Options:
    """rewards: FILE.py:FUNCTION, one or several; the reward is their weighted sum. weights: one each; None: all 1."""

    rewards: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def episode(question: Question, config: EpisodeConfig) -> Episode:
    yield Prompt(config.template, question.question)
    yield Generate(stop=())
    return "answered"


def system(options: Options) -> System:
    names, weights = options.rewards, options.weights or (1.0,) * len(options.rewards)
    if not names or len(weights) != len(names) or not all(map(math.isfinite, weights)):
        raise UserError(
            f"[system.options]: {len(names)} rewards have {len(weights)} weights; expected at least one reward, and a "
            "finite weight for each, or none at all"
        )
    calls = [_called_with_columns(_load(name), name) for name in names]
    return System(
        name="plain",
        tags=(),
        episode=episode,
        reward=partial(_reward, calls=calls, labels=_labels(names), weights=weights),
        template="{question}",
        preset=read_preset(Path(__file__).with_suffix(".toml")),
        answer=lambda attempt: attempt.text.strip() or None,
        needs_golds=False,
    )


def _load(name: str) -> Callable[..., Any]:
    if name in given:
        return given[name]
    if not name.startswith(IN_PROCESS):
        return load_own_function(name, "reward")

    def absent(attempt: RewardInput) -> RewardResult:  # raises only when called: a report needs no reward
        raise UserError(
            f"the reward {name} was a function of the program that trained, and is in no file; run that program, or "
            "write the function into a file and name it, FILE.py:FUNCTION"
        )

    return absent


def _labels(names: Sequence[str]) -> list[str]:
    """Return the functions' names as names of reward parts; a repeated name is followed by its number."""
    short = [name.rpartition(":")[2] for name in names]
    return [one if short.count(one) == 1 else f"{one}_{number}" for number, one in enumerate(short, 1)]


def _reward(
    attempt: RewardInput,
    *,
    calls: Sequence[Callable[[RewardInput], RewardResult]],
    labels: Sequence[str],
    weights: Sequence[float],
) -> RewardResult:
    results = [call(attempt) for call in calls]
    parts: dict[str, float | int | bool | None] = {}
    for result in results:
        parts |= result.parts
    if len(results) > 1:
        parts |= {label: result.reward for label, result in zip(labels, results, strict=True)}
    answer = next((result.answer for result in results if result.answer is not None), attempt.text.strip() or None)
    pairs = list(zip(weights, results, strict=True))
    turns = [[w * value for value in one.turns] for w, one in pairs if one.turns is not None]
    if len({len(values) for values in turns}) > 1:
        raise UserError(
            f"rewards {', '.join(labels)}: they have different numbers of turns; expected one for each turn"
        )
    spans = [(start, end, w * value) for w, one in pairs for start, end, value in one.tokens or ()]
    return RewardResult(
        math.fsum(w * one.reward for w, one in pairs),
        parts,
        answer,
        [math.fsum(values) for values in zip(*turns, strict=True)] if turns else None,
        spans or None,
    )


def _called_with_columns(function: Callable[..., Any], name: str) -> Callable[[RewardInput], RewardResult]:
    """Return a function of RewardInput that fills the parameters. UserError for a signature that cannot be filled."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(f"reward {name}: its parameters cannot be read; give a function of Python") from None
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise UserError(f"reward {name}: it is an async function; expected one that returns a number")
    first = parameters[0] if parameters else None
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise UserError(f"reward {name}: expected a first parameter for the text or the RewardInput; add one")
    if first.name in TRL_LISTS:
        raise UserError(
            f"reward {name}: its first parameter is {first.name}, a list in TRL; here a function gets one text and "
            "returns one number, so name the parameter text"
        )
    whole = first.name == "attempt" or first.annotation in (RewardInput, "RewardInput")
    wanted = {p.name: p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = Path(code.co_filename if code else "")

    def call(attempt: RewardInput) -> RewardResult:
        columns = _columns(attempt)
        missing = [key for key, p in wanted.items() if key not in columns and p.default is p.empty]
        if missing:
            raise UserError(
                f"reward {name}: it takes {', '.join(missing)}, which the question {attempt.question[:60]!r} "
                f"does not have; its keys are {', '.join(columns)}"
            )
        passed = columns if everything else {key: columns[key] for key in wanted if key in columns}
        try:
            found = function(attempt if whole else attempt.text, **passed)
        except UserError:
            raise
        except FAULTS as error:
            raise UserError(f"reward {name} raised {described(error, file)}; fix the function") from error
        return _checked(found, name)

    return call


def _columns(attempt: RewardInput) -> Mapping[str, Any]:
    own = {"question": attempt.question, "golds": attempt.golds, "passages": attempt.passages}
    return own | {"golden_answers": attempt.golds} | {key: attempt.metadata[key] for key in attempt.metadata}


def _checked(found: Any, name: str) -> RewardResult:
    result = found if isinstance(found, RewardResult) else RewardResult(found)
    value = _number(result.reward)
    if value is None:
        hint = " for the one text that it gets" if isinstance(found, list | tuple) else ""
        raise UserError(
            f"reward {name} returned {shown(found)}; expected a finite number of at most {LARGEST:.0e}{hint}, or a "
            "RewardResult"
        )
    if not isinstance(result.parts, Mapping) or not isinstance(result.answer, str | None):
        raise UserError(f"reward {name} returned {shown(result)}; expected a dict of parts, and a text or no answer")
    parts = {key: part if isinstance(part, bool | None) else _number(part) for key, part in result.parts.items()}
    for key, part in result.parts.items():
        if part is not None and parts[key] is None:
            raise UserError(
                f"reward {name} returned the part {key!r} = {shown(part)}; expected a finite number or None"
            )
    return RewardResult(value, parts, result.answer, result.turns, result.tokens)


def _number(value: Any) -> float | None:
    number = float(value) if isinstance(value, bool) else as_number(value)
    return number if number is not None and abs(number) <= LARGEST else None
