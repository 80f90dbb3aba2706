"""`colossax check`: its facts against others' word, and faults put into its collectives."""

import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import flax
import jax
import jaxlib
import numpy
import optax
import pytest

import colossax
from colossax import versions
from colossax.cli import check, main
from colossax.cli.machine import facts
from colossax.cli.machine.kernels import kernel_choices
from colossax.pallas import Target, int4_matmul, paged_attention, sparse_matmul
from colossax.pallas.attention import proof as attention_proof
from colossax.pallas.grouped_matmul import proof as grouped_proof
from colossax.pallas.proof import Outcome, Verdict, prover
from colossax.sharding.collectives import trials
from tests.launching import free_port

ROOT = Path(__file__).resolve().parents[2]

GPUS = "580.65.06, NVIDIA H100 80GB HBM3\n" * 4
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\tSYS\t0-31\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tPHB\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tPHB\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""


@pytest.fixture(autouse=True)
def patched(monkeypatch, tmp_path):
    """No nvidia-smi is found; messages are small."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(trials, "_CPU_BYTES", (4096,))


@pytest.fixture
def nvidia_smi(tmp_path):
    """Makes a program of that name out of shell lines."""

    def make(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


@pytest.fixture
def four_gpus(nvidia_smi, tmp_path):
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "topology").write_text(TOPOLOGY)
    nvidia_smi(f'[ "$1" = topo ] && exec cat {tmp_path}/topology\nexec cat {tmp_path}/gpus')


def run(capsys, *arguments):
    """Run `colossax check --json`; gives (exit code, the object, standard error)."""
    code = main(["check", "--json", *arguments])
    out, errors = capsys.readouterr()
    return code, json.loads(out), errors


def test_versions_and_devices_are_those_of_this_process(capsys, devices):
    code, report, errors = run(capsys)
    assert (code, errors, report["usable"], report["problems"]) == (0, "", True, [])
    assert report["versions"] == {
        "python": platform.python_version(),
        "colossax": colossax.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "orbax-checkpoint": metadata.version("orbax-checkpoint"),
        "numpy": numpy.__version__,
    }
    assert report["devices"] == {
        "platform": "cpu",
        "kind": "cpu",
        "count": len(devices),
        "processes": 1,
        "memory_bytes": None,
    }
    assert (report["nvidia"], report["links"][:4]) == (None, "none")


def test_every_collective_runs_along_every_axis(capsys):
    _, report, _ = run(capsys)
    rows = [(row["mesh"], row["axis"], row["kind"]) for row in report["collectives"]]
    two = "data=2,fsdp=4"
    assert rows == [
        (mesh, axis, kind)
        for mesh, axis in (("fsdp=8", "fsdp"), (two, "data"), (two, "fsdp"))
        for kind in ("all-reduce", "all-gather", "reduce-scatter")
    ]
    sent = [round(row["seconds"] * row["ring_bytes_per_s"]) for row in report["collectives"]]
    assert sent == [7168, 3584, 3584, 4096, 2048, 2048, 6144, 3072, 3072]
    assert {row["bytes"] for row in report["collectives"]} == {4096}
    assert not any(row["fault"] or row["hung"] for row in report["collectives"])


@pytest.mark.parametrize("count, meshes", [(1, []), (3, [{"fsdp": 3}]), (7, [{"fsdp": 7}])])
def test_meshes_of_other_counts(capsys, devices, count, meshes):
    assert [dict(mesh.shape) for mesh in trials.meshes(devices[:count])] == meshes
    code, report, _ = run(capsys, f"--devices={count}")
    assert (code, report["devices"]["count"]) == (0, count)
    assert len(report["collectives"]) == 3 * len(meshes)


def one_device_left_out(x, axis):
    return jax.lax.psum(x * (jax.lax.axis_index(axis) != 1), axis)


def chunks_in_another_order(x, axis):
    return jax.numpy.roll(jax.lax.all_gather(x, axis, tiled=True), x.size)


def one_value_off(x, axis):
    chosen = jax.lax.axis_index(axis) == 1
    return jax.lax.psum_scatter(x, axis, tiled=True).at[5].add(chosen)


def too_few(x, axis):
    return jax.lax.all_gather(x[1:], axis, tiled=True)


def broken(x, axis):
    raise jax.errors.JaxRuntimeError("INTERNAL: NCCL operation failed\nand more")


@pytest.mark.parametrize(
    "kind, fault, message",
    [
        ("all-reduce", one_device_left_out, "on device 0, 1023 of 1024 values are wrong"),
        ("all-gather", chunks_in_another_order, "on device 0, 1024 of 1024 values are wrong"),
        ("reduce-scatter", one_value_off, "on device 1, 1 of 128 values are wrong"),
        ("all-gather", too_few, "on device 0 are 1016 values, not 1024"),
        ("all-reduce", broken, "failed: INTERNAL: NCCL operation failed"),
    ],
)
def test_a_fault_is_one_line_with_axis_and_kind(monkeypatch, capsys, kind, fault, message):
    monkeypatch.setitem(trials.COLLECTIVES, kind, fault)
    code, report, errors = run(capsys)
    assert (code, report["usable"]) == (1, False)
    faulty = [(row["axis"], row["kind"]) for row in report["collectives"] if row["fault"]]
    assert faulty == [("fsdp", kind), ("data", kind), ("fsdp", kind)]
    lines = errors.splitlines()
    assert len(lines) == 3
    where = f"colossax: {kind} along axis 'fsdp' of mesh fsdp=8, 4096 bytes: "
    assert lines[0].startswith(where)
    assert lines[0] == where + message
    assert lines[1].startswith(f"colossax: {kind} along axis 'data' of mesh data=2,fsdp=4, ")


def test_nothing_follows_a_collective_that_hangs(monkeypatch, capsys):
    release, left = threading.Event(), []

    def hangs(x, axis):
        release.wait(60)
        return x

    monkeypatch.setitem(trials.COLLECTIVES, "all-gather", hangs)
    monkeypatch.setattr(check, "LIMIT_S", 2.0)
    monkeypatch.setattr(check, "_leave", left.append)
    try:
        code, report, errors = run(capsys)
    finally:
        release.set()
    assert (code, left, report["usable"]) == (1, [1], False)
    assert [(row["kind"], row["hung"]) for row in report["collectives"]] == [
        ("all-reduce", False),
        ("all-gather", True),
    ]
    assert errors == (
        "colossax: all-gather along axis 'fsdp' of mesh fsdp=8, 4096 bytes:"
        " has not ended within 2 s\n"
    )


HANGING = """
import sys, time
import jax
from colossax.cli import check, main
from colossax.sharding.collectives import trials

