"""What one process writes for one save."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from colossax.checkpoint import store
from colossax.checkpoint.folder import TREE_FILE
from colossax.checkpoint.layout import RecordPlan, Tile, files_within, plan_records
from colossax.checkpoint.manifest import RecordSpec
from colossax.checkpoint.seals import Place, grid_of, places_in
from colossax.checkpoint.slots import (
    ArraySlot,
    Box,
    LayerSource,
    box_shape,
    box_slices,
    intersect,
    record_folder,
)

WRITE_BYTES = 128 << 20
"""Bytes being written at once."""


@runtime_checkable
class Job(Protocol):
    """Fills the folder that holds all records of a step.

    Attributes:
        records: What the step will hold, over all processes.
    """

    records: Mapping[str, RecordSpec]

    def write(self, folder: Path) -> None:
        """Write this process's part.

        Raises:
            OSError, ValueError: It cannot be written.
        """

    def places(self) -> Mapping[str, Sequence[Place]]:
        """Places of the files that this process writes, by record."""
        ...


class ArraysJob:
    """Writes the parts of some arrays that this process owns.

    Device memory is only read, shard by shard: nothing is gathered, cut or copied there.

    Attributes:
        records: What the arrays make up.
        plans: How it is cut into files.
    """

    def __init__(
        self, arrays: Sequence[tuple[ArraySlot, jax.Array | LayerSource]], *, copy_now: bool = False
    ) -> None:
        """Plan the save.

        Args:
            arrays: With their slots; the same on every process, in the same order.
            copy_now: Copy what this process owns to the host now, so that the arrays may be
                donated; rows are read when they are written all the same. Costs that many bytes of
                host memory until they are written; else `WRITE_BYTES` and one shard.

        Raises:
            ValueError: An array is not what its slot says, or a record is not whole.
        """
        for slot, array in arrays:
            if (tuple(array.shape), array.dtype) != (slot.array_shape, slot.dtype):
                raise ValueError(
                    f"{slot.name}: the array is {array.dtype}{list(array.shape)}, its slot "
                    f"{slot.dtype}{list(slot.array_shape)}"
                )
        self.plans = plan_records([(slot, array.sharding) for slot, array in arrays])
        self.records = {
            plan.name: RecordSpec(
                shape=plan.shape,
                dtype=plan.dtype,
                layered=plan.layered,
                experts=plan.experts,
                layout=plan.layout,
            )
            for plan in self.plans
        }
        self._process = jax.process_index()
        self._arrays: dict[int, tuple[ArraySlot, jax.Array]] = {}
        self._sources: dict[int, tuple[ArraySlot, LayerSource]] = {}
        for number, (slot, array) in enumerate(arrays):
            if isinstance(array, LayerSource):
                self._sources[number] = slot, array
            else:
                self._arrays[number] = slot, array
        self._copies: dict[tuple[int, Box], np.ndarray] = {}
        if copy_now:
            for plan in self.plans:
                for tile in self._owned(plan):
                    if tile.array in self._arrays:
                        self._fetch(tile)
            self._arrays = {}

    def _owned(self, plan: RecordPlan) -> Iterator[Tile]:
        return (tile for tile in plan.tiles if tile.owner == self._process)

    def _fetch(self, tile: Tile) -> list[tuple[Box, np.ndarray]]:
        """Host copies of a tile's parts, each with dim 0 where its record has it."""
        if not all((tile.array, part) in self._copies for part in tile.parts):
            slot, array = self._arrays[tile.array]
            shards = {slot.box(shard.index): shard.data for shard in array.addressable_shards}
            handles = [second_handle(shards[part]) for part in tile.parts]
            for handle in handles:
                handle.copy_to_host_async()
            for part, handle in zip(tile.parts, handles, strict=True):
                self._copies[tile.array, part] = host_copy(handle).reshape(box_shape(part))
        return [(part, self._copies[tile.array, part]) for part in tile.parts]

    def write(self, folder: Path) -> None:
        """Write the files this process owns; see `Job`."""
        flight = store.InFlight(WRITE_BYTES)
        try:
            for plan in self.plans:
                self._write_record(plan, folder, flight)
            if self._process == 0:
                write_orbax_trees(folder, self.records)
            flight.finish()
        finally:
            flight.abandon()

    def places(self) -> Mapping[str, Sequence[Place]]:
        """Those of the tiles that this process owns; see `Job`."""
        return {
            plan.name: [
                place
                for tile in self._owned(plan)
                for place in places_in(tile.box, plan.layout.file)
            ]
            for plan in self.plans
        }

    def _write_record(self, plan: RecordPlan, folder: Path, flight: store.InFlight) -> None:
        tiles = list(self._owned(plan))
        if not tiles and self._process:
            return
        handle = store.open_for_writing(
            folder / record_folder(plan.name),
            plan.shape,
            plan.dtype,
            plan.layout,
            create=self._process == 0,
        )
        for tile in tiles:
            source = self._sources.get(tile.array)
            parts = [] if source else self._fetch(tile)
            for box in files_within(tile.box, plan.layout.file):
                data = source[1].content(source[0], box) if source else _file_content(box, parts)
                flight.add(data.nbytes, functools.partial(store.start_write, handle, box, data))
            for part in tile.parts:
                self._copies.pop((tile.array, part), None)


class MoveJob:
    """Takes over records that were written elsewhere on the same file system.

    Attributes:
        records: What they are.
    """

    def __init__(self, staging: Path, records: Mapping[str, RecordSpec]) -> None:
        self.records = records
        self._staging = staging

    def write(self, folder: Path) -> None:
        """Move everything; see `Job`."""
        for entry in sorted(self._staging.iterdir()):
            entry.rename(folder / entry.name)
        write_orbax_trees(folder, self.records)

    def places(self) -> Mapping[str, Sequence[Place]]:
        """All there are; see `Job`."""
        return {
            name: list(itertools.product(*map(range, grid_of(spec.shape, spec.layout.file))))
            for name, spec in self.records.items()
            if spec.layout is not None
        }


def second_handle(shard: jax.Array) -> jax.Array:
    """Another handle on the same buffer of one device.

    JAX keeps what it copies to the host with the handle; here it goes when the handle does.
    """
    return jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])


def host_copy(shard: jax.Array) -> np.ndarray:
    """A copy in host memory of an array on one device, which may then be donated."""
    host = np.asarray(shard)
    (device,) = shard.devices()
    on_host = device.platform == "cpu" or "host" in (shard.sharding.memory_kind or "")
    return host.copy() if on_host else host


def _file_content(box: Box, parts: Sequence[tuple[Box, np.ndarray]]) -> np.ndarray:
    """A file's array: a view of the part it lies in, or put together from several."""
    if len(parts) == 1:
        part, data = parts[0]
        return data if part == box else data[box_slices(box, part)]
    content = np.empty(box_shape(box), parts[0][1].dtype)
    for part, data in parts:
        if (common := intersect(box, part)) is not None:
            content[box_slices(common, box)] = data[box_slices(common, part)]
    return content


def write_orbax_trees(folder: Path, records: Mapping[str, RecordSpec]) -> None:
    """Make each `<model>/<kind>` readable to Orbax alone."""
    trees: dict[Path, list[tuple[str, ...]]] = {}
    for name in records:
        model, kind, *path = name.split("/")
        trees.setdefault(folder / model / kind, []).append(tuple(path))
    for tree, paths in trees.items():
        tree.mkdir(parents=True, exist_ok=True)
        store.write_durably(tree / TREE_FILE, store.orbax_tree(paths))
