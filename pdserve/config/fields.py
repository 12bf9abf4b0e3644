"""The schema as a table: every `section.field` with its type, and what that type accepts in words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from pdserve.config.schema import NodeConfig

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the schema. `annotation` is what msgspec checks a value against."""

    section: str
    name: str
    annotation: Any
    default: object
    description: str
    secret: bool
    unit: str
    form: str
    many: bool
    boolean: bool
    optional: bool
    expected: str

    @property
    def key(self) -> str:
        """`section.name`, as errors and `config check` write it."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"PDSERVE_{self.section}_{self.name}".upper()


@cache
def fields() -> dict[str, Field]:
    """Every field by its key, in the order of the schema."""
    table: dict[str, Field] = {}
    for section, struct in get_type_hints(NodeConfig).items():
        hints = get_type_hints(struct, include_extras=True)
        for info in msgspec.structs.fields(struct):
            kind = inspect.type_info(hints[info.name])
            description = ""
            extra: dict[str, Any] = {}
            while isinstance(kind, inspect.Metadata):
                description = description or (kind.extra_json_schema or {}).get("description", "")
                extra = {**(kind.extra or {}), **extra}
                kind = kind.type
            plain = _without_none(kind)
            field = Field(
                section=section,
                name=info.name,
                annotation=hints[info.name],
                default=info.default,
                description=description,
                secret=bool(extra.get("secret")),
                unit=extra.get("unit", ""),
                form=extra.get("form", ""),
                many=isinstance(plain, inspect.VarTupleType),
                boolean=isinstance(plain, inspect.BoolType),
                optional=_allows_none(kind),
                expected=_accepts(plain, extra),
            )
            table[field.key] = field
    return table


def _allows_none(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.UnionType) and kind.includes_none


def _without_none(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        rest = [item for item in kind.types if not isinstance(item, inspect.NoneType)]
        return _without_none(rest[0])
    return kind


def _accepts(kind: inspect.Type, extra: dict[str, Any]) -> str:
    """What a type accepts, in words: the "limit" part of an error."""
    if extra.get("form") == "cpus":
        return 'a list of CPU numbers, as [0, 1] or "0-1,4"'
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        noun = "an integer" if isinstance(kind, inspect.IntType) else "a number"
        if extra.get("unit") == "bytes":
            noun = 'a size in bytes (or as "512MiB")'
        return noun + _range(kind)
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(str(value) for value in kind.values)
    if isinstance(kind, inspect.VarTupleType):
        return "a list of strings"
    if isinstance(kind, inspect.StrType) and kind.pattern is not None:
        return f"a string that matches {kind.pattern}"
    if isinstance(kind, inspect.StrType):
        return f"a string of {kind.min_length or 0} to {kind.max_length} characters"
    raise TypeError(f"the schema uses a type without words: {kind}")


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low = f" from {kind.ge}" if kind.ge is not None else f" above {kind.gt}" if kind.gt is not None else ""
    high = f" to {kind.le}" if kind.le is not None else ""
    return low + high


def parse_size(text: str) -> int | None:
    """Bytes of "1048576", "512MiB", "1.5GiB" or "2GB" (kMGT alone are powers of 1024, with B powers of 1000).

    None if `text` is not a size. A bare letter means what it means to most people who type it into a server's
    flag: 1g is 1024 * 1024 * 1024.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, letter, binary = match.groups()
    decimal = bool(letter) and not binary and text.strip()[-1] in "bB"
    value = float(number) * (1000.0 if decimal else 1024.0) ** _POWER[letter.lower()]
    return int(value) if value == int(value) else None


def parse_cpus(text: str) -> list[int] | None:
    """CPU numbers of the kernel's list format ("0-3,6"), in order, each once; None if it is not one."""
    cpus: list[int] = []
    for part in text.split(","):
        match = _CPU_RANGE.fullmatch(part.strip())
        if match is None:
            return None
        first = int(match[1])
        last = int(match[2] or first)
        if last < first or last > 65_535:
            return None
        cpus.extend(range(first, last + 1))
    return cpus if len(set(cpus)) == len(cpus) else None
