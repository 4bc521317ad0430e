"""What the demo shows of three tiers and a restart: tables, a plot, and whether it is as promised.

Owns: words and pictures. Refuses to know: how the numbers came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from rich.table import Table

from tiered_cache.cli._demo_report import (
    COMPUTED_COLOUR,
    FAINT,
    HOST_COLOUR,
    INK,
    WITH_COLOUR,
    WITHOUT_COLOUR,
)
from tiered_cache.cli._demo_run import LONG, base_capacity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tiered_cache.cli._demo_restart import Restart
    from tiered_cache.cli._demo_run import DemoSize, Phase, Request

STORAGE_COLOUR: Final = "#3f8f4f"
MODEL_COLOUR: Final = "#b9c4cd"

SOURCES: Final = {
    "device": ("num_from_device", WITH_COLOUR),
    "host": ("num_from_host", HOST_COLOUR),
    "storage": ("num_from_storage", STORAGE_COLOUR),
    "computed": ("num_computed", COMPUTED_COLOUR),
}
"""Where prompt tokens come from: nearest first."""

TIERS: Final = ("device", "host", "storage")

PROMISED: Final = 4.0
"""How much sooner the first token after a restart is to come than by computing its prompt."""


@dataclass(frozen=True, slots=True)
class Story:
    """The three parts of what happened, with `model`, the one that talked."""

    model: str
    size: DemoSize
    without: Phase
    with_cache: Phase
    again: Restart

    def groups(self) -> Iterator[tuple[str, list[Request]]]:
        """The requests with cache turn by turn, then those after the restart."""
        for turn in range(self.size.turns):
            requests = self.with_cache.requests.values()
            yield f"turn {turn + 1}", [r for r in requests if r.turn == turn]
        yield "after restart", list(self.again.requests.values())

    def computed(self, requests: Iterable[Request]) -> list[Request]:
        """The same ones in the run without cache."""
        return [self.without.requests[r.chat, r.turn] for r in requests]


def source(request: Request) -> str:
    """Where most of its prompt came from."""
    return max(SOURCES, key=lambda name: int(getattr(request, SOURCES[name][0])))


def num_hits(requests: Iterable[Request], tier: str) -> int:
    """How many got anything from a tier."""
    return sum(getattr(request, SOURCES[tier][0]) > 0 for request in requests)


def all_is_shown(story: Story) -> bool:
    """Every tier was hit, and after the restart the first prefix came from storage."""
    requests = story.with_cache.requests.values()
    is_hit = all(num_hits(requests, tier) for tier in TIERS)
    return is_hit and _is_from_storage(story.again.first)


def _is_from_storage(request: Request) -> bool:
    return request.num_from_storage >= LONG * request.prompt_len


class Times(NamedTuple):
    """Medians of some requests, in seconds; `computed_s`: what the same ones took without cache."""

    prefetch_s: float
    load_s: float
    model_s: float
    total_s: float
    computed_s: float

    @property
    def ratio(self) -> float:
        return self.computed_s / self.total_s


def _times(story: Story, requests: Sequence[Request]) -> Times:
    def median(part: str, of: Sequence[Request] = requests) -> float:
        return float(np.median([getattr(request, part) for request in of]))

    return Times(
        prefetch_s=median("prefetch_s"),
        load_s=median("load_s"),
        model_s=median("ttft_from_grant_s"),
        total_s=median("ttft_with_prefetch_s"),
        computed_s=median("ttft_with_prefetch_s", story.computed(requests)),
    )


# --- Tables ---------------------------------------------------------------------------------------


def tokens_table(story: Story) -> Table:
    """Where the prompt tokens came from, and how many requests had some from there."""
    result = Table(
        title="Prompt tokens by source (in brackets: requests that had some)", title_justify="left"
    )
    for heading in ("", *SOURCES):
        result.add_column(heading, justify="right" if heading else "left")
    for name, requests in story.groups():
        if name == "after restart":
            result.add_section()
        cells = []
        for tier, (attribute, _) in SOURCES.items():
            tokens = sum(getattr(r, attribute) for r in requests)
            cells.append(f"{tokens:,} ({num_hits(requests, tier)})")
        result.add_row(name, *cells)
    return result


def times_table(story: Story) -> Table:
    """What a first token waits for, by phase and by where most of the prompt came from."""
    result = Table(
        title="Time to first token in seconds, by source: medians (in brackets: requests)",
        title_justify="left",
    )
    result.add_column("", no_wrap=True)
    for heading in ("prefetch", "load", "grant", "sum", "computed", "ratio"):
        result.add_column(heading, justify="right", no_wrap=True)
    phases = {
        "without": story.without.requests.values(),
        "with": story.with_cache.requests.values(),
        "restart": story.again.requests.values(),
    }
    for phase, requests in phases.items():
        result.add_section()
        for name in ("computed", *TIERS):
            chosen = [request for request in requests if source(request) == name]
            if not chosen:
                continue
            times = _times(story, chosen)
            ratio = "" if name == "computed" else f"{times.ratio:.1f} ×"
            cells = [f"{value:.3f}" if value < 10 else f"{value:.2f}" for value in times]
            words = phase if phase == "without" else f"{phase}: {name}"
            result.add_row(f"{words} ({len(chosen)})", *cells, ratio)
    return result


# --- Words ----------------------------------------------------------------------------------------


def hits_summary(story: Story) -> str:
    """Which tiers were hit, and which were not and why that might be."""
    requests = story.with_cache.requests.values()
    hits = {tier: num_hits(requests, tier) for tier in TIERS}
    assert story.with_cache.stats.storage is not None, "there is a third tier"
    counters = story.with_cache.stats.storage.counters
    moved = (
        f"{counters.objects_written:,} pages ({counters.bytes_written / 1e6:,.0f} MB) written to "
        f"storage, {counters.objects_read:,} read"
    )
    if all(hits.values()):
        of = f"of {len(requests)} requests {hits['device']} hit the device, {hits['host']} the host"
        return f"Every tier was hit: {of}, {hits['storage']} storage; {moved}."
    missing = " and ".join(tier for tier in TIERS if not hits[tier])
    return (
        f"NO HIT of {missing}: {moved}. It takes 6 chats of 3 tenants, and a prefetch policy that "
        "waits."
    )


def restart_summary(story: Story) -> str:
    """What storage was worth to the second process."""
    first = story.again.first
    tokens = f"{first.num_from_storage:,} of the first prompt's {first.prompt_len:,} tokens"
    if not _is_from_storage(first):
        return f"NOT FROM STORAGE: after the restart only {tokens} came from there."
    grant, everything = _first_ratios(story)
    promise = f"at least {PROMISED:g} are promised"
    if grant < PROMISED:
        promise += ", and this is LESS: is the machine busy?"
    return (
        f"Process {story.again.pid}, its memory full of NaN, had {tokens} from storage: "
        f"{first.prefetch_s:.3f} s to the host, {first.load_s:.3f} s to the device, and "
        f"{first.ttft_from_grant_s:.3f} s from the grant to the first token. That is {grant:.1f} "
        f"times sooner than computing it in the same process ({promise}), and {everything:.1f} "
        f"times with prefetch and load. In all it read {story.again.objects_read:,} pages "
        f"({story.again.bytes_read / 1e6:,.0f} MB)."
    )


def _first_ratios(story: Story) -> tuple[float, float]:
    """How much sooner the first answer after the restart was: from the grant, and all in all."""
    first, computed = story.again.first, story.again.recomputed
    return (
        computed.ttft_from_grant_s / first.ttft_from_grant_s,
        computed.ttft_with_prefetch_s / first.ttft_with_prefetch_s,
    )


# --- Plot -----------------------------------------------------------------------------------------


def plot(story: Story, path: Path) -> None:
    """Three panels: every request's first token, where the tokens came from, and what was waited
    for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: a figure of our own changes no global state and needs no display.
    figure = Figure(figsize=(13, 8), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.45, 1), height_ratios=(1, 0.95))
    every = figure.add_subplot(grid[:, 0])
    tokens, parts = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    _plot_requests(every, story)
    _plot_tokens(tokens, story)
    _plot_parts(parts, story)
    for axes in (every, tokens, parts):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=10)
    figure.text(0.06, 0.952, _headline(story), fontsize=16, fontweight="bold", color=INK)
    figure.text(0.06, 0.92, _subtitle(story), fontsize=10.5, color=FAINT)
    figure.text(
        0.06,
        0.018,
        "From asking for the prefix, storage → host → device, to the first token. Requests are "
        "served one after another: no waiting for others in it.",
        fontsize=8.5,
        color=FAINT,
    )
    figure.subplots_adjust(left=0.06, right=0.975, top=0.855, bottom=0.125, wspace=0.22, hspace=0.3)
    figure.savefig(path)


