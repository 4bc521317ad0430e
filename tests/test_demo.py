"""The demo runs, says the same with and without the cache, and shows what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiered_cache.cli import _demo_run as run

pytestmark = pytest.mark.timeout(600)

DEMO = [sys.executable, "-c", "from tiered_cache.cli.app import main; main()", "demo"]

CONFIGS = Path(__file__).parent.parent / "configs"


def test_two_chats_say_the_same_sooner(tmp_path: Path) -> None:
    """In a process of its own: the demo sets torch's threads and the gc for its whole process."""
    plot = tmp_path / "plot.png"
    command = [*DEMO, "--chats=2", "--turns=2", "--new-tokens=8", f"--out={plot}", "--no-progress"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert str(plot) in done.stdout
    assert done.stdout.startswith("SmolLM2-135M-Instruct: Apache-2.0.\n")
    assert "Same answers: " in done.stdout
    assert "The model's grant: " in done.stdout
    assert re.search(r"requests +│ +4 +│ +4", done.stdout)
    # The system prompt for the second chat (64 pages), and each chat's first turn (66 pages) again.
    assert _cells(done.stdout, "prompt tokens from device")[:2] == ["0", f"{(64 + 66 + 66) * 16:,}"]
    (ratio,) = _cells(done.stdout, "TTFT from grant, turn 2+, median")[2:]
    assert float(ratio.removesuffix(" ×")) >= 3  # 10 or more alone; CI machines are busy


def test_a_host_tier_carries_chats_that_the_device_cannot_hold(tmp_path: Path) -> None:
    """Two tenants take turns on a device that holds one's prompt: the host brings back the
    other's, sooner than computing it although the load counts."""
    plot = tmp_path / "plot.png"
    more = ["--chats=2", "--turns=2", "--new-tokens=8", f"--out={plot}", "--no-progress"]
    command = [*DEMO, f"--config={CONFIGS / 'host.yaml'}", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Same answers: 32 tokens" in done.stdout
    assert _cells(done.stdout, "prompt tokens from device")[:2] == ["0", "0"]
    assert _cells(done.stdout, "prompt tokens from host")[:2] == ["0", f"{(66 + 66) * 16:,}"]
    assert _cells(done.stdout, "turn 2 ")[:4] == ["0", f"{(66 + 66) * 16:,}", "66", "2"]
    assert "Host tier: 2 of 4 requests hit it, 136 pages stored, 132 loaded; " in done.stdout
    for percentile in ("median", "p95"):
        (ratio,) = _cells(done.stdout, f"TTFT with its load, host hit, {percentile}")[2:]
        assert float(ratio.removesuffix(" ×")) >= 4  # 10 or more


def test_a_host_tier_that_is_never_hit_is_said(tmp_path: Path) -> None:
    """One chat fits the device: the answers are right, and what the demo was to show is not."""
    more = ["--chats=1", "--turns=1", "--new-tokens=1", f"--out={tmp_path / 'plot.png'}"]
    command = [*DEMO, f"--config={CONFIGS / 'host.yaml'}", *more, "--no-progress"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Same answers: 1 tokens" in done.stdout
    assert "NO HOST HIT: 66 pages stored, 0 loaded." in done.stdout


def test_every_tier_is_hit_and_a_second_process_goes_on_from_storage(tmp_path: Path) -> None:
    """Three tenants on a device for one and a host for two. Then another process, whose memory is
    full of NaN, is asked the same, and finds it; nothing is left behind."""
    plot = tmp_path / "plot.png"
    (tmp_path / "home").mkdir()
    more = ["--chats=6", "--turns=1", "--new-tokens=4", f"--out={plot}", "--no-progress"]
    command = [*DEMO, f"--config={CONFIGS / 'file.yaml'}", *more]
    where = {"TIERED_CACHE_STORAGE__OPTIONS__PATH": str(tmp_path / "home" / "cache")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **where}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert done.stdout.count("Same answers: 24 tokens") == 1
    assert "After the restart: Same answers: 28 tokens" in done.stdout  # the first one twice
    said = " ".join(done.stdout.split())
    assert "Every tier was hit: of 6 requests 1 hit the device, 2 the host, 1 storage; " in said
    assert "had 1,040 of the first prompt's 1,056 tokens from storage: " in said
    assert f"Storage: files in {tmp_path / 'home'}" in said
    assert list((tmp_path / "home").iterdir()) == []
    tokens = _cells(done.stdout, "after restart")
    assert tokens[0] == "1,024 (1)"
    assert tokens[2].endswith("(4)")
    (ratio,) = re.findall(r"That is ([0-9.]+) times sooner", said)
    assert float(ratio) >= 4  # 10 or more
    assert "LESS" not in said


def test_tiers_that_are_never_hit_are_said(tmp_path: Path) -> None:
    """One chat fits the device. The second process is right, and finds its prefix; that is not
    enough."""
    more = ["--chats=1", "--turns=1", "--new-tokens=1", f"--out={tmp_path / 'plot.png'}"]
    command = [*DEMO, f"--config={CONFIGS / 'file.yaml'}", *more, "--no-progress"]
    where = {"TIERED_CACHE_STORAGE__OPTIONS__PATH": str(tmp_path / "cache")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **where}
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "After the restart: Same answers: 2 tokens" in done.stdout  # computed, too
    assert "NO HIT of device and host and storage: 66 pages (49 MB) written" in done.stdout


@pytest.mark.licensed
@pytest.mark.timeout(1800)
def test_a_hybrid_model_hits_every_tier_with_its_windows(tmp_path: Path) -> None:
    """Gemma, whose windows are pages of their own: the same story, told to the end."""
    plot = tmp_path / "plot.png"
    more = ["--turns=2", "--new-tokens=8", f"--out={plot}", "--no-progress"]
    command = [*DEMO, "--model=gemma3-270m", f"--config={CONFIGS / 'gemma.yaml'}", *more]
    where = {"TIERED_CACHE_STORAGE__OPTIONS__PATH": str(tmp_path / "cache")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **where}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = " ".join(done.stdout.split())
    assert said.startswith("Gemma-3-270M: Gemma is provided under and subject to the Gemma Terms")
    assert "Every tier was hit: of 16 requests " in said
    assert "After the restart: Same answers: " in said
    assert "had 1,008 of the first prompt's 1,016 tokens from storage: " in said


def _cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"│ {name}"))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_settings_that_cannot_hold_a_prompt_are_said(tmp_path: Path) -> None:
    """Too small a device tier in `--config`: an error with numbers, no traceback."""
    settings = tmp_path / "small.yaml"
    text = (CONFIGS / "demo.yaml").read_text()
    settings.write_text(re.sub(r"tokens: \d+", "tokens: 512", text))
    command = [*DEMO, f"--config={settings}", "--chats=2", f"--out={tmp_path / 'plot.png'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the device tier holds 512" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    command = [*DEMO, f"--out={tmp_path / 'no' / 'plot.png'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


# --- Comparing ------------------------------------------------------------------------------------


def _logits(best: int, second: int, margin: float) -> torch.Tensor:
    logits = torch.zeros(8)
    logits[best], logits[second] = 5.0, 5.0 - margin
    return logits


def _comparison(margins: list[float]) -> run.Comparison:
    """Of an answer of tokens 1, 1, 1, …, each with token 2 as second best by its margin."""
    reference = run.Reference()
    choose = reference.chooser(0, 0)
    assert [choose(_logits(1, 2, margin)) for margin in margins] == [1] * len(margins)
    return run.Comparison(reference)


def test_equal_tokens_are_the_same() -> None:
    comparison = _comparison([1.0, 1e-5, 1.0])
    choose = comparison.chooser(0, 0)
    assert [choose(_logits(1, 2, 0.5)) for _ in range(3)] == [1, 1, 1]
    assert comparison.same
    assert comparison.num_compared == 3
    assert not comparison.near_ties


def test_another_token_is_a_difference_and_ends_the_comparison_of_its_chat() -> None:
    comparison = _comparison([1.0, 1.0, 1.0])
    choose = comparison.chooser(0, 0)
    assert [choose(_logits(2, 1, 0.5)) for _ in range(5)] == [2] * 5
    assert not comparison.same
    assert comparison.num_compared == 1
    assert [(d.chat, d.position, d.expected.token, d.found) for d in comparison.differences] == [
        (0, 0, 1, 2)
    ]


def test_a_near_tie_is_told_and_the_reference_followed() -> None:
    """The margin counts that the run without cache saw, not the other one's."""
    comparison = _comparison([1.0, 5e-4, 1.0])
    choose = comparison.chooser(0, 0)
    assert choose(_logits(1, 2, 1e-6)) == 1
    assert choose(_logits(2, 1, 0.5)) == 1
    assert choose(_logits(1, 2, 0.5)) == 1
    assert comparison.same
    assert [d.position for d in comparison.near_ties] == [1]


def test_more_than_one_percent_near_ties_are_not_the_same() -> None:
    comparison = _comparison([1e-4] * 10)
    choose = comparison.chooser(0, 0)
    for _ in range(2):
        choose(_logits(2, 1, 1e-4))
    assert not comparison.differences
    assert not comparison.same
