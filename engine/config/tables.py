"""Strict conversion of nested TOML tables to frozen dataclasses and back.

Name, type and default define a field; its key is its name, without the final underscore of a name that Python reserves
(`async_`). A bound on a number is part of its type (`Count`, `Annotated[float, Within(..)]`); rules between fields are
in `check`. Types: int, float, bool, str, Literal of strings, tuple, dict[str, Any] (a free table), another Section,
dict[str, Section] (sections by name), each also `| None`. The default of an optional field is None, because TOML has no
null value.
"""

import difflib
import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from thresher.common.errors import UserError, is_unicode

T = TypeVar("T")


@dataclass(frozen=True)
class Within:
    """Bounds of a number, used as `Annotated[float, Within(low, high)]`; both are inclusive unless open."""

    low: float = -sys.float_info.max
    high: float = sys.float_info.max
    open_low: bool = False
    open_high: bool = False

    def admits(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"{'>' if self.open_low else '>='} {self.low}" if self.low > -sys.float_info.max else ""
        high = f"{'<' if self.open_high else '<='} {self.high}" if self.high < sys.float_info.max else ""
        return f"{low} and {high}" if low and high else low + high


Count = Annotated[int, Within(1)]
SmallCount = Annotated[int, Within(1, 65_536)]  # for objects that are allocated in advance: samples, slots, requests
Natural = Annotated[int, Within(0)]
Positive = Annotated[float, Within(0, open_low=True)]
NotNegative = Annotated[float, Within(0)]
NotNegative32 = Annotated[float, Within(0, 3.4e38)]  # for values that kernels take as float32
Share = Annotated[float, Within(0, 1)]
BelowOne = Annotated[float, Within(0, 1, open_high=True)]


class FieldError(UserError):
    """Error for an invalid value in a section. It contains the (dotted) key, not the file."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem


class Section:
    """Base of frozen dataclasses whose values are converted and checked on every construction.

    FORMER: (key, value) that used to be valid -> advice for the error message.
    """

    FORMER: ClassVar[Mapping[tuple[str, str], str]] = {}

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            object.__setattr__(self, name, _field_value(type(self), name, hint, getattr(self, name)))
        self.check()

    def check(self) -> None:
        """Check rules between fields; raise FieldError if one is violated."""

    @classmethod
    def wants(cls) -> str:
        """Return the required keys, in words."""
        return " and ".join(required(cls))


class Unfit(Exception):
    """Error for a value that does not fit its type; the caller that catches it adds the message."""


def from_dict(cls: type[T], table: object, where: str, *, flags: Collection[str] = (), path: tuple[str, ...] = ()) -> T:
    """Make a Section, or another dataclass, of nested tables.

    where: the file, named first in every error. flags: dotted keys set by `--set`, which errors then name instead.
    path: of `table` in the file. UserError for an unknown or missing key, a wrong type, a value out of range.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"{_place(where, path, flags)}: expected a section, got {shown(table)}")
    known = keys(cls)
    for key in table:
        if key not in known:
            raise UserError(f"{_place(where, (*path, key), flags)}: unknown key; {_suggestion(key, known)}")
    values: dict[str, Any] = {}
    for name, hint in hints(cls).items():
        here = (*path, key_of(name))
        if key_of(name) in table:
            nested = section_in(hint)
            value = table[key_of(name)]
            if nested:
                value = from_dict(nested, value, where, flags=flags, path=here)
            elif (named := named_section_in(hint)) and isinstance(value, Mapping):
                value = {
                    key: from_dict(named, part, where, flags=flags, path=(*here, key)) for key, part in value.items()
                }
            values[name] = value
        elif key_of(name) in required(cls):
            raise UserError(f"{_place(where, here, flags)}: expected {expected(hint)}, got nothing; add it")
    try:
        # A Section checks its values itself; values of other dataclasses are checked here.
        return cls(**{name: _field_value(cls, name, known[key_of(name)], value) for name, value in values.items()})
    except FieldError as error:
        raise UserError(f"{_place(where, (*path, *error.key.split('.')), flags)}: {error.problem}") from None


def check_key(cls: type, dotted: str) -> None:
    """Raise UserError unless there is a field of that dotted key; a free table accepts any key."""
    here: Any = cls
    for key in (part.strip() for part in dotted.split(".")):
        if (named := named_section_in(here)) is not None:
            here = named  # a section of any name
            continue
        if get_origin(here) is dict:
            return
        nested = section_in(here)
        known = {} if nested is None else keys(nested)
        if key not in known:
            hint = _suggestion(key, known) if known else "there is no section of that name"
            raise UserError(f"--set {dotted}: unknown key; {hint}")
        here = known[key]


def hints(cls: type) -> dict[str, Any]:
    """Return field name -> type hint, in the order of the fields."""
    types = get_type_hints(cls, include_extras=True)
    return {f.name: types[f.name] for f in fields(cls)}


def key_of(name: str) -> str:
    """Return the key of the field with this name."""
    return name.removesuffix("_")


def keys(cls: type) -> dict[str, Any]:
    """Return key -> type hint, in the order of the fields."""
    return {key_of(name): hint for name, hint in hints(cls).items()}


def required(cls: type) -> list[str]:
    """Return the keys of the fields without a default."""
    return [key_of(f.name) for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]


def section_in(hint: Any) -> type[Any] | None:
    """Return the dataclass of a hint (or hint `| None`); None for other hints."""
    inner = _inner(hint)
    return inner if isinstance(inner, type) and is_dataclass(inner) else None


