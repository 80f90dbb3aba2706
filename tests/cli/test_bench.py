"""`colossax bench` on a CPU."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest

from colossax.cli import bench_offload, main
from colossax.cli.bench_offload import updates
from colossax.offload import rates
from colossax.pallas.bench import Effort
from colossax.planner.loss_equality import compared


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


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """`bench offload` on small arrays; the cache folder."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    small = dataclasses.replace(
        rates.CPU_SETTING,
        copy_bytes=2**20,
        cpu_parameters=2**16,
        matmul=128,
        effort=Effort(seconds=0.01, repeats=3),
    )
    monkeypatch.setattr(rates, "CPU_SETTING", small)
    return tmp_path


def test_offload_rates_are_printed_and_kept(quick, capsys):
    assert main(["bench", "offload"]) == 0
    printed = capsys.readouterr().out
    kept = rates.load_rates("cpu")
    assert printed.rstrip().endswith(f"written to {quick / 'rates' / 'cpu.json'}")
    assert "the device is the CPU" in printed
    assert f"to host {kept.to_host_bytes_per_s / 1e9:.3g}" in printed
    assert [update.bytes_per_direction for update in kept.updates] == [12, 10, 8, 4]
    for update in kept.updates:
        assert f"{update.name:22} " in printed
        assert f"{update.cpu_parameters_per_s / 1e9:.3g} G/s" in printed


def test_offload_says_the_same_as_json(quick, capsys):
    path = quick / "mine.json"
    assert main(["bench", "offload", "--json", "--out", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"] == json.loads(path.read_text())
    assert found["file"] == str(path)
    assert rates.load_rates("cpu") is None
    for row, update in zip(found["updates"], found["rates"]["updates"], strict=True):
        moved = row["bytes_per_direction"]
        assert row["optimizer"] == update["name"]
        assert row["cpu_share"] == 0.0
        per_s = found["rates"]["both_ways_bytes_per_s"]
        tokens = moved * found["rates"]["matmul_flops_per_s"] / (8 * per_s)
        assert row["hiding_tokens"] == pytest.approx(tokens)


def test_pipelined_transfers_are_tested_on_a_gpu(quick, monkeypatch, capsys):
    """And on nothing else."""
    verdict = compared([1.0, 0.5], [1.0, 0.6])
    measure = bench_offload.measure_rates
    monkeypatch.setattr(bench_offload, "check_pipelined", lambda device: verdict)
    assert main(["bench", "offload"]) == 0
    assert "pipelined transfers" not in capsys.readouterr().out
    assert rates.load_rates("cpu").pipelined is None
    monkeypatch.setattr(
        bench_offload,
        "measure_rates",
        lambda updates: dataclasses.replace(measure(updates), platform="gpu"),
    )
    assert main(["bench", "offload"]) == 0
    assert rates.load_rates("cpu").pipelined == verdict
    said = "pipelined transfers stay off: with and without them 2 losses differ by 0.2 of them"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("update", updates(), ids=lambda update: update.name)
def test_what_is_measured_moves_the_bytes_it_says(update):
    """Parameters and states: the gradient of an update is made where it runs."""
    kept = jax.eval_shape(update.start, jax.ShapeDtypeStruct((1024,), "float32"))
    arrays = [x for x in jax.tree.leaves(kept) if x.ndim]
    assert sum(x.size * x.dtype.itemsize for x in arrays) == 1024 * update.bytes_per_direction


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["kernels", "--only", "no such"], "--only 'no such': no case of that name"),
        (["kernels", "--out", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["kernels", "--plan.mesh", "fsdp=2"], "has no recipe and no plan"),
        (["offload", "--only", "adamw"], "--only 'adamw': it chooses among kernels; leave it out"),
        (["offload", "--out", "/nowhere/x.json"], "there is no folder /nowhere"),
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
