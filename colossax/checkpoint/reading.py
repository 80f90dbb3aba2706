"""Restoring: every device gets its own region, read from disk, and nothing more."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from colossax.checkpoint import store
from colossax.checkpoint.folder import StepFolder
from colossax.checkpoint.manifest import RecordSpec, describe
from colossax.checkpoint.slots import ArraySlot, Box, box_shape
from colossax.errors import CheckpointError

READ_BYTES = 256 << 20
"""Bytes being read at once; a single region may be larger."""

Want = tuple[ArraySlot, jax.sharding.Sharding]


def check_same_model(
    folder: StepFolder,
    slots: Sequence[ArraySlot],
    *,
    exact: bool,
    convert: bool,
    whole: Sequence[str] = (),
) -> None:
    """Compare what is wanted with what a step holds.

    Args:
        folder: The step.
        slots: What is wanted.
        exact: Refuse records of the same `<model>/<kind>` that are not wanted.
        convert: Allow another dtype, of floats.
        whole: Kinds, `<model>/<kind>`, of which `exact` refuses records where none is wanted, too.

    Raises:
        CheckpointError: They differ; names the first record that does.
    """
    records = folder.manifest.records
    for slot in slots:
        if (spec := records.get(slot.name)) is None:
            raise _other_model(folder, slot.name, f"it has no '{slot.name}'")
        wanted = RecordSpec(shape=slot.shape, dtype=slot.dtype, layered=slot.layered)
        if (spec.shape, spec.layered) != (wanted.shape, wanted.layered):
            kind = "" if spec.layered == wanted.layered else " (one of them a layer stack)"
            raise _other_model(
                folder,
                slot.name,
                f"'{slot.name}' is {describe(spec)} there and {describe(wanted)} here{kind}",
            )
        if spec.dtype != wanted.dtype and convert and not _both_float(spec.dtype, wanted.dtype):
            raise CheckpointError(
                f"{folder} holds '{slot.name}' as {spec.dtype.name}, not {wanted.dtype.name}, and"
                " only floats are converted to each other; use a model that keeps it as"
                f" {spec.dtype.name}"
            )
        if spec.dtype != wanted.dtype and not convert:
            raise CheckpointError(
                f"{folder} holds '{slot.name}' as {spec.dtype.name}, not {wanted.dtype.name}; ask "
                "for a conversion or use the precision it was saved in"
            )
    if exact:
        wanted_names = {slot.name for slot in slots}
        kinds = {_kind(name) for name in wanted_names} | set(whole)
        for name in records:
            if _kind(name) in kinds and name not in wanted_names:
                raise _other_model(
                    folder, name, f"it has '{name}', which this {_what(name)} has not"
                )


def _both_float(*dtypes: np.dtype) -> bool:
    return all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)


def _other_model(folder: StepFolder, name: str, difference: str) -> CheckpointError:
    what = _what(name)
    return CheckpointError(f"{folder} is of another {what}: {difference}; use {_REMEDIES[what]}")


_REMEDIES = {"model": "the model config stored in it", "optimizer": "the one it was saved with"}


def _what(name: str) -> str:
    return "optimizer" if _kind(name).endswith("/optimizer") else "model"


def _kind(name: str) -> str:
    return "/".join(name.split("/")[:2])


def read_arrays(folder: StepFolder, wants: Sequence[Want]) -> list[jax.Array]:
    """Read arrays onto their devices.

    Cost: each process reads each distinct region of its devices once, in blocks, holding
    `READ_BYTES` or one region on the host at a time.

    Raises:
        CheckpointError: Something on disk is missing or damaged.
    """
    placed: list[dict[jax.Device, jax.Array]] = [{} for _ in wants]
    flight = store.InFlight(READ_BYTES)
    handles: dict[str, Any] = {}
    try:
        for (slot, sharding), shards in zip(wants, placed, strict=True):
            if slot.name not in handles:
                handles[slot.name] = folder.open_record(slot.name)
            for box, devices in _regions(slot, sharding).items():
                folder.check_files(slot.name, box)
                place = functools.partial(_place, folder, slot, sharding, devices, shards)
                flight.add(
                    store.array_bytes(box_shape(box), slot.dtype),
                    functools.partial(store.start_read, handles[slot.name], box),
                    place,
                )
        flight.finish()
    finally:
        flight.abandon()
    return [_assemble(*want, shards) for want, shards in zip(wants, placed, strict=True)]


def _regions(slot: ArraySlot, sharding: jax.sharding.Sharding) -> dict[Box, list[jax.Device]]:
    """Regions that this process needs, with the devices that get each."""
    regions: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(slot.array_shape).items():
        regions.setdefault(slot.box(index), []).append(device)
    return regions


def _place(
    folder: StepFolder,
    slot: ArraySlot,
    sharding: jax.sharding.Sharding,
    devices: list[jax.Device],
    shards: dict[jax.Device, jax.Array],
    future: Any,
) -> None:
    """Put what was read on its devices, and wait, so that the host's copy can go."""
    try:
        host: np.ndarray = future.result()
    except (OSError, ValueError) as error:
        raise folder.damaged(f"record '{slot.name}'", error) from error
    host = host.reshape(sharding.shard_shape(slot.array_shape)).astype(slot.dtype, copy=False)
    for device in devices:
        target = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards[device] = jax.device_put(host, target)
    jax.block_until_ready([shards[device] for device in devices])


def _assemble(
    slot: ArraySlot, sharding: jax.sharding.Sharding, shards: dict[jax.Device, jax.Array]
) -> jax.Array:
    devices = sharding.addressable_devices_indices_map(slot.array_shape)
    return jax.make_array_from_single_device_arrays(
        slot.array_shape, sharding, [shards[device] for device in devices], dtype=slot.dtype
    )
