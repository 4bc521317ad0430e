"""The demo's second process: a fresh cache on the storage that the first one has filled.

    python -m tiered_cache.cli._demo_restart < what.json

Run so it opens a cache whose memory is full of NaN, and answers everybody's first question again.
Then it computes the first of them, to compare with while nothing else on the machine has changed.
Imported, `restart` runs it and tells how it went. Owns: what the two say to each other, as lines of
JSON. Refuses to know: what was measured, and what it means.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from tiered_cache.cli._demo_run import (
    Choice,
    Comparison,
    DemoSize,
    Difference,
    Reference,
    Request,
    load_model,
    run_phase,
)
from tiered_cache.config import load_config
from tiered_cache.testing.chat_models import CHAT_MODELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered_cache.cli._demo_run import Phase
    from tiered_cache.config import Config


class RestartError(Exception):
    """The second process has failed; standard error says how."""


@dataclass(frozen=True, slots=True)
class Restart:
    """What the second process did. `pid`: of it; `objects_read`, `bytes_read`: from storage.

    `recomputed`: its first request once more, right after the others and without the cache.
    """

    requests: dict[tuple[int, int], Request]
    recomputed: Request
    comparison: Comparison
    wall_s: float
    pid: int
    objects_read: int
    bytes_read: int

    @property
    def first(self) -> Request:
        """The very first request after the restart."""
        return min(self.requests.values(), key=lambda request: request.granted)


def restart(
    config: Config,
    model: str,
    size: DemoSize,
    reference: Reference,
    on_tokens: Callable[[int], None],
) -> Restart:
    """Everybody's first question again, to another process with another cache; and the very first
    once more without it.

    `model`: its name in `CHAT_MODELS`. `on_tokens(n)` is told about progress: it adds up to
    `(chats + 1) × new_tokens`.

    Raises:
        RestartError: it has failed.
    """
    first_turn = replace(size, turns=1)
    expected = [(key, choices) for key, choices in reference.choices.items() if key[1] == 0]
    # On its standard input, because the configuration may hold a password.
    question = {
        "config": config.model_dump(exclude_none=True),
        "model": model,
        "size": asdict(first_turn),
        "expected": expected,
    }
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdin is not None
            json.dump(question, child.stdin, default=_no_json)
            child.stdin.close()
            result = None
            for message in _messages(child):
                on_tokens(message.get("tokens", 0))
                result = message.get("result", result)
        except BrokenPipeError:
            result = None
        except BaseException:
            child.kill()
            raise
    if result is None or child.returncode:
        raise RestartError(
            f"the second process has ended with exit code {child.returncode}: see above"
        )
    comparison = Comparison(reference)
    comparison.num_compared = result.pop("num_compared")
    comparison.near_ties = _differences(result.pop("near_ties"))
    comparison.differences = _differences(result.pop("differences"))
    made = [Request(**request) for request in result.pop("requests")]
    requests = {(request.chat, request.turn): request for request in made}
    recomputed = Request(**result.pop("recomputed"))
    return Restart(requests, recomputed, comparison, pid=child.pid, **result)


def _no_json(value: object) -> NoReturn:
    raise RestartError(f"an option of type {type(value).__name__} cannot be handed over")


def _messages(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    for line in child.stdout:
        yield json.loads(line)


def _differences(found: list[Any]) -> list[Difference]:
    return [
        Difference(chat, turn, position, Choice(*expected), token)
        for chat, turn, position, expected, token in found
    ]


# --- In the second process ------------------------------------------------------------------------


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _answer(question: dict[str, Any]) -> None:
    config = load_config(question["config"], environ={})  # which has been heard already
    reference = Reference()
    for (chat, turn), choices in question["expected"]:
        reference.choices[chat, turn] = [Choice(*choice) for choice in choices]
    comparison = Comparison(reference)
    chat_model = load_model(CHAT_MODELS[question["model"]])
    size = DemoSize(**question["size"])

    def say_tokens(count: int) -> None:
        _say(tokens=count)

    def run(config: Config, size: DemoSize) -> Phase:
        return asyncio.run(run_phase(config, chat_model, size, comparison, say_tokens, poison=True))

    phase = run(config, size)
    alone = run(config.model_copy(update={"mode": "off"}), replace(size, chats=1))
    assert phase.stats.storage is not None, "there is a third tier"
    counters = phase.stats.storage.counters
    _say(
        result={
            "requests": [asdict(request) for request in phase.requests.values()],
            "recomputed": asdict(alone.requests[0, 0]),
            "num_compared": comparison.num_compared,
            "near_ties": comparison.near_ties,
            "differences": comparison.differences,
            "wall_s": phase.wall_s,
            "objects_read": counters.objects_read,
            "bytes_read": counters.bytes_read,
        }
    )


if __name__ == "__main__":
    _answer(json.load(sys.stdin))
