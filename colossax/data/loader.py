"""Batches for the devices of one process, made ahead by Grain's threads."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import jax
import numpy as np
from jax.sharding import Sharding

from colossax.data.corpus import Split
from colossax.data.rows import Rows, RowSource, WholeDocuments, stack_rows

LocalBatch = dict[str, np.ndarray]
"""Arrays `[len(wanted), seq_len]`: the rows of a global batch that a process needs."""

_VALIDATION_SEED = 0


class BatchLoader:
    """Endless batches: batch g is the wanted ones of rows `[g B, (g + 1) B)`.

    What it gives depends on rows, B, `wanted` and g alone, never on threads or on where it began.

    Args:
        rows: Rows by number.
        global_batch: Rows of a batch over all processes, B.
        wanted: Rows to make, as numbers within the batch; see `wanted_rows`. None: all.
        start: First batch.
        threads: Threads that make batches ahead; 0 makes each when it is asked for, without Grain.
        prefetch: Batches made ahead at most.

    Raises:
        ValueError: `start` is negative, or `wanted` is empty or leaves the batch.
    """

    def __init__(
        self,
        rows: RowSource,
        global_batch: int,
        *,
        wanted: Sequence[int] | None = None,
        start: int = 0,
        threads: int = 2,
        prefetch: int = 4,
    ):
        if start < 0:
            raise ValueError(f"start: found {start}; batches are counted from 0")
        wanted = range(global_batch) if wanted is None else wanted
        self._batches = _Batches(rows, global_batch, wanted, first=start)
        self._position = start
        self._ahead = _read_ahead(self._batches, threads, prefetch) if threads else None

    @property
    def position(self) -> int:
        """The next batch to be handed out; those made ahead do not count."""
        return self._position

    def __iter__(self) -> Iterator[LocalBatch]:
        return self

    def __next__(self) -> LocalBatch:
        batch = next(self._ahead) if self._ahead else self._batches.at(self._position)
        self._position += 1
        return batch

    def close(self) -> None:
        """Stop the threads; no batch can be asked for afterwards."""
        if self._ahead:
            self._ahead.close()

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Batches:
    """Local batches by number from `first` on, as Grain wants its sources."""

    def __init__(self, rows: RowSource, global_batch: int, wanted: Sequence[int], *, first: int):
        outside = [row for row in wanted if not 0 <= row < global_batch]
        if outside or not wanted:
            raise ValueError(
                f"wanted: found {outside or 'no rows'}; name rows of a batch of {global_batch}"
            )
        self._rows = rows
        self._global_batch = global_batch
        self._wanted = tuple(wanted)
        self._first = first

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> LocalBatch:
        return self.at(self._first + index)

    def at(self, batch: int) -> LocalBatch:
        """Global batch number `batch`."""
        start = batch * self._global_batch
        return stack_rows(self._rows, [start + row for row in self._wanted])


def _read_ahead(batches: _Batches, threads: int, prefetch: int):
    # Grain takes most of a second to import, and bare JAX installations lack it.
    import grain

    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, prefetch))
    return iter(grain.MapDataset.source(batches).to_iter_dataset(options))


class ValidationBatches:
    """A fixed number of held-out batches, the same for any run seed and process count.

    Every held-out token counts at most once: there are no more batches than the split fills, and
    where the last one begins the split again its weights are 0.

    Args:
        split: Held-out documents.
        seq_len: Tokens per row.
        global_batch: Rows of a batch over all processes.
        wanted: Rows this process needs, as numbers within the batch.
        batches: Batches at most.
        whole: Whether a row is one document; see `WholeDocuments`.
        view: What is made of the rows, for a seed, as `MaskedRows` does; None: they stay.
    """

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        global_batch: int,
        wanted: Sequence[int],
        batches: int,
        whole: bool = False,
        view: Callable[[RowSource, int], RowSource] | None = None,
    ):
        make = WholeDocuments if whole else Rows
        rows: RowSource = make(split, seq_len=seq_len, seed=_VALIDATION_SEED, epochs=1)
        rows = rows if view is None else view(rows, _VALIDATION_SEED)
        self._batches = _Batches(rows, global_batch, wanted, first=0)
        there_are = split.document_count if whole else -(-split.token_count // seq_len)
        self._count = min(batches, -(-there_are // global_batch))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[LocalBatch]:
        return (self._batches.at(batch) for batch in range(self._count))


def wanted_rows(sharding: Sharding, global_shape: tuple[int, ...]) -> list[int]:
    """Rows (dim 0) of an array that the devices of this process hold, in ascending order."""
    regions = sharding.addressable_devices_indices_map(global_shape).values()
    spans = {region[0].indices(global_shape[0]) for region in regions if region is not None}
    return sorted({row for span in spans for row in range(*span)})


def global_arrays(
    local: LocalBatch,
    wanted: Sequence[int],
    shardings: Mapping[str, Sharding],
    global_batch: int,
) -> dict[str, jax.Array]:
    """The global batch as device arrays `[global_batch, ...]`, from the rows of this process.

    Args:
        local: Arrays `[len(wanted), ...]`.
        wanted: Row of the global batch that each local row is.
        shardings: Sharding of each name in `local`.
        global_batch: Rows over all processes.

    Raises:
        ValueError: A device of this process holds a row that is not wanted.

    Cost: copies the local rows once per device that holds them; nothing between processes.
    """
    place = _places(tuple(wanted), global_batch)
    return {
        name: _global_array(name, value, global_batch, place, shardings[name])
        for name, value in local.items()
    }


@functools.lru_cache(maxsize=8)
def _places(wanted: tuple[int, ...], global_batch: int) -> np.ndarray | None:
    """For each row of the global batch its place in a local one, or -1; None: the same place."""
    if wanted == tuple(range(global_batch)):
        return None
    place = np.full(global_batch, -1)
    place[np.asarray(wanted)] = np.arange(len(wanted))
    return place


def _global_array(
    name: str, value: np.ndarray, rows: int, place: np.ndarray | None, sharding: Sharding
) -> jax.Array:
    def region(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "every device holds a region of an array with dims"
        if place is None:
            return value[index]
        local_rows = place[index[0]]
        if (local_rows < 0).any():
            raise ValueError(
                f"{name}: a device here holds rows that were not made; see wanted_rows"
            )
        return value[(local_rows, *index[1:])]

    return jax.make_array_from_callback((rows, *value.shape[1:]), sharding, region)