def named_section_in(hint: Any) -> type[Any] | None:
    """Return the dataclass X of a hint dict[str, X] (or that `| None`), None for other hints."""
    inner = _inner(hint)
    return section_in(get_args(inner)[1]) if get_origin(inner) is dict else None


def _inner(hint: Any) -> Any:
    """Return X of `X | None`, and any other hint as it is."""
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not NoneType]
        return parts[0] if len(parts) == 1 else hint
    return hint


def _field_value(cls: type, name: str, hint: Any, value: Any) -> Any:
    """Return the value converted, or raise FieldError."""
    try:
        return _converted(hint, value)
    except Unfit:
        key = key_of(name)
        if issubclass(cls, Section) and isinstance(value, str) and (key, value) in cls.FORMER:
            raise FieldError(key, f"{shown(value)} is no longer a choice; {cls.FORMER[key, value]}") from None
        raise FieldError(key, f"expected {expected(hint)}, got {shown(value)}") from None


def _converted(hint: Any, value: Any) -> Any:
    """Convert `value` to the type of `hint`, or raise Unfit. Only int to float and list to tuple are converted."""
    inner = _inner(hint)
    origin, args = get_origin(inner), get_args(inner)
    if inner is not hint and value is None:
        return None
    if origin in (Union, UnionType):
        for choice in args:
            try:
                return _converted(choice, value)
            except Unfit:
                continue
        raise Unfit
    if origin is Annotated:
        number = _converted(args[0], value)
        return _require(all(bound.admits(number) for bound in args[1:]), number)
    if origin is Literal:
        return _require(isinstance(value, str) and value in args, value)
    if origin is tuple:
        _require(isinstance(value, list | tuple), value)
        items = args[:1] * len(value) if args[-1] is Ellipsis else args
        _require(len(items) == len(value), value)
        return tuple(_converted(item, part) for item, part in zip(items, value, strict=True))
    if origin is dict and (named := named_section_in(inner)):
        return dict(_require(isinstance(value, dict) and all(isinstance(x, named) for x in value.values()), value))
    if origin is dict:
        return plain(_require(isinstance(value, dict), value))
    if inner is str:
        return _require(isinstance(value, str) and value != "" and is_unicode(value), value)
    if inner is int:
        return _require(isinstance(value, int) and not isinstance(value, bool), value)
    if inner is float:
        _require(isinstance(value, int | float) and not isinstance(value, bool), value)
        try:
            return _require(value == value, float(value))
        except OverflowError:
            raise Unfit from None
    return _require(isinstance(value, inner), value)


def _require(fits: bool, value: T) -> T:
    if not fits:
        raise Unfit
    return value


def plain(value: Any) -> Any:
    """Return a deep copy made of strings, numbers, booleans, lists and dicts, or raise Unfit. A dataclass's fields
    that are None are dropped."""
    if is_dataclass(value):
        present = {key_of(f.name): getattr(value, f.name) for f in fields(value)}
        return {key: plain(part) for key, part in present.items() if part is not None}
    if isinstance(value, dict):
        _require(all(isinstance(key, str) and is_unicode(key) for key in value), value)
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, str):
        return _require(is_unicode(value), value)
    return _require(isinstance(value, int | float) and value == value, value)


def expected(hint: Any) -> str:
    """Describe the values that a hint accepts."""
    inner = _inner(hint)
    origin, args = get_origin(inner), get_args(inner)
    if origin in (Union, UnionType):
        return " or ".join(map(expected, args))
    if origin is Annotated:
        return f"{expected(args[0])} {' and '.join(map(str, args[1:]))}"
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in args)
    if origin is tuple:
        count = "" if args[-1] is Ellipsis else f"{len(args)} values, "
        return f"a list of {count}each {expected(args[0])}"
    if named_section_in(inner):
        return "a section under each name"
    if origin is dict:
        return "a table of strings, numbers, booleans, lists and tables"
    words = {str: "a string that is not empty", int: "an integer", float: "a number", bool: "true or false"}
    return words.get(inner, "a section")


def shown(value: Any, nothing: str = "nothing") -> str:
    """Return a value for an error message, as in TOML and shortened."""
    if value is None:
        return nothing
    if is_dataclass(value) or (isinstance(value, Mapping) and value):
        return "a table"
    try:
        text = toml_value(value)
    except Unfit:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _place(where: str, path: tuple[str, ...], flags: Collection[str]) -> str:
    if ".".join(path) in flags:
        return f"--set {'.'.join(path)}"
    if not path:
        return where
    *section, key = path
    return f"{where}: [{'.'.join(section)}] {key}" if section else f"{where}: {key}"


def _suggestion(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"


def to_toml(tables: dict[str, dict[str, Any]]) -> str:
    """Return a TOML file of sections, one line per key; tables inside a section are inline."""
    blocks = [
        "\n".join([f"[{name}]", *(f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items())])
        for name, table in tables.items()
    ]
    return "\n\n".join(blocks) + "\n"


def toml_value(value: Any) -> str:
    """Return a value as one line of TOML that reads back to the same value and type; raise Unfit if there is none."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON escapes all characters that TOML must escape, except DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)  # shortest exact text of a float; inf and nan are spelt as in TOML
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{toml_key(key)} = {toml_value(part)}" for key, part in value.items())
        return f"{{{', '.join(pairs)}}}"
    raise Unfit


def toml_key(key: str) -> str:
    """Return a key, quoted if necessary."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)
