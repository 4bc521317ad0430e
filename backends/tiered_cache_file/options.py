"""What can be configured. Sizes are written as everywhere in the configuration."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tiered_cache.storage import BackendOptions

UNITS: Final = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
SIZE: Final = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kKMGT]?i?B)\s*")
MAX_BYTES: Final = 1 << 50


def parse_size(value: object) -> object:
    """`50GiB` or `1.5 GB` in bytes, exactly. What is not text is left for the model to judge."""
    if not isinstance(value, str):
        return value
    match = SIZE.fullmatch(value)
    if match is None or match[2] not in UNITS:
        raise PydanticCustomError(
            "size", "is not a size", {"suggestion": "write 50GiB, 50GB or a number of bytes"}
        )
    return int(Fraction(match[1]) * UNITS[match[2]])


def expand(value: object) -> object:
    """`~` and `~user` are home directories."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if not value.strip() or "\0" in value:
        raise PydanticCustomError(
            "path", "is not a path", {"suggestion": "write the path of a directory"}
        )
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise PydanticCustomError(
            "path",
            "names a home directory that is not known",
            {"suggestion": "write the whole path, or ./~ for a directory of that name"},
        )
    return expanded


SizeBytes = Annotated[int, BeforeValidator(parse_size), Field(le=MAX_BYTES)]


class FileOptions(BackendOptions):
    """Where objects are kept, and how many bytes of them."""

    path: Annotated[str, BeforeValidator(expand)] = Field(
        default="~/.cache/tiered-cache", validate_default=True
    )
    """A directory for this alone; made when it is not there."""
    max_size: SizeBytes = Field(default=10 << 30, gt=0)
    """Bytes of all objects together, whoever has written them. The least recently used go first."""
    reserve: SizeBytes = Field(default=1 << 30, ge=0)
    """Free bytes of the file system that are left alone. Near them the oldest go for what comes."""
    direct: Literal["auto", "never"] = "auto"
    """`auto`: reads go past the page cache when there is more than the machine's memory could
    cache."""
