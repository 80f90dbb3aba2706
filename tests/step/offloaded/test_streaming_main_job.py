"""The recipe of the README at its own size, with every layer in host memory and as always."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
STEPS = 200


def losses(out, cache, *arguments):
    """Of each step of `colossax train llama_stdlib`, compiled as users compile it."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "colossax", "train", "llama_stdlib", f"--steps={STEPS}"]
    done = subprocess.run(
        [*command, "--validate-every=0", f"--out={out}", "--sample.prompt=", *arguments],
        env={**environment, "PYTHONPATH": str(ROOT), "COLOSSAX_CACHE": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_steps_give_the_same_losses(tmp_path):
    cache = tmp_path / "cache"
    ordinary = losses(tmp_path / "ordinary", cache)
    offloaded = losses(
        tmp_path / "offloaded",
        cache,
        "--plan.offload=parameters=1,optimizer=1,activations=1",
    )
    assert len(ordinary) == STEPS
    np.testing.assert_allclose(offloaded, ordinary, rtol=1e-5)
