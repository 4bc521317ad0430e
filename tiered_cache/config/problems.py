"""Pydantic's findings in the words of somebody who writes YAML: place, key, what to write instead.

Nothing here repeats a value, because a value can be a secret; the names that an option offers are
the one exception.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Final

from tiered_cache.config.marks import KeyPath, Marks, dotted
from tiered_cache.config.schema import (
    MAX_BYTES_TEXT,
    SIZE_HINT,
    Config,
    DeviceConfig,
    ExtraPool,
    HostConfig,
    ModelConfig,
    Section,
    one_of,
)
from tiered_cache.errors import ConfigProblem

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

SECTIONS: Final[dict[str, type[Section]]] = {
    "": Config,
    "model": ModelConfig,
    "model.extra_pools": ExtraPool,
    "device": DeviceConfig,
    "host": HostConfig,
}

NOT_YET: Final = {
    "storage": "there is no storage tier yet, this version has device and host: "
    "take the section out"
}
"""Sections that the design has and this version does not."""


def problems_of(error: ValidationError, marks: Marks, inside: KeyPath = ()) -> list[ConfigProblem]:
    """All that pydantic found in a section, each at its place."""
    found = error.errors(include_url=False)
    return [_problem(details, (*inside, *details["loc"]), marks) for details in found]


def _problem(details: ErrorDetails, path: KeyPath, marks: Marks) -> ConfigProblem:
    context = details.get("ctx", {})
    kind = details["type"]
    message, suggestion = details["msg"], context.get("suggestion")
    at_key = False
    match kind:
        case "extra_forbidden":
            message, suggestion, at_key = "unknown key", _unknown_key_hint(path), True
        case "missing":
            message, suggestion = "is required", MISSING_HINTS.get(dotted(path))
        case "literal_error":
            message, suggestion = "no such choice", _choice_hint(details)
        case "string_pattern_mismatch":
            message, suggestion = PATTERN_HINTS.get(str(path[-1]), ("is not well formed", None))
        case "greater_than_equal" | "greater_than":
            least = context["ge"] if "ge" in context else context["gt"] + 1
            message = f"must be {least:,} or more"
        case "less_than_equal" | "less_than" if path[-1] == "size":
            message = f"must be {MAX_BYTES_TEXT} or less"
        case "less_than_equal" | "less_than":
            most = context["le"] if "le" in context else context["lt"] - 1
            message = f"must be {most:,} or less"
        case "invalid_key":
            message, suggestion, at_key = "a key must be text", "put it in quotes", True
        case "string_unicode":
            message = "holds a character that is not allowed in text"
        case _ if kind in TYPE_WORDS:
            message = f"must be {TYPE_WORDS[kind]}, not {kind_of(details['input'])}"
            if kind == "string_type" and not isinstance(details["input"], dict | list | None):
                suggestion = "put it in quotes"
            elif path[-1] == "size":
                suggestion = SIZE_HINT
    mark = marks.nearest(path, at_key=at_key)
    return ConfigProblem(message, dotted(path), mark.file, mark.line, mark.column, suggestion)


TYPE_WORDS: Final = {
    "int_type": "a whole number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a section of keys and values",
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


def _unknown_key_hint(path: KeyPath) -> str:
    *section, key = path
    name = str(key)
    if not section and name in NOT_YET:
        return NOT_YET[name]
    here = SECTIONS[dotted(tuple(part for part in section if isinstance(part, str)))]
    homes = [at or "the top level" for at, home in SECTIONS.items() if name in home.model_fields]
    if homes:
        return f"it belongs to {' or '.join(homes)}"
    close = difflib.get_close_matches(name, here.model_fields, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"the keys here are {', '.join(here.model_fields)}"


def _choice_hint(details: ErrorDetails) -> str:
    return one_of(details["input"], re.findall(r"'([^']*)'", details["ctx"]["expected"]))


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
