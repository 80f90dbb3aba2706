"""Plans of steps as arrays: which token goes where, and what each seat's request asks."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from colossax.inference.engine.program import EngineProgram, all_allowed
from colossax.inference.engine.sampling import Draws
from colossax.inference.engine.scoring import Place
from colossax.scheduling import EngineRequest, StepPlan


class Packer:
    """Makes the arrays of steps; what has not changed since the last one stays on the devices."""

    def __init__(self, program: EngineProgram, adapters: Sequence[str] = ()):
        sizes = program.sizes
        self._numbers = {name: number for number, name in enumerate((None, *adapters))}
        self._program, self._sizes = program, sizes
        self._draws = Draws.empty(sizes.seats)
        self._mask = all_allowed(sizes.seats, program.config.vocab)
        self._masked: set[int] = set()
        self._version = 0
        put = self._put
        self._there = {
            "table": put(np.zeros((sizes.seats, sizes.pages_a_seat), np.int32)),
            "draws": put(self._draws),
            "mask": put(self._mask),
            True: put(np.ones((), bool)),
            False: put(np.zeros((), bool)),
        }

    def padding(self, kind: str) -> tuple[Any, ...]:
        """Of a step without tokens."""
        return self._given(self._sizes.step(kind).empty().packed())

    def packed(
        self,
        kind: str,
        plan: StepPlan,
        masks: Mapping[int, np.ndarray],
        scored: Sequence[Place] = (),
    ) -> tuple[Any, ...]:
        """Of a step as it was planned.

        Args:
            kind: Of the program that runs it.
            plan: See there.
            masks: By seat, of those that may not say everything.
            scored: Tokens of prompts that are scored; of a `mixed` step.
        """
        for seat, request in plan.fresh:
            self._sit(seat, request)
        if plan.fresh:
            self._there["draws"] = self._put(self._draws)
        if plan.version != self._version:
            self._version = plan.version
            self._there["table"] = self._put(plan.table)
        self._allow(masks)
        return self._given(self._batch(kind, plan, scored))

    def _given(self, packed: np.ndarray) -> tuple[Any, ...]:
        there = self._there
        masked = there[bool(self._masked)]
        return packed, there["table"], there["draws"], there["mask"], masked

    def _put(self, tree: Any) -> Any:
        """On the devices: of a copy, for a CPU's device may keep what it is given."""
        return self._program.placed(jax.tree.map(np.copy, tree))

    def _batch(self, kind: str, plan: StepPlan, scored: Sequence[Place]) -> np.ndarray:
        shape = self._sizes.step(kind)
        batch, at, row = shape.empty(), 0, 0
        for piece in plan.pieces:
            count = len(piece.tokens)
            to = at + count
            batch.ids[at:to] = piece.tokens
            if shape.draft and piece.tokens[0] < 0:  # only the device knows where it stands
                batch.position[at:to] = piece.tokens
            else:
                batch.position[at:to] = np.arange(piece.start, piece.start + count, dtype=np.int32)
            batch.seat[at:to] = piece.seat
            for begin in range(at, to, shape.group):
                end = min(begin + shape.group, to)
                batch.groups[row, : end - begin] = np.arange(begin, end, dtype=np.int32)
                row += 1
            if shape.draft:
                batch.room[piece.seat] = piece.room
            if piece.emits:
                first = at if piece.tokens[-1] < -1 else to - 1
                batch.emit[piece.seat, : to - first] = np.arange(first, to, dtype=np.int32)
            at = to
        if scored:
            batch.scored[: len(scored)] = [one.at for one in scored]
            batch.target[: len(scored)] = [one.target for one in scored]
        return batch.packed()

    def _sit(self, seat: int, request: EngineRequest) -> None:
        """Write down what a request asks that begins in this seat."""
        asked, draws = request.sampling, self._draws
        draws.temperature[seat] = asked.temperature
        draws.seed[seat] = asked.seed
        draws.top_k[seat] = asked.top_k
        draws.top_p[seat] = asked.top_p
        draws.min_p[seat] = asked.min_p
        draws.presence[seat] = asked.presence_penalty
        draws.frequency[seat] = asked.frequency_penalty
        draws.begin[seat] = len(request.prompt)
        draws.logprobs[seat] = asked.logprobs is not None
        draws.source[seat] = self._program.reading.reads.count(request)
        draws.adapter[seat] = self._numbers[request.adapter]
        draws.kept[seat] = 0
        if request.keep is not None:
            kept = request.keep.pages(self._sizes.page_tokens, self._sizes.mixed)
            draws.kept[seat] = np.minimum(kept, self._sizes.pages_a_seat)  # more is all
        draws.bias_tokens[seat] = -1
        for i, (token, value) in enumerate(asked.logit_bias):
            draws.bias_tokens[seat, i], draws.bias_values[seat, i] = token, value

    def _allow(self, masks: Mapping[int, np.ndarray]) -> None:
        for seat in self._masked.difference(masks):
            self._mask[seat] = 0xFFFFFFFF
        for seat, mask in masks.items():
            self._mask[seat] = mask
        if masks or self._masked:
            self._there["mask"] = self._put(self._mask)
        self._masked = set(masks)
