"""Every example runs as it stands and says what its text promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SAID = {
    "serving_loop.py": "100 tokens, 96 reused",
    "serving_loop_file.py": "tokens from storage 96, the model 4",
    "serving_loop_redis.py": "written, 0 read\nmachine B:\ntokens from storage 96, the model 4",
    "batch_step.py": "same tokens as one by one",
    "custom_backend.py": "8 rows read after a restart, 0 wrong",
    "custom_component.py": "with the sink: 96 of 96 tokens\nwithout the sink: 0 of 96",
    "host_tier.py": "tokens from the device 0, the host 96, the model 4",
}
"""Each example, and words of its output that only appear when it did its work."""


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_it_runs(name: str) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAID[name] in done.stdout
