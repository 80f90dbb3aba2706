"""Whole training steps compiled for GPUs that are not there: bytes against formulas.

D, V, T: embed, vocabulary, tokens of a device. MATRICES, LAYER_NORMS: parameters of one layer.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from colossax.aot import (
    assert_collectives,
    compile_program,
    full_rematerialisations,
    parse_target,
    target_devices,
)
from colossax.config import AttentionConfig, BatchConfig, OffloadConfig, Precision, preset
from colossax.planner import inspect_run, largest_microbatch
from colossax.planner.telling import describe
from colossax.recipes import RECIPES, recipe
from colossax.sharding import host_sharding
from colossax.tasks import task_of

pytestmark = pytest.mark.aot

GIB, GB = 2**30, 1e9
LAYERS, D, V, T = 32, 4096, 128_256, 8192
MATRICES = D * 4096 * 2 + D * 1024 * 2 + 3 * D * 14_336
LAYER_NORMS = 2 * D


OWN_RECIPES = """
import dataclasses

import jax, jax.numpy as jnp, optax
from flax import nnx
from colossax.tasks import Task

class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(1024, 4096, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4096, 1024, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

def loss(model, batch):
    return {"squares": (jnp.sum((model(batch["x"]) - batch["y"]) ** 2), jnp.float32(64), 1.0)}, {}

def task():
    rows = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    return Task(
        name="own", make_model=Model, optimizer=optax.adam(1e-3), loss=loss,
        shapes={"x": rows, "y": rows}, batches=None, tokens=0, flops=0,
    )

def told():
    return dataclasses.replace(task(), tokens=64, flops=6 * 64 * 2 * 1024 * 4096)
"""


def llama(name, mesh, *, rows, batch=None, **changes):
    config = recipe("llama3_8b")
    chosen = preset(name, mesh=mesh)
    batch = batch or BatchConfig(reduce_once=chosen.batch.reduce_once)
    plan = config.plan.replace(
        mesh=chosen.mesh,
        rules=chosen.rules,
        batch=batch,
        attention=AttentionConfig(kernel="xla"),
        **changes,
    )
    return config.replace(plan=plan, data=dataclasses.replace(config.data, global_batch=rows))


def inspected(config, target="h100:1x8"):
    return inspect_run(config, parse_target(target))


def check(one, expected):
    mesh = one.plan.bind(target_devices(one.target)).mesh
    assert_collectives(one.program.hlo, expected, mesh=mesh, within=0.02, ignore_below=4_000_000)
    assert full_rematerialisations(one.program) == []


GATHERS = LAYERS * 2 * (2 * MATRICES + 4 * LAYER_NORMS) + 2 * V * D
"""Each layer's matrices in bf16 and norms in float32, forward and backward; the head once."""
SCATTERS = LAYERS * (2 * MATRICES + 4 * LAYER_NORMS) + 2 * V * D
LOOKUP = 2 * T * D
PARAMETERS = LAYERS * (MATRICES + LAYER_NORMS) + 2 * V * D + D


def test_zero3_gathers_twice_and_scatters_once():
    one = inspected(llama("zero3", {"fsdp": 8}, rows=8))
    check(
        one,
        {
            ("all-gather", "fsdp"): GATHERS,
            ("reduce-scatter", "fsdp"): SCATTERS,
            ("all-to-all", "fsdp"): 2 * LOOKUP,
        },
    )
    ring = sum(link.totals.ring_bytes for link in one.links)
    assert ring <= 38.7 * GB
    assert one.memory.temp_bytes <= 7.5 * GIB
    assert all(link.totals.overlapped for link in one.links if link.totals.ring_bytes > 0.2 * GB)


def test_zero3_with_microbatches_does_all_of_it_for_each():
    batch = BatchConfig(accumulation=4)
    check(
        inspected(llama("zero3", {"fsdp": 8}, rows=32, batch=batch)),
        {
            ("all-gather", "fsdp"): 4 * GATHERS,
            ("reduce-scatter", "fsdp"): 4 * SCATTERS,
            ("all-to-all", "fsdp"): 4 * 2 * LOOKUP,
        },
    )


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero1_and_zero2_scatter_gradients_and_gather_new_parameters(name):
    one = inspected(llama(name, {"fsdp": 8}, rows=8))
    check(
        one,
        {
            ("all-gather", "fsdp"): 4 * PARAMETERS,
            ("reduce-scatter", "fsdp"): SCATTERS,
            ("all-to-all", "fsdp"): LOOKUP,
        },
    )
    assert one.memory.temp_bytes <= 7.5 * GIB


def test_zero1_with_microbatches_reduces_once():
    batch = BatchConfig(accumulation=4, reduce_once=True)
    one = inspected(llama("zero1", {"fsdp": 8}, rows=32, batch=batch), "h200:1x8")
    check(
        one,
        {("all-gather", "fsdp"): 4 * PARAMETERS, ("reduce-scatter", "fsdp"): 4 * PARAMETERS},
    )
    scatter = next(link.totals for link in one.links if link.totals.kind == "reduce-scatter")
    assert scatter.count <= 12  # one for each parameter, norms apart


def test_zero2_with_microbatches_reduces_each():
    batch = BatchConfig(accumulation=4)
    check(
        inspected(llama("zero2", {"fsdp": 8}, rows=32, batch=batch)),
        {
            ("all-gather", "fsdp"): 4 * PARAMETERS,
            ("reduce-scatter", "fsdp"): 4 * SCATTERS,
            ("all-to-all", "fsdp"): 4 * LOOKUP,
        },
    )


def test_tensor_parallel_layers_all_reduce_five_times():
    """Twice forward, twice backward, once in what full remat recomputes (the other is not used)."""
    tokens = 2 * T  # of a device's rows: four groups of two devices share eight rows
    check(
        inspected(llama("zero3+megatron", {"fsdp": 4, "tensor": 2}, rows=8)),
        {
            ("all-gather", "fsdp"): GATHERS / 2,
            ("reduce-scatter", "fsdp"): SCATTERS / 2,
            ("all-to-all", "fsdp"): 2 * 2 * tokens * D,
            # Beside the layers: the lookup in the split vocabulary, the head's input backward.
            ("all-reduce", "tensor"): (5 * LAYERS + 2) * 2 * tokens * D,
        },
    )


def test_blocks_with_a_split_sequence_end_in_reduce_scatters():
    """Where tensor-parallel layers all-reduce, these reduce-scatter the same bytes."""
    one = inspected(llama("zero3+megatron_sp", {"fsdp": 4, "tensor": 2}, rows=8))
    found = {(link.totals.kind, link.totals.axis): link.totals.bytes for link in one.links}
    blocks = 5 * LAYERS * 2 * (2 * T) * D
    assert found["reduce-scatter", "tensor"] == pytest.approx(blocks, rel=0.02)
    assert found.get(("all-reduce", "tensor"), 0) < 0.1 * blocks


def test_data_axes_all_reduce_the_share_of_fsdp():
    one = inspected(llama("zero3", {"data": 64, "fsdp": 8}, rows=512), "h100:64x8")
    ring = sum(link.totals.ring_bytes for link in one.links)
    assert ring <= 44.5 * GB
    check(
        one,
        {
            ("all-gather", "fsdp"): GATHERS,
            ("reduce-scatter", "fsdp"): SCATTERS,
            ("all-to-all", "fsdp"): 2 * LOOKUP,
            ("all-reduce", "data"): (SCATTERS + 2 * V * D) / 8,
        },
    )


def test_attention_on_hopper_is_by_our_kernel_without_being_asked_for():
    config = llama("zero3", {"fsdp": 8}, rows=8)
    plan = config.plan.replace(attention=AttentionConfig())
    one = inspected(config.replace(plan=plan))
    assert (one.attention, one.note) == ("mosaic", "")
    assert one.to_json()["kernel_proof"] == "assumed"
    assert "\nkernels: proof assumed; on the GPUs 'auto' takes them once" in describe(one)


def test_a_task_of_ones_own_is_counted_by_its_own_parts(tmp_path):
    """Two plain matmuls under Adam, split over eight: nothing of a language model is assumed."""
    (tmp_path / "own_recipes.py").write_text(OWN_RECIPES)
    target = "--target=h100:1x8"
    words = ("inspect", "own_recipes:task", target, "--plan.mesh=fsdp=8", "--json")
    done = colossax(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wide, rows = 1024 * 4096, 64
    assert (found["recipe"], found["parameters"]) == ("own", 2 * wide)
    assert (found["microbatch"], found["microbatches"]) == (rows // 8, 1)
    terms = found["device_bytes"]["terms"]
    assert terms["parameters"] == pytest.approx(4 * 2 * wide / 8, rel=0.01)
    assert terms["optimizer"] == pytest.approx(2 * 4 * 2 * wide / 8, rel=0.01)
    assert sum(terms.values()) == found["device_bytes"]["total"]
    sent = {(one["kind"], one["axis"]): one["bytes"] for one in found["collectives"]}
    assert sent["reduce-scatter", "fsdp"] == pytest.approx(4 * 2 * wide, rel=0.01)
    assert (found["flops_per_token"], found["attention"]) == (None, None)
    # Forward twice, backward three times: of the rows themselves no gradient is wanted.
    flops = {"flops": 5 * 2 * rows * wide, "left_out": [], "float8_flops": 0}
    assert found["traced_flops"] == flops
    assert found["compute_s"] == pytest.approx(5 * 2 * rows * wide / (8 * 494.7e12))
    told = colossax("inspect", "own_recipes:told", target, cwd=tmp_path)
    assert "\nmodel FLOPs per token: 0.05 G (recomputation not counted)\n" in told.stdout


def test_70b_on_64_devices():
    config = recipe("llama3_70b")
    plan = config.plan.replace(
        mesh={"fsdp": 64},
        rules=preset("zero3").rules,
        batch=BatchConfig(),
        attention=AttentionConfig(kernel="xla"),
    )
    one = inspected(config.replace(plan=plan), "h100:8x8")
    assert one.memory.temp_bytes <= 18 * GIB
    assert sum(link.totals.ring_bytes for link in one.links) <= 409 * GB


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_fits_the_target_it_names(name):
    config = recipe(name)
    one = inspected(config, config.target)
    assert one.fits
    assert sum(one.memory.terms.values()) == one.program.device_bytes
    assert one.memory.terms["unattributed"] <= 0.03 * one.program.device_bytes


def test_host_memory_is_counted_apart():
    """On the concrete mesh of devices that are not there the kind would be dropped in silence."""
    devices = target_devices(parse_target("h100:1x2"))
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))
    on_device = NamedSharding(mesh, PartitionSpec("fsdp"))
    on_host = host_sharding(mesh, PartitionSpec("fsdp"))
    many, few = 2**20, 2**10

    def add(stored, x):
        return jax.device_put(stored, jax.memory.Space.Device)[: x.shape[0]] + x

    program = compile_program(
        jax.jit(add).lower(
            jax.ShapeDtypeStruct((many,), "float32", sharding=on_host),
            jax.ShapeDtypeStruct((few,), "float32", sharding=on_device),
        )
    )
    assert program.host_bytes == 4 * many / 2
    assert program.stats.argument_size_in_bytes == 4 * few / 2


def test_a_step_that_speculates_is_counted_for_one_pass():
    """And what it reads until the end is parameters and optimizer state all the same."""
    config = recipe("llama_stdlib")
    everything = {"parameters": 1.0, "optimizer": 1.0, "activations": 1.0}
    found = {}
    for clipping in ("stack", "speculate"):
        offload = OffloadConfig(**everything, clipping=clipping)
        plan = config.plan.replace(offload=offload, attention=AttentionConfig(kernel="xla"))
        found[clipping] = inspected(config.replace(plan=plan), "h200:1x1")
    for name in ("parameters", "optimizer"):
        sizes = [one.memory.terms[name] for one in found.values()]
        assert sizes[0] == sizes[1] > 0
    assert found["stack"].note == "" and "need not scale its gradients" in found["speculate"].note
    moved = {clipping: one.host_traffic for clipping, one in found.items()}
    ups, downs = ([getattr(m, f"{way}_bytes") for m in moved.values()] for way in ("up", "down"))
    # Gradients that are kept go down and up, and parameters up once more.
    model = config.model
    matrices = model.layers * (4 * model.embed**2 + 3 * model.embed * model.mlp)
    assert (ups[0] - ups[1], downs[0] - downs[1]) == (8 * matrices, 4 * matrices)


@pytest.mark.timeout(900)  # compiles nine programs, on a busy machine in more than five minutes
def test_the_largest_microbatch_is_one_below_what_does_not_fit():
    config = recipe("gpt2_124m")
    target = parse_target("a100_40:1x1")
    lines = []
    most = largest_microbatch(task_of(config), config.plan, target, lines.append)
    verdicts = {int(line.split()[0]): line.endswith("GiB, fits") for line in lines}
    assert verdicts[most]
    assert not verdicts[most + 1]


def colossax(*words, cwd=None):
    command = [sys.executable, "-m", "colossax", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


def test_the_command_line_says_it_in_json_and_in_a_picture(tmp_path: Path):
    picture, hlo = tmp_path / "out.png", tmp_path / "program.txt"
    done = colossax(
        "inspect",
        "llama_tiny",
        "--target=h100:1x8",
        "--json",
        f"--plot={picture}",
        f"--hlo={hlo}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "compiling h100:1x8\n"
    found = json.loads(done.stdout)
    assert {
        "target",
        "fits",
        "device_bytes",
        "host_bytes",
        "collectives",
        "flops_per_token",
        "compile_s",
        "versions",
    } <= set(found)
    assert sum(found["device_bytes"]["terms"].values()) == found["device_bytes"]["total"]
    assert {c["axis"] for c in found["collectives"]} == {"fsdp"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert hlo.read_text().startswith("HloModule")


def test_several_targets_and_presets_are_one_table():
    done = colossax(
        "inspect", "llama_tiny", "--target", "h100:1x1,h100:1x2", "--plan.preset", "zero3,ddp"
    )
    assert done.returncode == 0, done.stderr
    names = {" ".join(line.split()[:2]) for line in done.stdout.splitlines()[1:]}
    assert names == {f"h100:1x{n} {p}" for n in (1, 2) for p in ("zero3", "ddp")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "h999:1x8"], "no GPU is called 'h999'"),
        (["--target", "h100:999x8"], "choose 1 to 1024"),
        (["--target", "h100:1x7"], "dim 'embed:table' has size 128"),
        (["--target", "h100:1x16"], "rows cannot be cut"),
        (["--hlo", "/nowhere/file"], "--hlo /nowhere/file: there is no folder"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words, message):
    done = colossax("inspect", "llama_tiny", *words)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("colossax: ") and message in last
    assert "Traceback" not in done.stderr


def test_the_plugin_is_silent_in_programs_that_do_not_compile_for_gpus():
    program = "import colossax, jax; print(jax.devices()[0].platform)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("cpu\n", "")


def test_float16_sends_as_many_bytes_as_bfloat16():
    """Its scale is known to all devices as the norm is: nothing is sent for it."""
    sent = {}
    for dtype in ("bfloat16", "float16"):
        config = recipe("llama_tiny")
        precision = Precision(compute=dtype)
        config = config.replace(plan=config.plan.replace(mesh={"fsdp": 8}, precision=precision))
        one = inspected(config)
        sent[dtype] = sum(link.totals.ring_bytes for link in one.links)
        assert one.fits
    assert sent["float16"] == sent["bfloat16"] > 0
