"""One YAML text as plain values, with a place for everything.

`yaml.safe_load` keeps the last of duplicate keys and forgets where things stood. So the text is
only parsed by PyYAML (`compose`), and the nodes are turned into values here.

PyYAML's messages quote from the text, which may be a secret; they are repeated without the quotes.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from tiered_cache.config.marks import KeyPath, Mark, Marks, dotted
from tiered_cache.errors import ConfigProblem

MAX_NODES: Final = 20_000
"""A document that unfolds to more (nested aliases grow exponentially) is refused."""

MERGE_TAG: Final = "tag:yaml.org,2002:merge"
TEXT_TAG: Final = "tag:yaml.org,2002:str"
INT_TAG: Final = "tag:yaml.org,2002:int"
FLOAT_TAG: Final = "tag:yaml.org,2002:float"
OTHER_BASE: Final = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""What YAML 1.1 reads as a number that nobody means: `010` is 8, and `1:30` is 90."""


class Document:
    """A text read once: values from `load`, then `marks`, and `problems` with what YAML lets pass
    (duplicate keys, keys that are not text, tags).
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.marks = Marks()
        self.problems: list[ConfigProblem] = []
        self._constructor = yaml.constructor.SafeConstructor()
        self._open: set[int] = set()
        self._num_nodes = 0

    def load(self, text: str) -> Any:
        """The plain values of the text; None when it is empty or, with a problem, not YAML."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is None:
                return None
            self._note((), node, node)
            return self._value(node, ())
        except yaml.MarkedYAMLError as error:
            self.fail(*_explain(error, self.file))
        except yaml.YAMLError:
            self.fail("not valid YAML: a character that is not allowed in it")
        except (_Endless, RecursionError):
            self.fail("not valid here: nested or repeated without end")
        return None

    def fail(
        self, message: str, mark: Mark | None = None, suggestion: str | None = None, key: str = ""
    ) -> None:
        mark = mark or Mark(self.file)
        self.problems.append(
            ConfigProblem(message, key, mark.file, mark.line, mark.column, suggestion)
        )

    def _note(self, path: KeyPath, key: yaml.Node, value: yaml.Node) -> None:
        self.marks.keys[path] = _mark(key, self.file)
        self.marks.values[path] = _mark(value, self.file)

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or id(node) in self._open:
            raise _Endless
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return self._sequence(node, path)
            return self._scalar(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = _mark(key_node, self.file)
            if key_node.tag == MERGE_TAG:
                self.fail(
                    "merge keys (<<) are not supported", mark, "write the keys out", dotted(path)
                )
                continue
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            here = (*path, key)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != TEXT_TAG:
                self.fail("a key must be text", mark, "put it in quotes", dotted(path))
            elif key in result:
                first = self.marks.keys[here]
                self.fail(
                    f"is written twice, first in line {first.line}",
                    mark,
                    "keep one of the two",
                    dotted(here),
                )
            else:
                self._note(here, key_node, value_node)
                result[key] = self._value(value_node, here)
        return result

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        result = []
        for index, item in enumerate(node.value):
            self._note((*path, index), item, item)
            result.append(self._value(item, (*path, index)))
        return result

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        if node.tag not in yaml.constructor.SafeConstructor.yaml_constructors:
            self.fail(
                "YAML tags are not supported",
                _mark(node, self.file),
                "put text in quotes",
                dotted(path),
            )
            return None
        if node.tag in (INT_TAG, FLOAT_TAG) and OTHER_BASE.fullmatch(node.value):
            self.fail(
                "YAML would read another number: a leading 0 is octal, a colon counts in sixties",
                _mark(node, self.file),
                "write it in decimal, or put text in quotes",
                dotted(path),
            )
            return None
        try:
            return self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError):
            # PyYAML trusts a tag that was written, such as `!!int x`, and fails in its own ways;
            # Python reads no number of thousands of digits.
            is_number = node.tag in (INT_TAG, FLOAT_TAG)
            self.fail(
                "cannot be read as a number" if is_number else "cannot be read",
                _mark(node, self.file),
                f"{'write fewer digits, or ' if is_number else ''}put text in quotes",
                dotted(path),
            )
            return None


def _mark(node: yaml.Node, file: str) -> Mark:
    return Mark(file, node.start_mark.line + 1, node.start_mark.column + 1)


def _explain(error: yaml.MarkedYAMLError, file: str) -> tuple[str, Mark, str | None]:
    """Message, place and suggestion for what PyYAML could not read."""
    where = error.problem_mark or error.context_mark
    mark = Mark(file, where.line + 1, where.column + 1) if where else Mark(file)
    problem = error.problem or error.context or "cannot be read"
    suggestion = None
    if "'\\t'" in problem:
        suggestion = "indent with spaces, not tabs"
    elif "mapping values are not allowed" in problem:
        suggestion = "put text that contains `: ` in quotes, and indent keys of one section alike"
    elif "alias" in problem:
        suggestion = "put text that starts with * or & in quotes"
    elif "single document" in f"{problem} {error.context}":
        problem, suggestion = "the file holds a second document", "take out what follows `---`"
    return f"not valid YAML: {re.sub(_QUOTED, _unquote, problem)}", mark, suggestion


_QUOTED: Final = re.compile(r"'([^']*)'")


def _unquote(match: re.Match[str]) -> str:
    """Single characters and names of tokens (`'<block end>'`) stay; what the text says goes."""
    return match[0] if len(match[1]) <= 2 or match[1].startswith("<") else "…"


class _Endless(Exception):
    """Aliases that contain themselves, or unfold to more than anybody writes."""