def _headline(story: Story) -> str:
    if not _is_from_storage(story.again.first):
        return "Time to first token"
    return (
        f"First token after a restart: {_first_ratios(story)[1]:.1f} times sooner than computed, "
        "prefetch and load included"
    )


def _subtitle(story: Story) -> str:
    size, stats = story.size, story.with_cache.stats
    page_size = story.with_cache.device_tokens // base_capacity(stats.pools)
    host_tokens = page_size * base_capacity(stats.host)
    return (
        f"{story.model}, float32, CPU: {size.chats} chats over the system prompts of "
        f"{size.tenants} tenants (1,000 tokens each); the device holds "
        f"{story.with_cache.device_tokens:,}, the host {host_tokens:,}"
    )


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10.5, color=INK, pad=10)


def _plot_requests(axes: Any, story: Story) -> None:
    """One dot per request, in the order of the chats; its colour says where its prompt was."""
    names = []
    for at, (name, requests) in enumerate(story.groups()):
        names.append(name)
        ordered = sorted(requests, key=lambda r: r.chat)
        _dots(axes, at - 0.21, story.computed(ordered), [WITHOUT_COLOUR] * len(ordered))
        _dots(axes, at + 0.21, ordered, [SOURCES[source(r)][1] for r in ordered])
    everything = [
        r.ttft_with_prefetch_s
        for requests in (
            story.without.requests.values(),
            story.with_cache.requests.values(),
            story.again.requests.values(),
        )
        for r in requests
    ]
    axes.set_yscale("log")
    axes.set_ylim(min(everything) / 1.5, max(everything) * 2.1)
    low, high = axes.get_ylim()
    ticks = [t for t in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= t <= high]
    axes.set_yticks(ticks, [f"{tick:g} s" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.grid(axis="y", color="#e6eaee", lw=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xticks(range(len(names)), names)
    restart = len(names) - 1
    axes.axvspan(restart - 0.5, restart + 0.5, color="#f3f6f8", zorder=0)
    axes.text(
        restart,
        high / 1.06,
        "a second process:\nthe first questions again",
        ha="center",
        va="top",
        fontsize=8.5,
        color=FAINT,
    )
    _title(axes, "Time to first token (log scale; dot: request, in order; bar: median)")
    axes.scatter([], [], s=40, color=WITHOUT_COLOUR, lw=0, label="without cache")
    for name, (_, colour) in SOURCES.items():
        label = "computed" if name == "computed" else f"from {name}"
        axes.scatter([], [], s=40, color=colour, lw=0, label=label)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.045),
        frameon=False,
        fontsize=10,
        labelcolor=INK,
        ncols=5,
        handletextpad=0.1,
        columnspacing=1.2,
    )


def _dots(axes: Any, centre: float, requests: Sequence[Request], colours: Sequence[str]) -> None:
    times = np.array([r.ttft_with_prefetch_s for r in requests])
    spread = np.linspace(-0.15, 0.15, len(times)) if len(times) > 1 else np.zeros(1)
    axes.scatter(centre + spread, times, s=40, c=colours, alpha=0.8, lw=0, zorder=3)
    # Who finds nothing computes, cache or not, and is no part of the median; unless all do.
    reused = np.array([r.num_reused > 0 for r in requests])
    near = times[reused] if reused.any() else times  # the label stands above its own cloud
    median = float(np.median(near))
    axes.hlines(median, centre - 0.18, centre + 0.18, color=INK, lw=1.6, alpha=0.55, zorder=2)
    axes.annotate(
        f"{median:.2f} s",
        (centre, near.max()),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        fontsize=10,
        fontweight="bold",
        color=INK,
    )


def _plot_tokens(axes: Any, story: Story) -> None:
    groups = list(story.groups())
    places = range(len(groups))
    total = np.zeros(len(groups))
    for name, (attribute, colour) in SOURCES.items():
        tokens = np.array([sum(getattr(r, attribute) for r in of) for _, of in groups], dtype=float)
        axes.bar(places, tokens, 0.62, bottom=total, color=colour, label=name)
        total += tokens
    for at, (_, requests) in enumerate(groups):
        axes.annotate(
            f"{sum(r.num_reused for r in requests) / total[at]:.0%} reused",
            (at, total[at]),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            color=INK,
        )
    axes.set_ylim(0, total.max() * 1.18)
    axes.set_xticks(places, [name for name, _ in groups])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _title(axes, "Prompt tokens with the cache, all chats, by source")


def _plot_parts(axes: Any, story: Story) -> None:
    """What the median first token waits for: the model, and before it what brings the prefix."""
    rows: list[tuple[str, list[Request]]] = [
        ("without cache", list(story.without.requests.values()))
    ]
    with_cache = story.with_cache.requests.values()
    rows += [(f"from {name}", [r for r in with_cache if source(r) == name]) for name in TIERS]
    restored = [r for r in story.again.requests.values() if source(r) == "storage"]
    rows.append(("from storage,\nafter restart", restored))
    rows = [(name, requests) for name, requests in rows if requests]
    longest = 0.0
    for at, (name, requests) in enumerate(rows):
        times = _times(story, requests)
        parts = ((times.prefetch_s, STORAGE_COLOUR), (times.load_s, HOST_COLOUR))
        left = 0.0
        for seconds, colour in (*parts, (times.model_s, MODEL_COLOUR)):
            of_model = WITHOUT_COLOUR if name == "without cache" else colour
            axes.barh(at, seconds, 0.6, left=left, color=of_model)
            left += seconds
        longest = max(longest, left)
        text = f" {times.total_s:.2f} s"
        if name != "without cache":
            text += f", {times.ratio:.1f} × sooner"
        axes.text(left, at, text, va="center", fontsize=10, fontweight="bold", color=INK)
    axes.set_xlim(0, longest * 1.22)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    _title(axes, "What a first token waits for (medians)")
    names = (("storage → host", STORAGE_COLOUR), ("host → device", HOST_COLOUR))
    for name, colour in (*names, ("the model", MODEL_COLOUR)):
        axes.scatter([], [], s=60, marker="s", color=colour, lw=0, label=name)
    axes.legend(loc="lower right", frameon=False, fontsize=9.5, labelcolor=INK)
