"""From file, environment and arguments to one frozen `Config`, or to all that is wrong in them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from tiered_cache.config.document import Document
from tiered_cache.config.marks import KeyPath, Mark, Marks, dotted
from tiered_cache.config.problems import by_place, kind_of, problems_of
from tiered_cache.config.schema import Config
from tiered_cache.errors import ConfigError, ConfigProblem

ENVIRONMENT_PREFIX: Final = "TIERED_CACHE_"
ENVIRONMENT_SEPARATOR: Final = "__"

MAX_FILE_BYTES: Final = 1 << 18
"""More is no configuration: a model's weights, a device that never ends."""


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The settings of a YAML file (or a mapping), overridden by the environment, then by arguments.

    Args:
        source: a path, or the settings themselves.
        overrides: nested like the file. Mappings merge; a section object (`ModelConfig`) replaces
            the section.
        environ: variables such as `TIERED_CACHE_DEVICE__SIZE=8GiB`, their values read as YAML;
            default: `os.environ`.

    Raises:
        ConfigError: everything that is wrong, at once; arguments of another type, too.
    """
    environ = os.environ if environ is None else environ
    overrides = {} if overrides is None else overrides
    _check_arguments(source, overrides, environ)
    problems: list[ConfigProblem] = []
    marks = Marks()
    data: dict[str, Any] = {}
    if isinstance(source, Mapping):
        _merge(data, source, marks, Mark(), problems)
    else:
        data = _read(Path(source), marks, problems)
    _merge_environment(data, environ, marks, problems)
    _merge(data, overrides, marks, Mark("argument"), problems)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        # What could not be read has been reported at its place; its lack of a value is no news.
        places = {(p.key, p.file, p.line, p.column) for p in problems}
        problems += [
            p for p in problems_of(error, marks) if (p.key, p.file, p.line, p.column) not in places
        ]
        raise _config_error(problems) from None  # pydantic's text repeats values
    if problems:
        raise _config_error(problems)
    config._marks = marks
    return config


def _check_arguments(source: object, overrides: object, environ: object) -> None:
    problems = []
    path = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(path, str | Mapping):
        problems.append(
            ConfigProblem(
                f"must be a path or a mapping, not {kind_of(path)}",
                "source",
                suggestion="write load_config('cache.yaml') or load_config({'model': ...})",
            )
        )
    for name, value in (("overrides", overrides), ("environ", environ)):
        if not isinstance(value, Mapping):
            problems.append(
                ConfigProblem(
                    f"must be a mapping, not {kind_of(value)}", name, suggestion="write {...}"
                )
            )
    if problems:
        raise _config_error(problems)


def _config_error(problems: list[ConfigProblem]) -> ConfigError:
    return ConfigError(sorted(problems, key=by_place))


def _merge(
    data: dict[str, Any],
    more: Mapping[str, Any],
    marks: Marks,
    mark: Mark,
    problems: list[ConfigProblem],
) -> None:
    """Lays `more` over `data`, noting `mark` as the place of all it brings."""

    def fail(path: KeyPath, message: str, suggestion: str | None = None) -> None:
        problems.append(
            ConfigProblem(message, dotted(path), mark.file, mark.line, mark.column, suggestion)
        )

    def lay(target: dict[str, Any], over: Mapping[Any, Any], path: KeyPath) -> None:
        for key, value in over.items():
            if not isinstance(key, str):
                fail(path, f"a key must be text, not {kind_of(key)}", "put it in quotes")
                continue
            here = (*path, key)
            if isinstance(value, Mapping) and isinstance(target.get(key), dict):
                lay(target[key], value, here)
                continue
            marks.drop(here)
            marks.values[here] = mark
            target[key] = _plain(value)

    for key in more:
        try:
            lay(data, {key: more[key]}, ())
        except RecursionError:
            fail((key,), "is nested without end")


def _plain(value: Any) -> Any:
    """A copy of nested settings that later layers may write into."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _merge_environment(
    data: dict[str, Any], environ: Mapping[Any, Any], marks: Marks, problems: list[ConfigProblem]
) -> None:
    names = (name for name in environ if isinstance(name, str))
    for name in sorted(name for name in names if name.startswith(ENVIRONMENT_PREFIX)):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split(ENVIRONMENT_SEPARATOR)
        document = Document(f"${name}")
        text = environ[name]
        if isinstance(text, str):
            value = document.load(text)
        else:
            value = None
            document.fail(f"must be text, not {kind_of(text)}", suggestion="put it in quotes")
        problems += [
            ConfigProblem(p.message, ".".join(keys), p.file, suggestion=p.suggestion)
            for p in document.problems
        ]
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        _merge(data, nested, marks, Mark(f"${name}"), problems)


def _read(path: Path, marks: Marks, problems: list[ConfigProblem]) -> dict[str, Any]:
    """The settings of a file. One that cannot be read at all raises: there are no keys to judge."""
    document = Document(os.fspath(path))
    value: Any = None
    try:
        value = document.load(_contents(path).decode("utf-8-sig"))
    except FileNotFoundError:
        document.fail("there is no such file", suggestion=_nearby_file(path))
    except IsADirectoryError:
        document.fail("is a directory, not a file")
    except OSError as error:
        document.fail(f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        document.fail("is not text in UTF-8")
    except ValueError as error:  # a path with a null byte; a file without end
        document.fail(f"cannot be read: {error}")
    if not document.problems and value is None:
        document.fail("the file is empty", suggestion="write at least a `model:` section")
    elif value is not None and not isinstance(value, dict):
        document.fail(
            f"the file holds {kind_of(value)}, not settings",
            document.marks.nearest(()),
            suggestion="write keys and values, such as `page_size: 16`",
        )
    problems += document.problems
    if not isinstance(value, dict):
        raise _config_error(problems)
    marks.values.update(document.marks.values)
    marks.keys.update(document.marks.keys)
    return value


def _contents(path: Path) -> bytes:
    with path.open("rb") as file:
        contents = file.read(MAX_FILE_BYTES + 1)
    if len(contents) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES:,} bytes are no configuration")
    return contents


def _nearby_file(path: Path) -> str | None:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else None
