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
    from tiered_cache.testing.chat_models import ChatModel

WITHOUT_COLOUR: Final = "#c2571a"
WITH_COLOUR: Final = "#1f7a8c"
HOST_COLOUR: Final = "#7a4fa3"
COMPUTED_COLOUR: Final = "#e3b25c"
INK: Final = "#22303c"
FAINT: Final = "#8a97a3"


class Speedup(NamedTuple):
    """Times to first token of the same requests in both phases: medians, or another percentile."""

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
    return request.turn == 0 and request.num_reused > 0


def host_hits(
    without: Phase, with_cache: Phase, *, with_load: bool, percent: int = 50
) -> Speedup | None:
    """Requests for which the host brought the long prefix, against computing all of it.

    `with_load`: the time of the load counts, too. None: there were none.
    """
    attribute = "ttft_with_load_s" if with_load else "ttft_from_grant_s"
    return _speedup(
        without, with_cache, lambda request: request.is_long_host_hit, attribute, percent
    )


def _speedup(
    without: Phase,
    with_cache: Phase,
    chosen: Callable[[Request], bool],
    attribute: str = "ttft_from_grant_s",
    percent: int = 50,
) -> Speedup | None:
    keys = [key for key, request in with_cache.requests.items() if chosen(request)]
    if not keys:
        return None
    times = [
        [getattr(phase.requests[key], attribute) for key in keys] for phase in (without, with_cache)
    ]
    return Speedup(*(float(np.percentile(of_phase, percent)) for of_phase in times))


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
    if with_cache.stats.host:
        yield _row("prompt tokens from host", _sums(phases, "num_from_host"), "{:,.0f}")
    if with_cache.stats.storage is not None:
        yield _row("prompt tokens from storage", _sums(phases, "num_from_storage"), "{:,.0f}")
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
    # Where there is storage, too, a table by tiers says more.
    kinds = (("from grant", False), ("with its load", True))
    for words, with_load in () if with_cache.stats.storage is not None else kinds:
        for word, percent in (("median", 50), ("p95", 95)):
            speedup = host_hits(without, with_cache, with_load=with_load, percent=percent)
            if speedup is not None:
                name = f"TTFT {words}, host hit, {word}"
                yield _row(name, list(speedup), "{:.3f} s", ratio=True)
    yield _row("whole run", [phase.wall_s for phase in phases], "{:.1f} s", ratio=True)


def _row(
    name: str, values: list[float], form: str, *, ratio: bool = False
) -> tuple[str, str, str, str]:
    without, with_cache = values
    times = f"{without / with_cache:.1f} ×" if ratio and with_cache else ""
    return name, form.format(without), form.format(with_cache), times


def _sums(phases: Iterable[Phase], attribute: str) -> list[float]:
    return [float(sum(getattr(r, attribute) for r in p.requests.values())) for p in phases]


def sources(with_cache: Phase, size: DemoSize) -> Table:
    """Where the prompt tokens came from, turn by turn, and what the loads took."""
    result = Table(title="Prompt tokens with the cache, by source", title_justify="left")
    for heading in ("", "device", "host", "computed", "host hits", "load: median", "longest"):
        result.add_column(heading, justify="right" if heading else "left")
    for turn in range(size.turns):
        here = [r for (_, at), r in with_cache.requests.items() if at == turn]
        loads = [r.load_s for r in here if r.num_from_host]
        result.add_row(
            f"turn {turn + 1}",
            *(
                f"{sum(getattr(r, name) for r in here):,}"
                for name in ("num_from_device", "num_from_host", "num_computed")
            ),
            str(len(loads)),
            f"{np.median(loads):.3f} s" if loads else "",
            f"{max(loads):.3f} s" if loads else "",
        )
    return result


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


