"""Arrays to save, meshes to save them from, and the processes that do so in the tests."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from colossax.checkpoint import ArraySlot

ROOT = Path(__file__).parents[2]


def mesh_of(**sizes):
    """A mesh over the first devices, axes by name."""
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def content(name, shape, dtype):
    """Values that no other record, place or dtype has; all bit patterns that are not NaN."""
    seed = np.frombuffer(name.encode().ljust(64, b"."), np.uint32)
    bits = np.random.default_rng(seed).integers(0, 2**32, max(1, int(np.prod(shape))), np.uint32)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return bits.astype(dtype)[: int(np.prod(shape))].reshape(shape)
    values = (bits.astype(np.float64) / 2**31 - 1).astype(np.float32).astype(dtype)
    return values[: int(np.prod(shape))].reshape(shape)


def plain(name, shape, dtype="float32"):
    return ArraySlot(name=name, shape=shape, dtype=np.dtype(dtype))


def stack(name, shape, first, layers, dtype="float32"):
    return ArraySlot(name=name, shape=shape, dtype=np.dtype(dtype), first=first, layers=layers)


def value_of(slot):
    """The part of a record's content that a slot holds."""
    whole = content(slot.name, slot.shape, slot.dtype)
    if slot.first is None:
        return whole
    if slot.layers is None:
        return whole[slot.first]
    return whole[slot.first : slot.first + slot.layers]


def put(slots, mesh, specs):
    """The arrays of some slots, sharded."""
    return [
        (slot, jax.device_put(value_of(slot), NamedSharding(mesh, spec)))
        for slot, spec in zip(slots, specs, strict=True)
    ]


def wants(slots, mesh, specs):
    """What to restore, and how sharded."""
    return [(slot, NamedSharding(mesh, spec)) for slot, spec in zip(slots, specs, strict=True)]


def assert_restored(arrays, asked):
    """Bit for bit what the slots say, sharded as asked."""
    for array, (slot, sharding) in zip(arrays, asked, strict=True):
        assert array.sharding == sharding, slot.name
        assert array.dtype == slot.dtype, slot.name
        for shard in array.addressable_shards:
            assert shard.data.shape == sharding.shard_shape(slot.array_shape), slot.name
            want = np.ascontiguousarray(value_of(slot)[shard.index])
            assert np.asarray(shard.data).tobytes() == want.tobytes(), slot.name


MODEL = [
    plain("model/params/embed/table", (96, 32)),
    stack("model/params/layers/attn/q/w", (8, 32, 64), 0, 8),
    stack("model/params/layers/norm/scale", (8, 32), 0, 8, "bfloat16"),
    plain("model/params/norm/scale", (32,), "bfloat16"),
    stack("model/optimizer/0/mu/layers/attn/q/w", (8, 32, 64), 0, 8, "bfloat16"),
    plain("model/optimizer/0/count", (), "int32"),
    plain("model/rng/key", (2,), "uint32"),
]


def rewrite_manifest(directory, step, change, version=2):
    """A step's manifest, changed by one who knows how it is checked.

    `change` takes the body and alters it, or gives another value or text in its place.
    """
    path = directory / str(step) / "arrays/manifest.json"
    body = json.loads(json.loads(path.read_text())["body"])
    body = change(body) or body
    text = body if isinstance(body, str) else json.dumps(body)
    outer = {"version": version, "crc32": zlib.crc32(text.encode()), "body": text}
    path.write_text(json.dumps(outer))


def as_version_1(directory, step):
    """Rewrite a step's manifest as version 1 had it; nothing else in a step has changed since."""

    def older(body):
        records = {
            name: {key: spec[key] for key in ("shape", "dtype", "layered", "format")}
            for name, spec in body["records"].items()
        }
        return {"records": records, "documents": body["documents"]}

    rewrite_manifest(directory, step, older, version=1)


def layouts():
    """Three meshes of very different kinds, each with specs for `MODEL`."""
    none = P()
    return {
        "fsdp8": (
            mesh_of(x=8),
            [P("x"), P(None, "x"), P(None, "x"), P("x"), P(None, "x"), none, none],
        ),
        "fsdp4_tensor2": (
            mesh_of(x=4, y=2),
            [P("y", "x"), P(None, "x", "y"), none, none, P("x", None, "y"), none, none],
        ),
        "one": (mesh_of(x=1), [none] * 7),
    }


def start_child(what, *arguments):
    """Run a function of `children` in a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "tests.checkpoint.children", what, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_children(*children, timeout=120):
    """Their outputs, when all ended well; none is left running."""
    try:
        ended = [child.communicate(timeout=timeout) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (out, err) in zip(children, ended, strict=True):
        assert child.returncode == 0, f"{out}\n{err}"
    return [out for out, _ in ended]
