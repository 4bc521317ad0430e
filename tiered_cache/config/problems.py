"""Pydantic's findings in the words of somebody who writes YAML: place, key, what to write instead.

Nothing here repeats a value, because a value can be a secret; the names that an option offers are
the one exception.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tiered_cache.config.marks import KeyPath, Marks, dotted
from tiered_cache.config.schema import (
    MAX_BYTES,
    MAX_BYTES_TEXT,
    SIZE_HINT,
    BackupConfig,
    BreakerConfig,
    Config,
    DeviceConfig,
    ExtraPool,
    HostConfig,
    LayerState,
    ModelConfig,
    PrefetchConfig,
    StorageConfig,
    installed_backends,
    one_of,
)
from tiered_cache.errors import ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "": Config,
    "model": ModelConfig,
    "model.states": LayerState,
    "model.extra_pools": ExtraPool,
    "device": DeviceConfig,
    "host": HostConfig,
    "storage": StorageConfig,
    "storage.prefetch": PrefetchConfig,
    "storage.backup": BackupConfig,
    "storage.breaker": BreakerConfig,
}

OPTIONS: Final = ("storage", "options")
"""The section whose keys are a backend's."""


def by_place(problem: ConfigProblem) -> tuple[int, int]:
    """Sorts problems as they are read: the environment's first, then down the file."""
    return problem.line or 0, problem.column or 0


def problems_of(error: ValidationError, marks: Marks, inside: KeyPath = ()) -> list[ConfigProblem]:
    """All that pydantic found in a section, each at its place."""
    found = error.errors(include_url=False)
    return [_problem(details, (*inside, *details["loc"]), marks) for details in found]


def option_problems(
    error: ValidationError, marks: Marks, options: Mapping[str, Any], model: type[BaseModel]
) -> list[ConfigProblem]:
    """All that a backend's own model found in `storage.options`, each at its place.

    The model is somebody else's. So what stands in `loc` beside keys (the branches of a union) is
    left out, one finding per key is enough, and a message loses what it repeats of the values.
    """
    problems: dict[str, ConfigProblem] = {}
    secrets = sorted(_secrets(options), key=len, reverse=True)
    for details in error.errors(include_url=False):
        is_missing = details["type"] == "missing"
        path = (*OPTIONS, *_written(details["loc"], options, and_one_more=is_missing))
        problem = _problem(details, path, marks, {dotted(OPTIONS): model})
        if problem.message == details["msg"]:  # the model's own words
            message, suggestion = problem.message, problem.suggestion
            for secret in secrets:
                message = message.replace(secret, "…")
                suggestion = suggestion and suggestion.replace(secret, "…")
            problem = replace(problem, message=message, suggestion=suggestion)
        problems.setdefault(problem.key, problem)
    return sorted(problems.values(), key=by_place)


def _written(loc: KeyPath, options: Any, *, and_one_more: bool) -> KeyPath:
    """The part of a path that leads to something in the options."""
    at = options
    for index, part in enumerate(loc):
        try:
            at = at[part]
        except (LookupError, TypeError):
            return loc[: index + and_one_more]
    return loc


