"""Where a slot lies in the file, and the buffers that one is read into and written from."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from colossax.errors import OffloadError
from colossax.offload.disk.blocks import CommitBlock
from colossax.offload.disk.file import aligned_buffer
from colossax.offload.disk.layout import BLOCK_BYTES, RecordLayout


@dataclasses.dataclass(frozen=True)
class Places:
    """Bytes at which the parts of a file begin; even epochs lie before odd ones.

    Attributes:
        start: Bytes of the file's own block.
        records: How many.
        commit_bytes: Of one of the two commit areas.
        slot_bytes: Of one record of one epoch, its block included.
    """

    start: int
    records: int
    commit_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, start: int, records: int, tail_bytes: int, layout: RecordLayout) -> "Places":
        """Places for so many records of a layout."""
        return cls(start, records, CommitBlock.room_bytes(tail_bytes), layout.slot_bytes)

    def commit(self, epoch: int) -> int:
        """Where an epoch's commit lies."""
        return self.start + epoch % 2 * self.commit_bytes

    def slot(self, record: int, epoch: int) -> int:
        """Where a record of an epoch lies."""
        index = epoch % 2 * self.records + record
        return self.start + 2 * self.commit_bytes + index * self.slot_bytes

    @property
    def end(self) -> int:
        """Bytes of the file."""
        return self.slot(self.records, 1)


class SlotBuffer:
    """Memory for one slot, and the results that will fill it.

    Attributes:
        slot: uint8[slot_bytes], the record's block first.
        payload: What follows that block.
        arrays: Views into the payload by name.
    """

    def __init__(self, layout: RecordLayout) -> None:
        self.layout = layout
        self.slot = aligned_buffer(layout.slot_bytes)
        self.payload = self.slot[BLOCK_BYTES:]
        self.arrays = layout.views(self.payload)
        self._results: Mapping[str, Any] = {}

    def offer(self, record: int, results: Mapping[str, Any]) -> None:
        """Accept what is to be written; `settle` finishes.

        NumPy arrays may change afterwards: they are copied now. Where all are NumPy's they are
        copied to where they belong; beside JAX arrays they must wait, for those may still be
        computed from what lies there.

        Raises:
            OffloadError: They are not the arrays of the layout.
        """
        self._check(record, results)
        if all(isinstance(result, np.ndarray) for result in results.values()):
            self._place(results)
            return
        self._results = {
            name: result.copy() if self._must_copy(name, result) else result
            for name, result in results.items()
        }

    def settle(self) -> None:
        """Wait for results that are still being computed and put them where they belong."""
        results, self._results = self._results, {}
        self._place({name: np.asarray(result) for name, result in results.items()})

    def drop(self) -> None:
        """Forget results that were not settled."""
        self._results = {}

    def _place(self, results: Mapping[str, np.ndarray]) -> None:
        moved = {n: r for n, r in results.items() if not self._lies_there(n, r)}
        # One that lies elsewhere in this buffer could be overwritten by another before its turn.
        apart = {n: r.copy() if np.may_share_memory(r, self.slot) else r for n, r in moved.items()}
        for name, result in apart.items():
            self.arrays[name][...] = result

    def _must_copy(self, name: str, result: Any) -> bool:
        return isinstance(result, np.ndarray) and not self._lies_there(name, result)

    def _lies_there(self, name: str, result: np.ndarray) -> bool:
        there = self.arrays[name]
        return result is there or (
            result.ctypes.data == there.ctypes.data
            and result.size > 0
            and result.strides == there.strides
        )

    def _check(self, record: int, results: Mapping[str, Any]) -> None:
        wanted = self.layout.arrays
        for name in sorted(wanted.keys() ^ results.keys()):
            what = "lacks" if name in wanted else "has a foreign"
            raise OffloadError(
                f"what was given for record {record} {what} array '{name}'; give exactly the "
                "arrays of the layout"
            )
        for name, spec in wanted.items():
            array = results[name]
            if (tuple(array.shape), np.dtype(array.dtype)) != spec:
                shape, dtype = spec
                raise OffloadError(
                    f"array '{name}' given for record {record} is "
                    f"{np.dtype(array.dtype).name}{list(array.shape)}, the layout says "
                    f"{dtype.name}{list(shape)}; cast or reshape it"
                )
