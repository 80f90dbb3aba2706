"""`colossax bench` on a CPU."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest

from colossax.cli import main
from colossax.cli.benching import offload, stages
from colossax.cli.benching.offload import updates
from colossax.offload import rates
from colossax.pallas.bench import Effort
from colossax.pipeline.cuts import Link
from colossax.pipeline.measured import (
    load_layer_times,
    load_link_times,
    stage_link,
    stage_speeds,
)
from colossax.planner.loss_equality import compared


def test_kernels_are_measured_and_written(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    shape, kinds = "8 x 64, 2 of 64, causal", ("attention backward", "attention forward")
    chosen = [word for kind in kinds for word in ("--only", f"{kind} {shape}")]
    assert main(["bench", "kernels", *chosen, "--out", str(path)]) == 0
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
    measure = offload.measure_rates
    monkeypatch.setattr(offload, "check_pipelined", lambda device: verdict)
    assert main(["bench", "offload"]) == 0
    assert "pipelined transfers" not in capsys.readouterr().out
    assert rates.load_rates("cpu").pipelined is None
    monkeypatch.setattr(
        offload,
        "measure_rates",
        lambda updates: dataclasses.replace(measure(updates), platform="gpu"),
    )
    assert main(["bench", "offload"]) == 0
    assert rates.load_rates("cpu").pipelined == verdict
    said = "pipelined transfers stay off: with and without them 2 losses differ by 0.2 of them"
    assert said in capsys.readouterr().out


SMALL = ["--model.embed", "16", "--model.mlp", "24", "--model.heads", "2", "--model.kv_heads", "1"]


@pytest.fixture
def brief(tmp_path, monkeypatch, devices):
    """`bench stages` and `bench links` with little effort; the cache folder."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path))
    monkeypatch.setattr(stages, "EFFORT", Effort(seconds=0.001, repeats=3))
    return tmp_path


@pytest.mark.catches("bench-speed")
def test_a_layer_is_measured_on_each_device_and_kept(brief, capsys):
    words = ["bench", "stages", "llama_tiny", "--devices", "3", "--plan.remat", "full", *SMALL]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    kept = load_layer_times("cpu", "llama_tiny")
    assert printed[0].startswith("a layer of llama_tiny, forward and backward, tokens 1 x 96")
    assert kept.layer == "tokens 1 x 96, float32, remat full" and kept.layer in printed[0]
    assert printed[1] == (
        "the devices are parts of one CPU, which they share: no speeds of their own"
    )
    assert printed[-1] == f"written to {brief / 'stages' / 'cpu' / 'llama-tiny.json'}"
    assert [device.number for device in kept.devices] == [0, 1, 2] and kept.flops > 0
    speeds = stage_speeds(["cpu"] * 3, "llama_tiny", numbers=[0, 1, 2])
    assert max(speeds) == 1.0
    for line, device, speed in zip(printed[3:6], kept.devices, speeds, strict=True):
        number, kind, ms, _, shown = line.split()
        assert (number, kind) == (str(device.number), "cpu")
        assert (ms, shown) == (f"{device.seconds * 1e3:.4g}", f"{speed:.2f}")


@pytest.mark.catches("bench-link-bytes")
def test_links_are_measured_between_neighbours_and_kept(brief, capsys):
    words = ["bench", "links", "llama_tiny", "--plan.batch.microbatch", "2", *SMALL]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    kept = load_link_times("cpu", "cpu", "llama_tiny")
    assert kept.sent_bytes == 2 * 96 * 16 * 4
    assert "0.0117 MiB, from each device to the next" in printed[0]
    assert printed[1] == "the devices are parts of one CPU: copies within its memory, no links"
    assert [(pair.source, pair.target) for pair in kept.pairs] == [(n, n + 1) for n in range(7)]
    seconds = sorted(pair.seconds for pair in kept.pairs)[3]
    assert stage_link("cpu", "cpu", "llama_tiny") == Link(bytes_per_s=kept.sent_bytes / seconds)
    for line, pair in zip(printed[3:10], kept.pairs, strict=True):
        assert line.split()[:3] == [str(pair.source), "to", str(pair.target)]
        assert line.split()[-1] == f"{kept.sent_bytes / pair.seconds / 1e9:.3g}"


@pytest.mark.parametrize(("what", "rows"), [("stages", "devices"), ("links", "pairs")])
def test_stages_and_links_say_the_same_as_json(what, rows, brief, capsys):
    path = brief / "mine.json"
    words = ["bench", what, "llama_tiny", "--devices", "2", "--json", "--out", str(path), *SMALL]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == [str(path)]
    assert found[what] == [json.loads(path.read_text())]
    (kept,) = found[what]
    assert (kept["recipe"], kept["platform"], kept["jax"]) == ("llama_tiny", "cpu", jax.__version__)
    assert [row["seconds"] for row in found[rows]] == [row["seconds"] for row in kept[rows]]
    assert not (brief / what).exists()


@pytest.mark.parametrize("update", updates(), ids=lambda update: update.name)
def test_what_is_measured_moves_the_bytes_it_says(update):
    """Parameters and states: the gradient of an update is made where it runs."""
    kept = jax.eval_shape(update.start, jax.ShapeDtypeStruct((1024,), "float32"))
    arrays = [x for x in jax.tree.leaves(kept) if x.ndim]
    assert sum(x.size * x.dtype.itemsize for x in arrays) == 1024 * update.bytes_per_direction


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["kernels", "--only", "a", "--only", "no such"], "--only 'no such': no case of that"),
        (["kernels", "--out", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["kernels", "--plan.mesh", "fsdp=2"], "has no recipe and no plan"),
        (["offload", "--only", "adamw"], "--only 'adamw': it chooses among kernels; leave it out"),
        (["offload", "--out", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["offload", "llama_tiny"], "'llama_tiny' is one word too many"),
        (["kernels", "--devices", "2"], "--devices: it is for bench stages and links, not kernels"),
        (["stages"], "bench stages: whose layer? name a recipe, as in colossax bench stages"),
        (["stages", "lama_tiny"], "no recipe is called 'lama_tiny'; did you mean 'llama_tiny'?"),
        (["links", "llama_tiny", "--only", "x"], "--only 'x': it chooses among kernels"),
        (["links", "llama_tiny", "--devices", "1"], "there is 1, and a link lies between two"),
        (["stages", "llama_tiny", "--devices", "9"], "there are 8 cpu devices; ask for 8 or fewer"),
        (["stages", "llama_tiny", "--data.seq_len", "0"], "data.seq_len: found 0; give 1 or more"),
        (["links", "llama_tiny", "--out", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["engines"], "invalid choice: 'engines'"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(words, sentence, capsys, devices):
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