def host_summary(without: Phase, with_cache: Phase) -> str:
    """What the host tier did, and what it was worth."""
    counters, num_hits = with_cache.stats.counters, with_cache.num_host_hits
    copied = f"{counters.pages_stored:,} pages stored, {counters.pages_loaded:,} loaded"
    if not num_hits:
        return (
            f"NO HOST HIT: {copied}. Nothing came back from the host: more chats or tenants, or a "
            "smaller device tier, make it needed."
        )
    line = f"Host tier: {num_hits} of {len(with_cache.requests)} requests hit it, {copied}"
    speedup = host_hits(without, with_cache, with_load=True)
    if speedup is not None:
        line += (
            f"; a hit of the long prefix gives its first token {speedup.ratio:.1f} times sooner "
            "than computing it, the load included"
        )
    return line + "."


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


def plot(without: Phase, with_cache: Phase, size: DemoSize, model: str, path: Path) -> None:
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
    figure.text(0.065, 0.9, _subtitle(with_cache, size, model), fontsize=10.5, color=FAINT)
    figure.text(0.065, 0.022, _footnote(with_cache), fontsize=8.5, color=FAINT)
    figure.subplots_adjust(left=0.065, right=0.975, top=0.79, bottom=0.14, wspace=0.2)
    figure.savefig(path)


def _headline(without: Phase, with_cache: Phase) -> str:
    on_host_hits = host_hits(without, with_cache, with_load=True)
    if on_host_hits is not None:
        return f"First token {on_host_hits.ratio:.1f} times sooner on a host hit, its load included"
    speedup = later_turns(without, with_cache) or shared_prompt(without, with_cache)
    if speedup is None:
        return "Time to first token"
    when = "from the second turn on" if _has_later_turns(with_cache) else "on the shared prompt"
    return f"First token {speedup.ratio:.1f} times sooner {when}"


def _subtitle(with_cache: Phase, size: DemoSize, model: str) -> str:
    text = f"{model}, float32, CPU: {size.chats} chats at once, {size.turns} turns each, over "
    if size.tenants == 1:
        return text + "one system prompt of about 1,000 tokens"
    text += f"the system prompts of {size.tenants} tenants"
    if not with_cache.stats.host:
        return text + " (1,000 tokens each)"
    return f"{text} (1,000 tokens each; the device holds {with_cache.device_tokens:,})"


def _footnote(with_cache: Phase) -> str:
    if with_cache.num_host_hits:
        return (
            "From the start of a request's first run in the model's thread to its first token, and "
            "the load from the host before that; no waiting for other requests in it."
        )
    return (
        "From the model's grant: from the start of a request's first run in the model's thread to "
        "its first token; no waiting for other requests in it."
    )


def _has_later_turns(phase: Phase) -> bool:
    """Whether anybody asked a second question."""
    return any(turn > 0 for _, turn in phase.requests)


