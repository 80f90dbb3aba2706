"""What forward passes keep for backward while it waits: on the devices, or in host memory."""

import collections
from collections.abc import Sequence
from typing import Any

import jax

from colossax.pipeline import Kind, Table
from colossax.step.programs.chunks import Chunk
from colossax.step.programs.numbered import Numbered

BACK = (Kind.BACKWARD, Kind.INPUT)


def waits_on_host(chunk: Chunk, numbered: Numbered) -> bool:
    """Whether what the layers of a chunk keep goes to host memory.

    Args:
        chunk: Which.
        numbered: All parameters.
    """
    infos = [numbered.infos[at] for at in (*chunk.learning, *chunk.fixed)]
    return any(info.placement.activations_on_host for info in infos)


class Waiting:
    """By chunk and microbatch, what is kept from its forward pass until its backward pass.

    Of what goes to host memory a stage has on its devices that of the backward pass which it runs
    and of the one after, which is fetched while the first runs: what goes back next does not leave.

    Cost: nothing is waited for. What waits crosses the bus once each way.
    """

    def __init__(self, table: Table, on_host: Sequence[bool]):
        """Nothing is kept.

        Args:
            table: Of the chunks' positions.
            on_host: Of each position, whether what it keeps goes to host memory.
        """
        self._on_host = on_host
        self._kept: dict[tuple[int, int], Any] = {}
        of_stage = collections.defaultdict(collections.deque)
        for _, stage, op in table.operations():
            if op.kind in BACK:
                of_stage[stage].append((table.position(stage, op.chunk), op.microbatch))
        self._queues = [of_stage[stage] for stage, _ in table.layout]

    def put(self, position: int, microbatch: int, kept: Any) -> None:
        """Of a forward pass that has been dispatched."""
        key = position, microbatch
        leaves = self._on_host[position] and self._queues[position][0] != key
        self._kept[key] = _moved(kept, "pinned_host") if leaves else kept

    def take(self, position: int, microbatch: int) -> Any:
        """For a backward pass, on the devices; the next one's is on its way there."""
        queue = self._queues[position]
        queue.popleft()
        kept = self._fetched(position, microbatch)
        if queue and queue[0] in self._kept:
            self._kept[queue[0]] = self._fetched(*queue[0])
        return kept

    def kept(self, position: int, microbatch: int) -> Any:
        """Wherever it is."""
        return self._kept[position, microbatch]

    def _fetched(self, position: int, microbatch: int) -> Any:
        kept = self._kept.pop((position, microbatch))
        return _moved(kept, "device") if self._on_host[position] else kept


def _moved(tree: Any, kind: str) -> Any:
    """The same, split over the same devices, in this memory of theirs; shapes stay shapes."""
    leaves, structure = jax.tree.flatten(tree)
    if not all(isinstance(x, jax.Array) for x in leaves):
        return tree
    shardings = [x.sharding.with_memory_kind(kind) for x in leaves]
    return jax.tree.unflatten(structure, jax.device_put(leaves, shardings))
