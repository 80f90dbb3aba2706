"""An engine: requests in, tokens out, all by one compiled step of flat tokens."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from colossax.config import BoundPlan
from colossax.errors import InputError
from colossax.inference.engine.drafting import Drafter
from colossax.inference.engine.driving import Over, to_their_ends
from colossax.inference.engine.hosting import HostPages
from colossax.inference.engine.keeping import check_keep
from colossax.inference.engine.naming import check_adapter, named
from colossax.inference.engine.packing import Packer
from colossax.inference.engine.parts import check_served
from colossax.inference.engine.program import EngineProgram
from colossax.inference.engine.sampling import Chosen
from colossax.inference.engine.scoring import Probabilities
from colossax.inference.engine.sizing import (
    MIXED_TOKENS,
    PAGE_TOKENS,
    SEATS,
    asked_sizes,
    pages_for,
)
from colossax.inference.engine.values import (
    CONFINED,
    NOT_SOUND,
    Constraint,
    EngineStats,
    check_waits,
)
from colossax.nn import ModelSpec
from colossax.scheduling import Emitted, EngineRequest, Scheduler, StepPlan
from colossax.typing import Params

DEPTH = 2
"""Steps on their way at once: the devices work on one while the host prepares the next."""


class Engine:
    """Many requests at once, each as if it were alone.

    Every step is a call on a fixed number of tokens: chunks of prompts and single next tokens of
    all seats. Keys and values lie in pages; prompts that begin alike share them. Tokens are those
    of `Generator`: a draw depends on seed and position, and on nobody else in the step. A source,
    sound or images are read when their request has a seat, and again if it had to leave it.

    It belongs to one thread. Nothing is compiled after `warm`, but for sounds that are shorter than
    the longest and images of another size than the model's own: each of those once.

    Attributes:
        began: Is told which requests got a seat, just before the step that begins them; one that
            lost its pages is told of again.

    Cost: weights are read once a step for all seats. Memory: `pages`, and of each seat its tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        bound: BoundPlan,
        params: Params,
        *,
        seats: int = SEATS,
        slots: int | None = None,
        pages: int | None = None,
        page_tokens: int = PAGE_TOKENS,
        mixed_tokens: int = MIXED_TOKENS,
        cache_format: str = "own",
        window_rings: bool = False,
        keeps: str | None = None,
        host_pages: int = 0,
        reuse: bool = True,
        deterministic: bool = False,
        drafter: Drafter | None = None,
        max_wait_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        adapters: Sequence[str] = (),
    ):
        """Prepare the steps; nothing is compiled yet.

        Args:
            spec: The model, as `describe` gave it under `bound`.
            bound: Where the parameters live. Layers that are not stacked (`unrolled`) are read
                where they lie; a stack's are copied first.
            params: Laid out by `bound`; kept.
            seats: Sequences at once.
            slots: Longest prompt and continuation together; default the model's `max_seq`.
            pages: Of the cache; default as many as the devices have room for, at most what all
                seats could fill.
            page_tokens: Tokens of a page.
            mixed_tokens: Tokens of a step with prompts; raised to one for each seat.
            cache_format: What pages are kept in: `own`, as `precision.cache` says, or codes of
                eight bits, `int8` or `fp8`, with a scale for each token and kv head.
            window_rings: Whether layers with a window or chunks keep no more than a window and a
                step of each seat; then no prompts share pages.
            keeps: What requests may keep of their tokens beside a window (`Keep`): `first`, or
                `heavy`, those that were looked at most; None: they keep all.
            host_pages: Of prefixes whose pages were needed for something else, kept in host memory.
            reuse: Whether prompts that begin alike share pages.
            deterministic: Whether all steps are of one size, so that a request's logits are the
                same bit by bit whoever else is there; else they differ in rounding.
            drafter: Who guesses tokens ahead, of which a step looks at several. It changes no
                token, but how many steps they take.
            max_wait_s: A request that has waited so long is passed by no other.
            clock: Seconds, of deadlines and waiting.
            adapters: Names of those that the model has side by side.

        Raises:
            InputError: The model cannot decode, a size is none, pages cannot be kept so, rings are
                asked for and no layer has use for one, nothing can be drafted, or `keeps`, and the
                model cannot; or pages serve no later request, and some are to be kept on the host.
            PlanError: Layers are in stages, or the host has no room for its pages.
        """
        check_served(spec, bound)
        sizes = asked_sizes(
            spec,
            seats=seats,
            slots=slots,
            pages=pages,
            page_tokens=page_tokens,
            mixed_tokens=mixed_tokens,
            draft=0 if drafter is None else drafter.tokens,
            cache_format=cache_format,
            window_rings=window_rings,
            keeps=keeps,
            host_pages=host_pages,
        )
        if pages is None:
            pages = pages_for(spec, bound, params, sizes, drafter=drafter)
            sizes = dataclasses.replace(sizes, pages=pages)
        self._start(
            EngineProgram(spec, bound, sizes, drafter),
            params,
            reuse=reuse,
            deterministic=deterministic,
            max_wait_s=max_wait_s,
            clock=clock,
            adapters=adapters,
        )

    @classmethod
    def of(
        cls,
        program: EngineProgram,
        params: Params,
        *,
        reuse: bool = True,
        deterministic: bool = False,
        max_wait_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        adapters: Sequence[str] = (),
    ) -> "Engine":
        """An engine that runs programs which others may run too, on parameters of the same shapes.

        Args:
            program: With its sizes.
            params, reuse, deterministic, max_wait_s, clock, adapters: As of the class.
        """
        one = object.__new__(cls)
        given = {"reuse": reuse, "deterministic": deterministic, "clock": clock}
        one._start(program, params, max_wait_s=max_wait_s, adapters=adapters, **given)
        return one

    def _start(
        self,
        program: EngineProgram,
        params: Params,
        *,
        reuse: bool,
        deterministic: bool,
        max_wait_s: float,
        clock: Callable[[], float],
        adapters: Sequence[str],
    ) -> None:
        self.adapters = named(adapters, program)
        sizes = program.sizes
        self.program, self.sizes, self.config = program, sizes, program.config
        self.clock = clock
        self._params = params
        self._host = HostPages(program, reuse=reuse)
        self._state = self.program.begin()
        self._packer = Packer(self.program, self.adapters)
        self._scheduler = Scheduler(
            seats=sizes.seats,
            pages=sizes.pages,
            page_tokens=sizes.page_tokens,
            pages_a_seat=sizes.pages_a_seat,
            mixed=sizes.mixed,
            decode=sizes.decode,
            max_wait=max_wait_s,
            reuse=reuse and self.program.shares,
            draft=sizes.draft,
            adapts=self.program.drafter is not None and not self.program.drafter.tree,
            host_pages=sizes.host,
        )
        self._constraints: dict[int, Constraint] = {}
        self._flying: deque[tuple[StepPlan, Chosen]] = deque()
        self._told: list[Emitted] = []
        self._probabilities = Probabilities()
        self._failed: dict[int, str] = {}
        self._deterministic = deterministic
        self._steps = {"mixed": 0, "decode": 0}
        self.began: Callable[[list[int]], None] = lambda _numbers: None

    @property
    def bound(self) -> BoundPlan:
        """Devices, and the plan as generation has it."""
        return self.program.bound

    @property
    def seats(self) -> int:
        """Requests that run at once."""
        return self.sizes.seats

    @property
    def busy(self) -> bool:
        """Whether any request has not ended, or an answer has not been given by `step`."""
        return bool(self._told or self._flying or self._scheduler.busy)

    @property
    def stats(self) -> EngineStats:
        """See there."""
        found = self._scheduler.stats
        host_bytes = found.hosted * self._host.page_bytes
        return EngineStats(steps=dict(self._steps), scheduler=found, host_bytes=host_bytes)

    def add(self, request: EngineRequest, constraint: Constraint | None = None) -> int:
        """Let a request wait for a seat; its number.

        Args:
            request: With `waits` if there is a constraint.
            constraint: Which of its tokens may come; it has been told of `generated`.

        Raises:
            InputError: The engine could never serve it.
        """
        self.check(request, constraint)
        number = self._scheduler.add(request)
        self._probabilities.add(number, request)
        if constraint is not None:
            self._constraints[number] = constraint
        return number

    def check(self, request: EngineRequest, constraint: Constraint | None = None) -> None:
        """Refuse what the engine could never serve; see `add`."""
        reads = self.program.reading.reads
        request.check(vocab=self.config.vocab, slots=self.sizes.slots, reads=reads)
        check_adapter(request.adapter, self.adapters)
        check_keep(request, self.sizes.keeps)
        check_waits(request, constraint)

    def ahead(self, request: EngineRequest) -> tuple[int, int]:
        """What a request that `check` lets pass would find before it; see `Scheduler.ahead`."""
        return self._scheduler.ahead(request)

    def cancel(self, number: int) -> None:
        """End a request; one that has ended, or is none, is left alone."""
        self._scheduler.cancel(number)
        self._hear()

    def warm(self) -> None:
        """Compile all there is to compile, by steps of nothing but padding."""
        for kind in self._steps:
            chosen, self._state = self.program(
                kind, self._params, self._state, *self._packer.padding(kind)
            )
            jax.block_until_ready(chosen)
        self._state = self._host.warm(self.program.read_nothing(self._params, self._state))

    def step(self) -> list[Emitted]:
        """Send steps on their way, and give what the oldest gave; empty where nothing is to do."""
        self.send()
        return self.land()

    def send(self) -> None:
        """Begin as many steps as may be on their way at once."""
        while len(self._flying) < DEPTH and self._send():
            pass

    @property
    def waits(self) -> bool:
        """Whether `land` would wait for a device."""
        return bool(self._flying) and not self._flying[0][1].token.is_ready()

    def land(self) -> list[Emitted]:
        """Wait for the oldest step on its way, and give what it gave."""
        told, self._told = self._told, []
        if self._flying:
            told += self._landed(*self._flying.popleft())
        told += self._told  # behind their requests' last tokens
        self._told = []
        return told

    def generate_all(
        self, requests: Sequence[EngineRequest], over: Over | None = None
    ) -> list[list[Emitted]]:
        """All requests to their ends, or to where they are `over`: of each what was emitted."""
        return to_their_ends(self, [self.add(one) for one in requests], over)

    def _send(self) -> bool:
        """Begin the next step; whether there was one."""
        plan = self._scheduler.next(self.clock())
        self._hear()
        if plan is None:
            return False
        if plan.fresh:
            seats = {seat for seat, _ in plan.fresh}
            self.began([piece.request for piece in plan.pieces if piece.seat in seats])
        kind = "mixed" if self._deterministic else plan.kind
        self._state = self._host.moved(self._state, plan)
        if self.program.reading.reads.anything:
            for seat, request in plan.fresh:
                self._state = self.program.read(self._params, self._state, seat, request)
        masks, scored = self._masks(plan), self._probabilities.sends(plan)
        given = self._packer.packed(kind, plan, masks, scored)
        chosen, self._state = self.program(kind, self._params, self._state, *given)
        self._steps[kind] += 1
        self._flying.append((plan, chosen))
        return True

    def _masks(self, plan: StepPlan) -> dict[int, np.ndarray]:
        """By seat; a request whose constraint fails here ends alone."""
        masks = {}
        for piece in plan.pieces if self._constraints else ():
            constraint = self._constraints.get(piece.request)
            if constraint is not None and piece.emits:
                with self._ending_alone(piece.request):
                    masks[piece.seat] = constraint.mask()
        return masks

    @contextlib.contextmanager
    def _ending_alone(self, number: int) -> Iterator[None]:
        """What a request's constraint refuses ends that request."""
        try:
            yield
        except InputError as problem:
            if self._scheduler.cancel(number):
                self._failed[number] = str(problem)
            self._hear()

    def _landed(self, plan: StepPlan, chosen: Chosen) -> list[Emitted]:
        """Wait for a step, and tell its requests."""
        found, broken = self._probabilities.lands(chosen)
        emitting = [piece for piece in plan.pieces if piece.emits]
        counts = [1] * len(emitting)
        if found.count is None:
            found = jax.tree.map(lambda x: x[:, None], found)
        else:
            counts = [int(found.count[piece.seat]) for piece in emitting]
        for piece, count in zip(emitting, counts, strict=True):
            sound = found.sound[piece.seat, :count].all()
            if not sound and self._scheduler.cancel(piece.request):
                confined = piece.request in self._constraints
                self._failed[piece.request] = CONFINED if confined else NOT_SOUND
        self._failed |= {one: NOT_SOUND for one in broken if self._scheduler.cancel(one)}
        self._hear()
        lives = [piece.request in self._probabilities for piece in emitting]
        said = [
            found.token[piece.seat, :count].tolist()
            for piece, count in zip(emitting, counts, strict=True)
        ]
        tokens = [each[0] for each in said]
        more = {p.request: each[1:] for p, each in zip(emitting, said, strict=True) if each[1:]}
        ended = {one.request: one for one in self._scheduler.took(plan, tokens, more)}
        told = []
        for piece, each, lived in zip(emitting, said, lives, strict=True):
            if not lived:
                continue
            last = ended.get(piece.request)
            used = len(each) - (last.unused if last else 0)
            for i in range(used):
                ending = last if i == used - 1 else None
                told.append(self._probabilities.emitted(piece, i, found, ending))
            if (constraint := self._constraints.get(piece.request)) is not None:
                with self._ending_alone(piece.request):
                    constraint.took(each[0])
        for number in ended:
            self._forget(number)
        return told

    def _hear(self) -> None:
        """Of requests that ended otherwise than by a token."""
        for one in self._scheduler.gone():
            self._forget(one.request)
            message = self._failed.pop(one.request, None)
            reason = one.reason if message is None else "error"
            self._told.append(Emitted(one.request, ended=reason, message=message or ""))

    def _forget(self, number: int) -> None:
        self._probabilities.forget(number)
        self._constraints.pop(number, None)