def _secrets(value: Any) -> Iterator[str]:
    """All text in the values, and of addresses who logs in and how."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _secrets(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item)
    elif isinstance(value, str) and len(value) >= SHORTEST_SECRET:
        yield value
        login = value.partition("://")[2].rpartition("@")[0]
        yield from (part for part in (login, *login.split(":", 1)) if len(part) >= SHORTEST_SECRET)


SHORTEST_SECRET: Final = 3
"""Characters. Shorter text occurs in any message."""


def _problem(
    details: ErrorDetails,
    path: KeyPath,
    marks: Marks,
    sections: Mapping[str, type[BaseModel]] = SECTIONS,
) -> ConfigProblem:
    context = details.get("ctx", {})
    kind = details["type"]
    message, suggestion = details["msg"], context.get("suggestion")
    at_key = False
    if path and path[-1] == "[key]":  # pydantic's way to say that the key, not its value, is wrong
        path, kind = path[:-2], "invalid_key"
    name = path[-1] if path else ""
    match kind:
        case "extra_forbidden":
            message, suggestion, at_key = "unknown key", _unknown_key_hint(path, sections), True
        case "missing":
            message, suggestion = "is required", _missing_hint(path)
        case "literal_error":
            message, suggestion = "no such choice", _choice_hint(details)
        case "string_pattern_mismatch":
            message, suggestion = PATTERN_HINTS.get(str(name), ("is not well formed", None))
        case "greater_than" if isinstance(context["gt"], float):
            message = f"must be more than {_number(context['gt'])}"
        case "greater_than_equal" | "greater_than":
            least = context["ge"] if "ge" in context else context["gt"] + 1
            message = f"must be {_number(least)} or more"
        case "less_than_equal" if context["le"] == MAX_BYTES:
            message = f"must be {MAX_BYTES_TEXT} or less"
        case "less_than_equal" | "less_than":
            most = context["le"] if "le" in context else context["lt"] - 1
            message = f"must be {_number(most)} or less"
        case "finite_number":
            message = "must be a number with an end"
        case "invalid_key":
            message, suggestion, at_key = "a key must be text", "put it in quotes", True
        case "string_unicode":
            message = "holds a character that is not allowed in text"
        case _ if kind in TYPE_WORDS:
            message = f"must be {TYPE_WORDS[kind]}, not {kind_of(details['input'])}"
            if kind == "string_type" and not isinstance(details["input"], dict | list | None):
                suggestion = "put it in quotes"
            elif name in SIZES:
                suggestion = SIZE_HINT
    mark = marks.nearest(path, at_key=at_key)
    return ConfigProblem(message, dotted(path), mark.file, mark.line, mark.column, suggestion)


SIZES: Final = ("size", "max_pending")
"""Keys whose values are bytes."""

TYPE_WORDS: Final = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a section of keys and values",
    "dict_type": "a section of keys and values",
}

MISSING_HINTS: Final = {
    "model": "describe the model, or fill it from its Hugging Face config: "
    "load_config(path, {'model': model_from_hf(hf_config)})",
    "model.dtype": "write the type of the attention state, such as bfloat16",
}

PATTERN_HINTS: Final[dict[str, tuple[str, str]]] = {
    "type": ("no such device", "write cpu, cuda or, say, cuda:1"),
    "name": ("is not a name", "write letters, digits, _ and . only"),
}


def _missing_hint(path: KeyPath) -> str | None:
    if path == ("storage", "backend"):
        return one_of(None, installed_backends())
    return MISSING_HINTS.get(dotted(path))


def _unknown_key_hint(path: KeyPath, sections: Mapping[str, type[BaseModel]]) -> str | None:
    *section, key = path
    name = str(key)
    here = sections.get(dotted(tuple(part for part in section if isinstance(part, str))))
    if here is None:  # a section inside a backend's options
        return None
    homes = [at or "the top level" for at, home in sections.items() if name in home.model_fields]
    if homes:
        return f"it belongs to {' or '.join(homes)}"
    close = difflib.get_close_matches(name, here.model_fields, n=1)
    if close:
        return f"did you mean {close[0]}?"
    if not here.model_fields:
        return "there are no keys here"
    keys = f"the keys here are {', '.join(here.model_fields)}"
    return f"{keys}; the backend's own go into options" if here is StorageConfig else keys


def _choice_hint(details: ErrorDetails) -> str:
    return one_of(details["input"], re.findall(r"'([^']*)'", details["ctx"]["expected"]))


def _number(value: float) -> str:
    return f"{int(value) if value == int(value) else value:,}"


def kind_of(value: object) -> str:
    """What a value is, in the words of somebody who writes YAML. Never the value itself."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int():
            return "a number"
        case float():
            return "a number with a fraction"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case dict():
            return "a section"
        case _:
            return "a date" if hasattr(value, "year") else type(value).__name__