def hangs(x, axis):
    wait = lambda i: time.sleep(120 * (i == 1)) or i
    i = jax.pure_callback(wait, jax.ShapeDtypeStruct((), "int32"), jax.lax.axis_index(axis))
    return jax.lax.psum(x + i, axis)

trials.COLLECTIVES["all-reduce"] = hangs
check.LIMIT_S = 2.0
sys.exit(main(["check", "--devices=2"]))
"""


def start(*arguments):
    """A process with devices of its own; gives (exit code, standard output, standard error)."""
    flags = "--xla_backend_optimization_level=0"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_a_process_whose_device_hangs_ends():
    began = time.monotonic()
    code, out, errors = start("-c", HANGING)
    assert code == 1, errors
    assert "0 of 1 gave the right values; each may take 2 s" in out
    assert errors.splitlines()[-1].startswith("colossax: all-reduce along axis 'fsdp' of mesh fsd")
    assert time.monotonic() - began < 40


def test_people_get_aligned_lines_of_as_many_devices_as_asked_for():
    code, out, errors = start("-m", "colossax", "check", "--devices=3")
    assert code == 0, errors
    lines = out.splitlines()
    assert f"{'jax':19}{jax.__version__}" in lines
    assert f"{'devices':19}3 x cpu" in lines
    assert f"{'memory per device':19}not told" in lines
    assert f"{'nvidia driver':19}nvidia-smi does not answer" in lines
    assert "times are of copies in this CPU's memory, of no link" in out
    assert "9 of 9 gave the right values; each may take 25 s" in out
    rows = [line.split() for line in lines if line.startswith("  fsdp=3")]
    assert [row[2] for row in rows[::3]] == ["all-reduce", "all-gather", "reduce-scatter"]
    # 65,536 bytes are no multiple of three items.
    assert [int(row[3]) for row in rows[:3]] == [65532, 1048572, 4194300]
    table = [line for line in lines if re.match(r"  \w", line)]
    assert table[0].split()[:4] == ["mesh", "axis", "kind", "bytes"]
    assert (len(table), len(set(map(len, table)))) == (10, 1)


PACKAGES = {
    "colossax": [
        "jax>=0.10.2",
        "optax (>=0.2.8)",
        'jax[cuda12]>=0.10.2; extra == "cuda12"',
        'tidy; extra == "hf"',
        'pytest<10,>=9; extra == "dev"',
        'ruff<0.18,>=0.17.5; (python_version >= "3.11") and extra == "dev"',
    ],
    "jax": ['plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda12"', 'x; extra == "cuda13"'],
    "plugin": ['cublas>=12; extra == "with-cuda"', 'cudnn>=9.8; extra == "with-cuda"', "absent"],
}


def faked(**installed):
    """`requires` and `version` of a machine with these packages."""

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    def requires(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return PACKAGES.get(name)

    return requires, version


BASE = {"colossax": "0.1.0", "jax": "0.10.2", "optax": "0.2.8"}


@pytest.mark.parametrize(
    "installed, missing",
    [
        ({}, {"cuda12": ("plugin",), "hf": ("tidy",), "dev": ("pytest", "ruff")}),
        ({"tidy": "1", "pytest": "9.0", "ruff": "0.17.5"}, {"cuda12": ("plugin",)}),
        (
            {"tidy": "1", "pytest": "9", "ruff": "0.18.0", "plugin": "0.10.1", "cublas": "12.9"},
            {"cuda12": ("plugin 0.10.1", "cudnn"), "dev": ("ruff 0.18.0",)},
        ),
    ],
)
def test_extras_are_what_the_metadata_asks_for(installed, missing):
    found = versions.extras(*faked(**BASE, **installed))
    assert list(found) == ["cuda12", "hf", "dev"]
    assert {name: extra.missing for name, extra in found.items() if not extra.installed} == missing


def test_what_is_missing_comes_with_its_pip_command():
    found = versions.extras(*faked(**BASE, pytest="9.1"))
    assert found["cuda12"].install == "pip install 'jax[cuda12]>=0.10.2'"
    assert found["hf"].install == "pip install tidy"
    assert found["dev"].install == "pip install 'ruff<0.18,>=0.17.5'"
    assert versions.extras(*faked()) == {}


def test_a_missing_extra_is_named_in_the_text(monkeypatch, capsys):
    requires, version = faked(**BASE)
    monkeypatch.setattr(check, "extras", lambda: versions.extras(requires, version))
    assert main(["check", "--devices=1"]) == 0
    assert "extra hf           missing (tidy): pip install tidy\n" in capsys.readouterr().out


def test_packages_that_are_too_old_are_named(monkeypatch, capsys):
    assert list(versions.outdated(*faked(**BASE))) == []
    old = faked(**{**BASE, "jax": "0.9.1"})
    monkeypatch.setattr(check, "outdated", lambda: versions.outdated(*old))
    _, report, _ = run(capsys, "--devices=1")
    assert report["problems"] == [
        "jax 0.9.1 is missing or of a version colossax does not support;"
        " run pip install 'jax>=0.10.2'"
    ]


def test_links_are_counted_by_pairs_of_gpus(four_gpus):
    nvidia = facts.ask_nvidia()
    assert nvidia == facts.Nvidia(
        driver="580.65.06", gpus=("NVIDIA H100 80GB HBM3",) * 4, links={"NV18": 3, "SYS": 3}
    )
    four = facts.Devices(platform="gpu", kind="H100", count=4, processes=1, memory_bytes=None)
    assert facts.links(four, nvidia) == "same node; NVLink (NV18): 3 pairs, PCIe (SYS): 3 pairs"
    assert facts.links(four, None) == "same node; what connects them is not known"


@pytest.mark.parametrize("script", ["exit 9", "echo No devices were found", "exec sleep 60"])
def test_an_nvidia_smi_that_does_not_answer_is_left(nvidia_smi, monkeypatch, script):
    monkeypatch.setattr(facts, "_NVIDIA_SMI_LIMIT_S", 0.3)
    nvidia_smi(script)
    assert facts.ask_nvidia() is None


def test_gpus_that_jax_leaves_alone(four_gpus, monkeypatch, capsys):
    seen = "JAX uses the CPU, but nvidia-smi shows 4 x NVIDIA H100 80GB HBM3 with driver 580.65.06"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, report, _ = run(capsys, "--devices=1")
    assert (code, report["nvidia"]["driver"]) == (0, "580.65.06")
    assert report["problems"] == [f"{seen}; JAX_PLATFORMS is 'cpu': unset it"]
    monkeypatch.delenv("JAX_PLATFORMS")
    lacking = versions.Extra(installed=False, missing=("p",), install="pip install p")
    monkeypatch.setattr(facts, "extras", lambda: {"cuda12": lacking, "cuda13": lacking})
    assert facts.unused(facts.ask_nvidia()) == f"{seen}; run pip install p"


@pytest.mark.parametrize(
    "driver, todo",
    [
        ("580.1", "run install cuda13"),
        ("570.1", "run install cuda12"),
        ("470.2", "update the driver to 525 or later"),
    ],
)
def test_the_driver_chooses_the_build(monkeypatch, driver, todo):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = {
        name: versions.Extra(installed=False, missing=("p",), install=f"install {name}")
        for name in ("cuda12", "cuda13")
    }
    monkeypatch.setattr(facts, "extras", lambda: found)
    nvidia = facts.Nvidia(driver=driver, gpus=("A100",), links={})
    assert facts.unused(nvidia).endswith(f"; {todo}")


@pytest.mark.parametrize(
    "problem, why",
    [
        (RuntimeError("Unable to initialize backend 'cuda': x\ny"), "Unable to initialize backend"),
        (AssertionError(), "its backend is missing or does not start"),
    ],
)
def test_no_devices_are_reported_with_what_to_do(monkeypatch, capsys, problem, why):
    def fails(count):
        raise problem

    monkeypatch.setattr(check, "choose_devices", fails)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    code, report, _ = run(capsys)
    assert (code, report["usable"], report["devices"]) == (1, False, None)
    (line,) = report["problems"]
    assert line.startswith(f"JAX finds no devices for JAX_PLATFORMS=cuda ({why}")
    assert line.endswith("unset it, or install the extra it needs")
    assert "\n" not in line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--devices=9"], "--devices 9: there are 8 cpu devices; ask for 8 or fewer"),
        (["--devices=0"], "found 0; give 1 or more"),
        (["--devces=2"], "unknown option --devces; did you mean '--devices'?"),
        (["--plan.mesh=fsdp=8"], "--plan.mesh: a check has no recipe and no plan; leave it out"),
        (["here"], "'here' is one word too many"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, arguments, message):
    assert main(["check", *arguments]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"colossax: [^\n]*\n", errors)
    assert message in errors


def test_two_processes_check_the_links_between_them():
    port = free_port()
    words = ["--devices", "2", "--json", "--coordinator", f"127.0.0.1:{port}", "--processes", "2"]
    command = [sys.executable, "-m", "colossax", "check", *words]
    both = [
        subprocess.Popen(
            [*command, "--process-id", str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    out = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], out
    found = json.loads(out[0][0])
    assert (found["devices"]["count"], found["devices"]["processes"]) == (4, 2)
    assert {trial["mesh"] for trial in found["collectives"]} == {"fsdp=4"}
    assert not any(trial["fault"] for trial in found["collectives"])
    assert out[1][0] == ""


def test_the_kernels_of_a_machine_are_those_that_would_run(capsys, monkeypatch):
    assert main(["check", "--devices", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["kernels"]
    assert {name: one["chosen"] for name, one in found.items()} == {
        "attention": "xla",
        "grouped matmul": "xla",
        "int4 matmul": "xla",
        "paged attention": "xla",
        "sparse matmul": "xla",
    }
    assert "the target is 'cpu'" in found["attention"]["declined"]["cudnn"]
    assert "the target is 'cpu'" in found["grouped matmul"]["declined"]["mosaic"]
    monkeypatch.setattr("colossax.pallas.attention.cudnn.cudnn_installed", lambda: True)
    ampere = kernel_choices(Target(platform="gpu", compute_capability=(8, 0)))
    assert ampere["attention"].chosen == "cudnn"
    assert "compute capability 9.0" in ampere["grouped matmul"].declined["mosaic"]
    hopper = kernel_choices(Target(platform="gpu", compute_capability=(9, 0)))
    assert {one.chosen for one in hopper.values()} == {"mosaic"}
    assert not hopper["grouped matmul"].declined


def test_a_cpu_has_nothing_to_prove(capsys):
    _, report, _ = run(capsys, "--devices=1")
    assert report["proofs"] == []
    assert report["nothing_to_prove"] == "Mosaic kernels need an NVIDIA GPU, the target is 'cpu'"


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A Hopper GPU that is there, as far as kernels are asked; what its children would find."""
    monkeypatch.setenv("COLOSSAX_CACHE", str(tmp_path / "cache"))
    found = []

    def try_variants(variants, device_kind, **how):
        found.extend(variants)
        wrong = Verdict.declined("wrong numbers")
        right = Verdict(outcome=Outcome.PROVED, seconds=(1.0,), peers={"xla": (4.0,)})
        return {one: wrong if getattr(one, "soft_cap", False) else right for one in variants}

    monkeypatch.setattr(prover, "try_variants", try_variants)
    there = Target(platform="gpu", compute_capability=(9, 0), device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(check, "current_target", lambda: there)
    return found


def test_a_check_proves_every_kernel_and_says_what_it_found(capsys, hopper):
    rooms = (attention_proof, grouped_proof, paged_attention, int4_matmul, sparse_matmul)
    every = [one for room in rooms for one in room.variants()]
    _, report, _ = run(capsys, "--devices=1")
    assert hopper == every
    assert [row["kernel"] for row in report["proofs"]] == [str(one) for one in every]
    outcomes = {row["outcome"] for row in report["proofs"] if "soft cap" in row["kernel"]}
    assert outcomes == {"declined"}
    assert report["kernels"]["attention"]["chosen"] == "mosaic"
    hopper.clear()
    assert main(["check", "--devices=1"]) == 0
    assert {one.soft_cap for one in hopper} == {True}, "only what is not proved is tried again"
    out = capsys.readouterr().out
    assert "proof of           attention, heads of 64, bfloat16: proved, rate 4.00 of xla\n" in out
    capped = "attention, heads of 64, bfloat16, soft cap: declined: wrong numbers"
    assert f"proof of           {capped}\n" in out


def test_a_check_of_several_processes_tries_nothing(capsys, hopper, monkeypatch):
    monkeypatch.setattr(check.jax, "process_count", lambda: 2)
    _, report, _ = run(capsys, "--devices=1")
    assert hopper == []
    told = {(row["outcome"], row["text"]) for row in report["proofs"]}
    assert told == {("not tried", "not tried here: run colossax check in one process")}
    assert "not proved on this device" in report["kernels"]["attention"]["declined"]["mosaic"]
