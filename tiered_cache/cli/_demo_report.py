"""What the demo shows: a table, a plot, a piece of a chat, and whether the answers are the same.

Owns: words and pictures. Refuses to know: how the numbers came about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from rich.table import Table

from tiered_cache.cli._demo_chats import question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from tiered_cache.cli._demo_run import Comparison, DemoSize, Difference, Phase, Request
    from tiered_cache.testing.models import ChatModel

WITHOUT_COLOUR: Final = "#c2571a"
WITH_COLOUR: Final = "#1f7a8c"
COMPUTED_COLOUR: Final = "#e3b25c"
INK: Final = "#22303c"
FAINT: Final = "#8a97a3"


class Speedup(NamedTuple):
    """Median time to first token from the grant, of the same requests in both phases."""

    without_s: float
    with_s: float

    @property
    def ratio(self) -> float:
        return self.without_s / self.with_s if self.with_s else float("nan")


def later_turns(without: Phase, with_cache: Phase) -> Speedup | None:
    """Requests from the second turn on, which find their own history; None: there were none."""
    return _speedup(without, with_cache, lambda request: request.turn > 0)


def shared_prompt(without: Phase, with_cache: Phase) -> Speedup | None:
    """First questions that found the system prompt cached; None: there were none."""
    return _speedup(without, with_cache, _is_shared_prompt)


def _is_shared_prompt(request: Request) -> bool:
    return request.turn == 0 and request.num_from_device > 0


def _speedup(
    without: Phase, with_cache: Phase, chosen: Callable[[Request], bool]
) -> Speedup | None:
    keys = [key for key, request in with_cache.requests.items() if chosen(request)]
    if not keys:
        return None
    return Speedup(
        float(np.median([without.requests[key].ttft_from_grant_s for key in keys])),
        float(np.median([with_cache.requests[key].ttft_from_grant_s for key in keys])),
    )


# --- Table ----------------------------------------------------------------------------------------


def table(without: Phase, with_cache: Phase) -> Table:
    """Both phases side by side; times in seconds."""
    result = Table(
        title="The same chats, without and with the cache (TTFT: time to first token)",
        title_justify="left",
    )
    result.add_column("")
    for heading in ("without cache", "with cache", "ratio"):
        result.add_column(heading, justify="right")
    for row in _rows(without, with_cache):
        result.add_row(*row)
    return result


def _rows(without: Phase, with_cache: Phase) -> Iterator[tuple[str, str, str, str]]:
    phases = (without, with_cache)
    yield _row("requests", [float(len(phase.requests)) for phase in phases], "{:,.0f}")
    yield _row("prompt tokens from device", _sums(phases, "num_from_device"), "{:,.0f}")
    yield _row("prompt tokens computed", _sums(phases, "num_computed"), "{:,.0f}", ratio=True)
    for name, attribute in (("arrival", "ttft_from_arrival_s"), ("grant", "ttft_from_grant_s")):
        times = [np.array([getattr(r, attribute) for r in p.requests.values()]) for p in phases]
        for word, percent in (("median", 50), ("p95", 95)):
            values = [float(np.percentile(t, percent)) for t in times]
            yield _row(f"TTFT from {name}, {word}", values, "{:.3f} s", ratio=True)
    for name, speedup in (
        ("turn 2+", later_turns(without, with_cache)),
        ("shared prompt", shared_prompt(without, with_cache)),
    ):
        if speedup is not None:
            yield _row(f"TTFT from grant, {name}, median", list(speedup), "{:.3f} s", ratio=True)
    yield _row("whole run", [phase.wall_s for phase in phases], "{:.1f} s", ratio=True)


def _row(
    name: str, values: list[float], form: str, *, ratio: bool = False
) -> tuple[str, str, str, str]:
    without, with_cache = values
    times = f"{without / with_cache:.1f} ×" if ratio and with_cache else ""
    return name, form.format(without), form.format(with_cache), times


def _sums(phases: Iterable[Phase], attribute: str) -> list[float]:
    return [float(sum(getattr(r, attribute) for r in p.requests.values())) for p in phases]


# --- Words ----------------------------------------------------------------------------------------


def sample(phase: Phase, chat_model: ChatModel, chat: int = 0) -> str:
    """One chat as text."""
    lines = []
    for (number, turn), request in phase.requests.items():
        if number == chat:
            lines.append(f"  user       {question(chat, turn)}")
            lines.append(f"  assistant  {chat_model.decode(request.answer).strip()}")
    return "\n".join(lines)


def verdict(comparison: Comparison, chat_model: ChatModel) -> str:
    """Whether the answers are the same, and every token that is not."""
    lines = [
        _describe(difference, kind, chat_model)
        for kind, found in (
            ("near-tie", comparison.near_ties),
            ("DIFFERENT", comparison.differences),
        )
        for difference in found
    ]
    count = f"{comparison.num_compared} tokens compared with the run without cache"
    near = f"{len(comparison.near_ties)} near-ties"
    if comparison.same:
        lines.append(f"Same answers: {count}, {near}.")
    else:
        lines.append(f"ANSWERS DIFFER: {count}, {len(comparison.differences)} differ, {near}.")
    return "\n".join(lines)


def _describe(difference: Difference, kind: str, chat_model: ChatModel) -> str:
    expected, found = (
        repr(chat_model.tokenizer.decode([token], skip_special_tokens=False))
        for token in (difference.expected.token, difference.found)
    )
    return (
        f"{kind}: chat {difference.chat + 1}, turn {difference.turn + 1}, "
        f"token {difference.position + 1}: {expected} without cache, {found} with cache "
        f"(margin {difference.expected.margin:.1e} without cache)"
    )


# --- Plot -----------------------------------------------------------------------------------------


def plot(without: Phase, with_cache: Phase, size: DemoSize, path: Path) -> None:
    """Two panels: each request's time to first token, and where its prompt tokens came from."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: a figure of our own changes no global state and needs no display.
    figure = Figure(figsize=(11.5, 6.0), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    times, tokens = figure.subplots(1, 2, width_ratios=(1.75, 1))
    _plot_times(times, without, with_cache, size)
    _plot_tokens(tokens, with_cache, size)
    for axes in (times, tokens):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=10)
    figure.text(
        0.065, 0.945, _headline(without, with_cache), fontsize=15, fontweight="bold", color=INK
    )
    figure.text(
        0.065,
        0.9,
        f"SmolLM2-135M, float32, CPU: {size.chats} chats at once, {size.turns} turns each, over "
        "one system prompt of about 1,000 tokens",
        fontsize=10.5,
        color=FAINT,
    )
    figure.text(
        0.065,
        0.022,
        "From the model's grant: from the start of a request's first run in the model's thread to "
        "its first token; no waiting for other requests in it.",
        fontsize=8.5,
        color=FAINT,
    )
    figure.subplots_adjust(left=0.065, right=0.975, top=0.79, bottom=0.14, wspace=0.2)
    figure.savefig(path)


