"""`colossax bench` on a CPU."""

import json
import subprocess
import sys

import pytest

from colossax.cli import main


def test_kernels_are_measured_and_written(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    words = ["bench", "kernels", "--only", "8 x 64, 2 of 64, causal", "--out", str(path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "limits of this run: matmul" in printed
    found = json.loads(path.read_text())
    assert [row["kernel"] for row in found["rows"]] == ["attention forward", "attention backward"]
    assert all(row["right"] and row["us"] > 0 for row in found["rows"])
    for row in found["rows"]:
        assert f"{row['us']:.4g}" in printed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["kernels", "--only", "no such"], "--only 'no such': no case of that name"),
        (["kernels", "--out", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["kernels", "--plan.mesh", "fsdp=2"], "has no recipe and no plan"),
        (["engines"], "invalid choice: 'engines'"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(words, sentence, capsys):
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


HANGS = """
import time
from colossax.cli import bench, main
bench.LIMIT_S = 0.5
bench.measure = lambda *given: time.sleep(60)
main(["bench", "kernels", "--only", "ring step"])
"""


def test_a_kernel_that_hangs_is_named():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("colossax: ")]
    assert said.startswith("colossax: ring step 2 x 59, 4/2 of 128")
    assert "no result within 0.5 s, one of ['step', 'xla'] hangs" in said
