"""Pages of an engine that leave the devices for host memory, and come back."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from colossax.config import RING_AXES
from colossax.errors import InputError, PlanError
from colossax.inference.engine.batch import EngineState
from colossax.offload import gb_down, gb_up, host_budget, to_device
from colossax.scheduling import StepPlan
from colossax.sharding import host_sharding, replicated

WIDTH = 4
"""Pages that are copied at once; where fewer are left the rest is padding, and copied in vain."""

STAGES_KEEP_NONE = (
    "host_pages: stages keep their pages on their devices; leave it out, or give the devices of"
    " 'stage' to 'tensor' or 'fsdp'"
)


class HostPages:
    """Copies of pages in host memory: all that the model and its drafter keep of their tokens.

    Devices copy what they hold of a page, so an array's layout is the same in host memory, but for
    the pages that a ring's devices share: of those each has a copy.

    Attributes:
        page_bytes: Of a copy, in the memory of this process's host.

    Cost: a program each way, of `WIDTH` pages. A page is copied once when it goes out and once when
    it comes back, each array by itself, before the step that needs it; the step waits.
    """

    def __init__(self, program: Any, *, reuse: bool = True):
        """Hold none; nothing is compiled yet.

        Args:
            program: An `EngineProgram`, of whose `sizes` `host` pages are held at most.
            reuse: Whether prompts that begin alike share pages.

        Raises:
            InputError: No page can serve a later request, see `check_hosted`.
            PlanError: The host has no memory for so many.
        """
        self._program, self._places = program, program.sizes.host
        self._held: dict[int, list[Array]] = {}
        self.page_bytes = 0
        if not self._places:
            return
        check_hosted(program, reuse=reuse)
        drafter, mesh = program.drafter, program.bound.mesh
        asked = jax.tree.leaves((program.cache.abstract, drafter and drafter.abstract))
        rows = {x.shape[1] for x in asked}
        assert len(rows) == 1, "all that is kept of tokens lies in pages"
        (self._rows,) = rows
        self._asked, self._page = asked, [_in_host(mesh, x) for x in asked]
        of_each = sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in self._page
        )
        self.page_bytes = of_each * len(mesh.local_devices)
        _check_room(mesh, self._places, of_each)
        where = [x.sharding for x in self._page]
        # Functions of its own: JAX counts programs by function, those of all engines together.
        out, back = functools.partial(taken), functools.partial(put)
        self._out = jax.jit(out, out_shardings=[where] * WIDTH)
        self._back = jax.jit(back, donate_argnums=0, out_shardings=[x.sharding for x in asked])

    @property
    def compiled(self) -> dict[str, int]:
        """How many programs there are by now, by direction."""
        programs: dict[str, Any] = {"out": self._out, "back": self._back} if self._places else {}
        return {name: jitted._cache_size() for name, jitted in programs.items()}

    def warm(self, state: Any) -> Any:
        """Compile both directions by copies of nothing; `state`, see `moved`, is given up."""
        if not self._places:
            return state
        held, tree = jax.tree.flatten((state.cache, state.drafter))
        pages = self._out(held, self._numbers([], 0))
        held = self._back(held, pages, self._numbers([], self._rows))
        return _with(state, jax.tree.unflatten(tree, held))

    def moved(self, state: Any, plan: StepPlan) -> Any:
        """The state with what a plan asks for: copies that go out, and then those that come back.

        Args:
            state: An `EngineState`, which is given up; what steps on their way write is copied.
                That of stages, which have no pages here, is given back.
            plan: The step that is to follow.
        """
        if not plan.out and not plan.back:
            return state
        held, tree = jax.tree.flatten((state.cache, state.drafter))
        for some in _in_widths(plan.out):
            pages = self._out(held, self._numbers([page for page, _ in some], 0))
            self._held |= {place: one for (_, place), one in zip(some, pages, strict=False)}
        for some in _in_widths(plan.back):
            pages = [self._held.pop(place) for place, _ in some]
            pages += pages[:1] * (WIDTH - len(pages))
            held = self._back(held, pages, self._numbers([page for _, page in some], self._rows))
        return _with(state, jax.tree.unflatten(tree, held))

    def lowered(self) -> tuple[Any, Any]:
        """Both directions, traced and not compiled."""
        here, held = replicated(self._program.bound), self._asked
        rows = jax.ShapeDtypeStruct((WIDTH,), np.int32, sharding=here)
        return self._out.lower(held, rows), self._back.lower(held, [self._page] * WIDTH, rows)

    def _numbers(self, pages: Sequence[int], padding: int) -> Any:
        """Rows of the cache that hold these pages, on the devices, and padding up to the width."""
        page, shares = np.asarray(pages, np.int32), self._program.bound.size(RING_AXES)
        numbers = np.full(WIDTH, padding, np.int32)
        numbers[: len(page)] = page % shares * (self._rows // shares) + page // shares
        return self._program.placed(numbers)


def taken(held: list[Array], rows: Int[Array, " w"]) -> list[list[Array]]:
    """Some pages of all arrays `[l, pages, ...]`, page by page; pure."""
    found = [x.at[:, rows].get(mode="clip") for x in held]
    return [[x[:, i] for x in found] for i in range(rows.size)]


def put(held: list[Array], pages: list[list[Array]], rows: Int[Array, " w"]) -> list[Array]:
    """The arrays with pages from host memory; those whose row is out of range go nowhere; pure."""
    of_arrays = zip(*pages, strict=True)
    return [
        x.at[:, rows].set(jnp.stack([to_device(one) for one in new], axis=1), mode="drop")
        for x, new in zip(held, of_arrays, strict=True)
    ]


def check_hosted(program: Any, *, reuse: bool) -> None:
    """Refuse engines whose pages serve no later request.

    Raises:
        InputError: Saying why.
    """
    asked = f"host_pages: found {program.sizes.host}, and"
    if not reuse:
        raise InputError(
            f"{asked} prompts that begin alike share no pages, so none is looked for; leave it"
            " out, or let them share"
        )
    if program.rings:
        raise InputError(
            f"{asked} with window_rings no page serves a later request; leave out one of them"
        )
    if not program.shares:
        raise InputError(
            f"{asked} what the model keeps of a token is not the same for all that begin alike, so"
            " no page serves a later request; leave it out"
        )


def _check_room(mesh: Any, places: int, page_bytes: int) -> None:
    """Refuse more pages than the host has memory for.

    Raises:
        PlanError: It has less.
    """
    devices = list(mesh.devices.flat)
    if len(mesh.local_devices) < len(devices):  # how many processes share a host is not known
        return
    free = host_budget(None, devices, None)
    if places * page_bytes > free:
        raise PlanError(
            f"host_pages: found {places}, which are {gb_up(places * page_bytes)} GB of host memory"
            f" for each device, and {gb_down(free)} GB may be used; give"
            f" {free // page_bytes} or fewer"
        )


def _with(state: EngineState, paged: tuple[Any, Any]) -> EngineState:
    cache, drafter = paged
    return dataclasses.replace(state, cache=cache, drafter=drafter)


def _in_host(mesh: Mesh, x: Any) -> jax.ShapeDtypeStruct:
    """A page of an array, as it lies in host memory."""
    spec = [*x.sharding.spec, None, None][: max(2, len(x.sharding.spec))]
    there = host_sharding(mesh, PartitionSpec(spec[0], *spec[2:]))
    return jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype, sharding=there)


def _in_widths(moves: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    return [moves[i : i + WIDTH] for i in range(0, len(moves), WIDTH)]
