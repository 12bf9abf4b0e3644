"""From a file, the environment and flags to one frozen `NodeConfig`, or one error that says what is wrong
where.

Later wins: default < file < environment < flag. Every setting keeps the name of the place it came from, so
that an error reads `conf/decode.toml: engine.page_size = 0: expected an integer from 1 to 1024`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdserve.config.check import check
from pdserve.config.environment import PREFIX
from pdserve.config.fields import Field, fields, parse_cpus, parse_size
from pdserve.config.schema import NodeConfig
from pdserve.errors import ConfigError

_SECRET_MAX_BYTES = 4096
_REDACTED = "<redacted>"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value from one place. `value` is text from the environment and flags, typed from a file.

    `source`: how an error names the place ("conf/a.toml: engine.page_size", "PDSERVE_ENGINE_PAGE_SIZE",
    "--page-size"). A repeated flag is a list of texts.
    """

    key: str
    value: object
    source: str
    text: bool = False
    """From a place that only knows text: "8" is a number then, and "a,b" a list."""
    base: Path = Path()
    """What a relative `secret_file` starts from: the file's directory, or the working directory."""


def load_config(
    file: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    flags: Sequence[Setting] = (),
) -> NodeConfig:
    """The configuration of a node. Reads `file` and, where named, the secret's file; nothing else.

    `env`: the variables to look at (`environment.variables()`), none by default. Raises `ConfigError` with
    source, value and limit for an unknown name, a wrong type, a value out of range, or values that do not go
    together.
    """
    return resolve(file, env, flags)[0]


def resolve(
    file: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    flags: Sequence[Setting] = (),
) -> tuple[NodeConfig, dict[str, str]]:
    """As `load_config`, and where each value that is not a default came from, by `section.field`."""
    merged: dict[str, Setting] = {}
    for setting in [
        *(_file_settings(Path(file)) if file is not None else ()),
        *_env_settings(env or {}),
        *flags,
    ]:
        merged[setting.key] = setting
    _read_secret(merged)
    values: dict[str, dict[str, Any]] = {}
    for key, setting in merged.items():
        field = fields()[key]
        values.setdefault(field.section, {})[field.name] = _convert(field, setting)
    sources = {key: setting.source for key, setting in merged.items()}
    return check(msgspec.convert(values, NodeConfig), sources), sources


def secret_variables(config: NodeConfig) -> dict[str, str]:
    """The secrets of `config` as environment variables, for a node that this process starts."""
    values = {field: getattr(getattr(config, field.section), field.name) for field in fields().values()}
    return {field.variable: value for field, value in values.items() if field.secret and value is not None}


def render(config: NodeConfig, *, for_child: bool = False) -> str:
    """The whole configuration as TOML, secrets redacted. Fields that hold nothing are comments.

    `for_child`: as a file that a node can load. The secrets are left out, for they travel in the environment
    (`secret_variables`).
    """
    lines: list[str] = []
    section = ""
    for field in fields().values():
        if field.section != section:
            section = field.section
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        value = getattr(getattr(config, field.section), field.name)
        if value is None or (for_child and (field.secret or field.key == "cluster.secret_file")):
            lines.append(f"# {field.name}: {'none' if value is None else 'not in this file'}")
        else:
            shown = _toml(_REDACTED if field.secret else value)
            lines.append(f"{field.name} = {shown}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)


def _file_settings(path: Path) -> Iterable[Setting]:
    try:
        with path.open("rb") as stream:
            tree = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", param=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}", param=str(path)) from error
    known = fields()
    sections = {field.section for field in known.values()}
    for section, table in tree.items():
        if section not in sections:
            what = "section" if isinstance(table, dict) else "name outside a section"
            wanted = sections if isinstance(table, dict) else {field.name for field in known.values()}
            raise ConfigError(f"{path}: unknown {what} {section!r}{_nearest(section, wanted)}", param=section)
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} = {table!r}: expected a section [{section}]", param=section)
        names = {field.name for field in known.values() if field.section == section}
        for name, value in table.items():
            key = f"{section}.{name}"
            if name not in names:
                raise ConfigError(f"{path}: unknown key {key!r}{_nearest(name, names, key)}", param=key)
            yield Setting(key, value, f"{path}: {key}", base=path.parent)


def _env_settings(env: Mapping[str, str]) -> Iterable[Setting]:
    by_variable = {field.variable: field for field in fields().values()}
    for name, text in env.items():
        if name not in by_variable:
            hint = _nearest(name, by_variable)
            raise ConfigError(f"unknown environment variable {name}{hint}", param=name)
        yield Setting(by_variable[name].key, text, name, text=True)


def _nearest(name: str, known: Iterable[str], key: str = "") -> str:
    """ "; did you mean ...?", or where nothing is near, what there is. A key may also belong to another
    section.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    if key:
        elsewhere = [field.key for field in fields().values() if field.name == name]
        if elsewhere:
            return f"; did you mean {elsewhere[0]!r}?"
    if name.startswith(PREFIX):
        return f"; names are {PREFIX}<SECTION>_<FIELD>"
    return f"; known: {', '.join(names)}"


def _convert(field: Field, setting: Setting) -> object:
    """The value as its field's type, or a `ConfigError` that names source, value and limit."""
    try:
        return msgspec.convert(_spelled_out(field, setting), field.annotation, strict=not setting.text)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        shown = _REDACTED if field.secret else repr(setting.value)
        raise ConfigError(
            f"{setting.source} = {shown}: expected {field.expected}", param=field.key
        ) from error


def _spelled_out(field: Field, setting: Setting) -> object:
    """Sizes and CPU lists as numbers, a comma-separated variable as a list, "none" and "" as nothing."""
    value = setting.value
    if isinstance(value, str):
        if setting.text and field.optional and not field.secret and value.lower() in ("", "none"):
            return None
        if field.unit == "bytes" or field.form == "cpus":
            parsed = parse_size(value) if field.unit == "bytes" else parse_cpus(value)
            if parsed is None:
                raise ValueError(value)
            return parsed
        if setting.text and field.many:
            return [item.strip() for item in value.split(",") if item.strip()]
    return value


def _read_secret(merged: dict[str, Setting]) -> None:
    """Put the secret of `cluster.secret_file` into `cluster.secret`. The one given later wins; both at once
    clash.
    """
    named, direct = merged.get("cluster.secret_file"), merged.get("cluster.secret")
    if named is None or named.value in (None, ""):
        return
    if direct is not None:
        raise ConfigError(
            f"{named.source} and {direct.source} are both set: give one of them", param="cluster.secret_file"
        )
    if not isinstance(named.value, str):
        return
    path = named.base / Path(named.value).expanduser()
    try:
        with path.open("rb") as stream:
            head = stream.read(_SECRET_MAX_BYTES + 2)
        line = head.decode().split("\n", 1)[0].strip()
    except OSError as error:
        raise ConfigError(
            f"{named.source} = {named.value!r}: cannot be read: {error.strerror}", param="cluster.secret_file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{named.source} = {named.value!r}: is not text", param="cluster.secret_file"
        ) from error
    merged["cluster.secret"] = Setting("cluster.secret", line, f"{named.source} (content of {path})")
