"""Shared memory that one warpgroup fills while others read it, a few steps ahead of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .ops import Ops


@dataclasses.dataclass(frozen=True)
class Stages:
    """Step `i` of a loop uses stage `i % count`; both sides number their steps alike.

    One warpgroup calls `fill` for every step, then `drain`. Each reader calls `open` if stages are
    `opened`, and for every step `arrived`, then `leave`.

    Attributes:
        ops: Of the kernel.
        arrays: Shared memory by names, the stage its first dim; whatever else is there too.
        barriers: As `stage_barriers` describes them, in the kernel.
        count: How many there are.
        opened: Whether readers say at the start that all stages are free, so that every step that
            is filled waits for them. Else the first `count` do not wait, and the compiler may take
            these out of the loop.
        first: The first of them, where several rings lie behind one another in `arrays` and
            `barriers`.
    """

    ops: Ops
    arrays: Mapping[str, Any]
    barriers: Any
    count: int
    opened: bool = False
    first: Any = 0

    def open(self) -> None:
        """Every reader of `opened` stages says so first: all are free."""
        for slot in range(self.count):
            plgpu.barrier_arrive(self._barrier("left", self.first + slot))

    def fill(self, step: Any, sources: Mapping[str, Any]) -> None:
        """Start copies from global to shared memory when all readers have left the stage.

        Args:
            step: Which.
            sources: By the names of `arrays`; several for one are each part's where its second dim
                is one of parts, else each for some of its rows, one behind the other.
        """
        slot = self._free(step)
        filled = self._barrier("filled", slot)
        for name, source in sources.items():
            array = self.arrays[name]
            if isinstance(source, Sequence):
                for part, one in enumerate(source):
                    rows = one.shape[0]
                    apart = len(array.shape) > len(one.shape) + 1
                    place = part if apart else pl.ds(part * rows, rows)
                    self.ops.copy_in(one, array.at[slot, place], filled)
            else:
                self.ops.copy_in(source, array.at[slot], filled)

    def arrived(self, step: Any) -> Any:
        """Wait for the copies of a step; its stage."""
        slot = self._slot(step)
        plgpu.barrier_wait(self._barrier("filled", slot))
        return slot

    def leave(self, step: Any) -> None:
        """Say that one reader has read all it needs of a step."""
        plgpu.barrier_arrive(self._barrier("left", self._slot(step)))

    def drain(self, steps: Any) -> None:
        """After `steps` steps were filled: wait until the readers have left them all.

        Whoever waits for a barrier observes all its phases: the interpreter wants it so.
        """
        for ahead in range(self.count):
            self._free(steps + ahead)

    def _free(self, step: Any) -> Any:
        """Wait until all readers have left the stage that a step is to use; that stage."""
        slot = self._slot(step)

        def wait() -> None:
            plgpu.barrier_wait(self._barrier("left", slot))

        if self.opened:
            wait()
        else:
            pl.when(step >= self.count)(wait)
        return slot

    def _slot(self, step: Any) -> Any:
        """Which stage a step uses."""
        return self.first + jax.lax.rem(step, jnp.int32(self.count))

    def _barrier(self, name: str, slot: Any) -> Any:
        """One of several barriers, or the only one, which has no index."""
        barrier = self.barriers[name]
        alone = self.count == 1 and isinstance(self.first, int)
        return barrier if alone else barrier.at[slot]


def stage_barriers(count: int, *, copies: int, readers: int) -> dict[str, Any]:
    """Barriers of `count` stages, each filled by `copies` copies for `readers` warpgroups."""
    return {
        "filled": plgpu.Barrier(num_arrivals=copies, num_barriers=count),
        "left": plgpu.Barrier(num_arrivals=readers, num_barriers=count),
    }