def _headline(without: Phase, with_cache: Phase) -> str:
    speedup = later_turns(without, with_cache) or shared_prompt(without, with_cache)
    if speedup is None:
        return "Time to first token"
    when = "from the second turn on" if _has_later_turns(with_cache) else "on the shared prompt"
    return f"First token {speedup.ratio:.1f} times sooner {when}"


def _has_later_turns(phase: Phase) -> bool:
    """Whether anybody asked a second question."""
    return any(turn > 0 for _, turn in phase.requests)


def _plot_times(axes: Any, without: Phase, with_cache: Phase, size: DemoSize) -> None:
    for side, phase, colour, name in (
        (-0.19, without, WITHOUT_COLOUR, "without cache"),
        (0.19, with_cache, WITH_COLOUR, "with cache"),
    ):
        for turn in range(size.turns):
            here = [r for (_, at), r in phase.requests.items() if at == turn]
            times = np.array([r.ttft_from_grant_s for r in here])
            places = turn + side + (np.linspace(-0.1, 0.1, len(times)) if len(times) > 1 else 0.0)
            axes.scatter(
                places, times, s=34, color=colour, alpha=0.55, lw=0, label=None if turn else name
            )
            # Who computes the shared prompt is labelled below, and is no part of the median.
            others = np.array([not _computes_shared_prompt(r, phase) for r in here])
            median = float(np.median(times[others] if others.any() else times))
            axes.hlines(median, turn + side - 0.15, turn + side + 0.15, color=colour, lw=2.5)
            near = times[others] if others.any() else times  # the label stands above its own cloud
            axes.annotate(
                f"{median:.2f} s",
                (turn + side, near.max()),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                fontsize=10,
                fontweight="bold",
                color=colour,
            )
    for request in with_cache.requests.values():
        if _computes_shared_prompt(request, with_cache):
            axes.annotate(
                "computes the\nshared prompt",
                (0.19 + 0.1 * (2 * request.chat / (size.chats - 1) - 1), request.ttft_from_grant_s),
                xytext=(-5, -8),
                textcoords="offset points",
                va="top",
                fontsize=8.5,
                color=WITH_COLOUR,
            )
    axes.set_yscale("log")
    all_times = [r.ttft_from_grant_s for p in (without, with_cache) for r in p.requests.values()]
    axes.set_ylim(min(all_times) / 1.6, max(all_times) * 1.7)
    ticks = [t for t in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if _inside(t, axes.get_ylim())]
    axes.set_yticks(ticks, [f"{tick:g} s" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", color="#e6eaee", lw=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(-0.5, size.turns - 0.5)
    axes.set_xticks(range(size.turns), [f"turn {turn + 1}" for turn in range(size.turns)])
    axes.set_title(
        "Time to first token from the model's grant (log scale; dot: request, bar: median)",
        loc="left",
        fontsize=10.5,
        color=INK,
        pad=10,
    )
    axes.legend(loc="center left", frameon=False, fontsize=10, labelcolor=INK)


def _plot_tokens(axes: Any, with_cache: Phase, size: DemoSize) -> None:
    reused = _sums_by_turn(with_cache, size, "num_from_device")
    computed = _sums_by_turn(with_cache, size, "num_computed")
    total = reused + computed
    turns = range(size.turns)
    axes.bar(turns, reused, 0.62, color=WITH_COLOUR, label="from the device tier")
    axes.bar(turns, computed, 0.62, bottom=reused, color=COMPUTED_COLOUR, label="computed")
    for turn in turns:
        axes.annotate(
            f"{reused[turn] / total[turn]:.0%} reused",
            (turn, total[turn]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            color=INK,
        )
    axes.set_ylim(0, total.max() * 1.28)
    axes.set_xticks(range(size.turns), [f"turn {turn + 1}" for turn in range(size.turns)])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(
        "Prompt tokens with cache, all chats", loc="left", fontsize=10.5, color=INK, pad=10
    )
    axes.legend(
        loc="upper left", frameon=False, fontsize=10, labelcolor=INK, ncols=2, columnspacing=1
    )


def _computes_shared_prompt(request: Request, phase: Phase) -> bool:
    """Nothing was there yet, and others of its turn found what it left."""
    return (
        request.turn == 0
        and not request.num_from_device
        and any(other.turn == 0 and other.num_from_device for other in phase.requests.values())
    )


def _sums_by_turn(phase: Phase, size: DemoSize, attribute: str) -> npt.NDArray[np.float64]:
    return np.array(
        [
            sum(getattr(r, attribute) for (_, at), r in phase.requests.items() if at == turn)
            for turn in range(size.turns)
        ],
        dtype=np.float64,
    )


def _inside(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]