def _plot_times(axes: Any, without: Phase, with_cache: Phase, size: DemoSize) -> None:
    has_loads = with_cache.num_host_hits > 0
    since = "with its load" if has_loads else "from the model's grant"
    for side, phase, colour in ((-0.19, without, WITHOUT_COLOUR), (0.19, with_cache, WITH_COLOUR)):
        for turn in range(size.turns):
            here = [r for (_, at), r in phase.requests.items() if at == turn]
            times = np.array([r.ttft_with_load_s for r in here])
            places = turn + side + (np.linspace(-0.1, 0.1, len(times)) if len(times) > 1 else 0.0)
            axes.scatter(places, times, s=34, color=colour, alpha=0.55, lw=0)
            _plot_loads(axes, np.broadcast_to(places, times.shape), here)
            # Who computes the shared prompt is labelled below, and is no part of the median.
            others = np.array([not _computes_shared_prompt(r, phase) for r in here])
            median = float(np.median(times[others] if others.any() else times))
            axes.hlines(median, turn + side - 0.15, turn + side + 0.15, color=colour, lw=2.5)
            near = times[others] if others.any() else times  # the label stands above its own cloud
            _label(axes, f"{median:.2f} s", (turn + side, near.max()), colour)
    first = [r for r in with_cache.requests.values() if _computes_shared_prompt(r, with_cache)]
    if first:
        last = first[-1]
        axes.annotate(
            "computes the\nshared prompt" if len(first) == 1 else "compute the\nshared prompts",
            (0.19 + 0.1 * (2 * last.chat / (size.chats - 1) - 1), last.ttft_with_load_s),
            xytext=(-5, -8),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=WITH_COLOUR,
        )
    axes.set_yscale("log")
    all_times = [r.ttft_with_load_s for p in (without, with_cache) for r in p.requests.values()]
    all_times += [r.load_s for r in with_cache.requests.values() if r.num_from_host]
    axes.set_ylim(min(all_times) / 1.6, max(all_times) * 1.7)
    ticks = [
        t
        for t in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
        if _inside(t, axes.get_ylim())
    ]
    axes.set_yticks(ticks, [f"{tick:g} s" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", color="#e6eaee", lw=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(-0.5, size.turns - 0.5)
    axes.set_xticks(range(size.turns), [f"turn {turn + 1}" for turn in range(size.turns)])
    axes.set_title(
        f"Time to first token {since} (log scale; dot: request, bar: median)",
        loc="left",
        fontsize=10.5,
        color=INK,
        pad=10,
    )
    names = [("without cache", WITHOUT_COLOUR), ("with cache", WITH_COLOUR)]
    if has_loads:
        names.append(("of that, the load from the host", HOST_COLOUR))
    for name, colour in names:
        axes.scatter([], [], s=34, color=colour, alpha=0.55, lw=0, label=name)
    axes.legend(
        loc="center left",
        bbox_to_anchor=(0.0, _place_of_legend(axes, with_cache)),
        frameon=False,
        fontsize=10,
        labelcolor=INK,
    )


def _place_of_legend(axes: Any, with_cache: Phase) -> float:
    """A height between the clouds, from 0 to 1: above the loads, where there are some."""
    hits = [r for r in with_cache.requests.values() if r.num_from_host]
    if not hits:
        return 0.5
    between = (max(r.load_s for r in hits), min(r.ttft_with_load_s for r in hits))
    low, high = np.log(axes.get_ylim())
    return float((np.log(between).mean() - low) / (high - low))


def _plot_loads(axes: Any, places: npt.NDArray[np.float64], requests: list[Request]) -> None:
    """How long each load took, below what it is a part of."""
    loaded = np.array([r.num_from_host > 0 for r in requests])
    if not loaded.any():
        return
    places, loads = places[loaded], np.array([r.load_s for r in requests])[loaded]
    median = float(np.median(loads))
    axes.scatter(places, loads, s=34, color=HOST_COLOUR, alpha=0.55, lw=0)
    middle = round(float(np.mean(places)) - 0.19) + 0.19
    axes.hlines(median, middle - 0.15, middle + 0.15, color=HOST_COLOUR, lw=2.5)
    _label(axes, f"{median:.3f} s", (middle, loads.max()), HOST_COLOUR)


def _label(axes: Any, text: str, at: tuple[float, float], colour: str) -> None:
    """Above a cloud of dots."""
    axes.annotate(
        text,
        at,
        xytext=(0, 9),
        textcoords="offset points",
        ha="center",
        fontsize=10,
        fontweight="bold",
        color=colour,
    )


def _plot_tokens(axes: Any, with_cache: Phase, size: DemoSize) -> None:
    sources = [("device tier", "num_from_device", WITH_COLOUR)]
    if with_cache.stats.host:
        sources.append(("host tier", "num_from_host", HOST_COLOUR))
    sources.append(("computed", "num_computed", COMPUTED_COLOUR))
    turns = range(size.turns)
    total = np.zeros(size.turns)
    for name, attribute, colour in sources:
        tokens = _sums_by_turn(with_cache, size, attribute)
        axes.bar(turns, tokens, 0.62, bottom=total, color=colour, label=name)
        total += tokens
    reused = _sums_by_turn(with_cache, size, "num_reused")
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
        loc="upper left",
        frameon=False,
        fontsize=10,
        labelcolor=INK,
        ncols=3,
        columnspacing=1,
        handlelength=1.2,
    )


def _computes_shared_prompt(request: Request, phase: Phase) -> bool:
    """Nothing was there yet, and others of its turn found what it left."""
    return (
        request.turn == 0
        and not request.num_reused
        and any(other.turn == 0 and other.num_reused for other in phase.requests.values())
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
