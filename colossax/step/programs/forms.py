"""The programs for batches of one form, and such a batch on its way through them."""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from colossax.config import MeshAxis
from colossax.layerwise import shapes_of, summed
from colossax.pipeline import Kind, Table, schedule
from colossax.sharding import RowOrder, in_order, use
from colossax.sharding.rules import chunks_of
from colossax.step.batches import BatchPlacer
from colossax.step.checks.float8 import check_met_once
from colossax.step.gradients.accumulate import check_counted, objective, with_term_weights
from colossax.step.gradients.loss_scale import scale_in
from colossax.step.loss import Totals
from colossax.step.microbatches import batch_dims, cut_up
from colossax.step.programs.chunks import Given, cut_chunks
from colossax.step.programs.numbered import Leaves, Numbered
from colossax.step.programs.passes import BothWays, Forward, Underway
from colossax.step.programs.processes import connect, from_each, in_several, program
from colossax.step.programs.sending import of_stage, sent, spec_of
from colossax.step.programs.stage import Stage, shared_of
from colossax.step.programs.weights import Weights
from colossax.step.trainable import split
from colossax.typing import Batch, Params

if TYPE_CHECKING:
    from colossax.step.step import Step


def form_of(batch: Batch) -> Any:
    """What two batches share that the same programs take."""
    arrays = tuple((name, batch[name].shape, batch[name].dtype) for name in sorted(batch))
    return type(batch), getattr(batch, "order", None), arrays


class Form:
    """Batches of one form: how they are cut up, and the chunks that they go through.

    Attributes:
        chunks: Of the loss.
        table: Who does what when.
    """

    def __init__(
        self,
        step: "Step",
        numbered: Numbered,
        stages: Sequence[Stage],
        placer: BatchPlacer,
        batch: Batch,
        *,
        evaluates: bool,
        **options: Any,
    ):
        """Cut the loss; compile nothing yet.

        Args:
            step: Its plan and loss are there.
            numbered: All parameters.
            stages: All of them.
            placer: Whose batches these are.
            batch: One of them, or shapes.
            evaluates: Whether it is for totals alone, and not for gradients.
            **options: Of `jax.jit`.
        """
        self._step, self._stages = step, stages
        self._placer, self._evaluates = placer, evaluates
        self._weights = [Weights(stage.here, differentiates=not evaluates) for stage in stages]
        self._numbered = numbered = self._weights[0].shapes(numbered)
        self._cut = [program(stage.here, self._cut_up(stage), **options) for stage in stages]
        shared = shared_of(step.abstract)
        arrays, keys, weights = jax.eval_shape(self._cut_up(stages[0]), batch, shared)
        variables = shapes_of(shared["variables"])
        given = Given(fixed={}, arrays=arrays, keys=keys, weights=weights, variables=variables)
        self.count = jax.tree.leaves(arrays)[0].shape[0]
        loss = self._totals if evaluates else self._value
        order = _order(placer, batch)
        self.chunks = cut_chunks(loss, step.bound, self._weights, numbered, given, order)
        self.table = _table(step, self.count)
        if not evaluates:
            read = collections.Counter(at for chunk in self.chunks for at in chunk.learning)
            check_met_once(numbered.infos[at] for at, times in read.items() if times > 1)
        apart = any(op.kind is Kind.WEIGHT for _, _, op in self.table.operations())
        if in_several(step.bound):
            connect(step.bound, [stage.here for stage in stages], self._links())
        self.passes: Forward = (
            Forward(self.chunks, **options)
            if evaluates
            else BothWays(self.chunks, numbered, given, apart, **options)
        )
        self._gathered = [
            program(each.here, self._gather(each), **options) for each in self._weights
        ]
        self._reduced = [
            program(each.here, self._reduce(each), donate_argnums=0, **options)
            for each in self._weights
        ]
        self._summed = program(self.chunks[-1].bound, summed, **options)

    def run(self, params: Params, shared: dict[str, Any], batch: Batch) -> Underway:
        """A batch through all chunks; nobody waits for it.

        Args:
            params: All of them.
            shared: What all stages have of the state.
            batch: On the devices.
        """
        cut, variables = {}, {}
        for stage in self._stages:
            here = {name: of_stage(value, stage.here) for name, value in shared.items()}
            cut[stage.number] = self._cut[stage.number](of_stage(batch, stage.here), here)
            variables[stage.number] = here["variables"]
        held = [self._held(jax.tree.leaves(params), stage) for stage in self._stages]
        own = [
            {n: held[chunk.stage][n] for n in chunk.learning if n in held[chunk.stage]}
            for chunk in self.chunks
        ]
        given = []
        for chunk in self.chunks:
            arrays, keys, weights = cut[chunk.stage]
            fixed = {n: held[chunk.stage][n] for n in chunk.fixed}
            given.append(
                Given(
                    fixed=fixed,
                    arrays=arrays,
                    keys=keys,
                    weights=weights,
                    variables=variables[chunk.stage],
                    hosted=self._numbered.of_runs(chunk.runs, jax.tree.leaves(params)),
                )
            )
        underway = self.passes.run(self.table, own, given)
        # What was gathered for the step goes, before gradients are reduced.
        underway.params, underway.given = (), ()
        return underway

    def _links(self) -> Iterator[tuple[int, int]]:
        """From which stage to which anything is sent."""
        last = self.chunks[-1].stage
        for chunk in self.chunks:
            following = self.chunks[min(chunk.position + 1, len(self.chunks) - 1)].stage
            homes = [self._numbered.homes[at] for at in (*chunk.learning, *chunk.fixed)]
            for there in (following, last, *homes):
                yield chunk.stage, there
                yield there, chunk.stage

    def _held(self, leaves: Sequence[Any], stage: Stage) -> Leaves:
        """What a stage's chunks read, as they get it; of other stages' parameters, what is sent."""
        mine = [chunk for chunk in self.chunks if chunk.stage == stage.number]
        homes = self._numbered.homes
        read = {at for chunk in mine for at in (*chunk.learning, *chunk.fixed)}
        read = sorted(at for at in read if not self._numbered.infos[at].on_host)
        there = {
            at: leaves[at]
            if homes[at] == stage.number
            else sent(leaves[at], self._stages[homes[at]].here, stage.here, spec_of)
            for at in read
        }
        if not self._weights[stage.number].gathers:
            return there
        return self._gathered[stage.number](there)

    def found(self, underway: Underway) -> Any:
        """What the loss gave, where the last chunk is."""
        return underway.found if self._weights[0].shards is None else self._summed(underway.found)

    def gradients(
        self, underway: Underway, params: Sequence[Any]
    ) -> list[tuple[Leaves, list[Leaves]]]:
        """Of each stage what chunks found of its parameters, wherever they are.

        Of each parameter what one chunk found, and what others did of some of them.

        Args:
            underway: All chunks have been through it.
            params: All of them, where they live.
        """
        found: list[tuple[Leaves, list[Leaves]]] = [({}, []) for _ in self._stages]
        homes = self._numbered.homes
        for by, grads in self._by_stage(underway):
            for stage in self._stages:
                own = {at: g for at, g in grads.items() if homes[at] == stage.number}
                if own and stage is not by:
                    specs = {at: spec_of(params[at]) for at in own}
                    own = sent(own, by.here, stage.here, lambda _, specs=specs: specs)
                first, more = found[stage.number]
                again = {at: own.pop(at) for at in first.keys() & own.keys()}
                first.update(own)
                if again:
                    more.append(again)
        return found

    def _by_stage(self, underway: Underway) -> list[tuple[Stage, Leaves]]:
        """Who found gradients, and which: of its chunks, or added and reduced of all of them."""
        found: list[tuple[Stage, Leaves]] = []
        for stage in self._stages:
            pairs = zip(self.chunks, underway.grads, strict=True)
            own = [grads for chunk, grads in pairs if chunk.stage == stage.number]
            if self._weights[stage.number].shards is not None:
                own = [self._reduced_by_leaf(stage, own)]
            found += [(stage, grads) for grads in own]
        return found

    def _reduced_by_leaf(self, stage: Stage, grads: list[Leaves]) -> Leaves:
        """One parameter after another, each given up when it is reduced."""
        found: Leaves = {}
        for at in sorted(set().union(*grads)):
            of_one = [each.pop(at) for each in grads if at in each]
            found |= self._reduced[stage.number]({at: of_one})
        return found

    def _gather(self, weights: Weights) -> Callable[[Leaves], Leaves]:
        infos = dict(enumerate(self._numbered.infos))

        def gathered(leaves: Leaves) -> Leaves:
            return weights.gathered(infos, leaves)

        return gathered

    def _reduce(self, weights: Weights) -> Callable[[dict[int, Any]], Leaves]:
        infos = dict(enumerate(self._numbered.infos))

        def reduced(grads: dict[int, Any]) -> Leaves:
            return weights.reduced(infos, grads)

        return reduced

    def known_to_all(self, found: Any, norms: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
        """For each stage, on its devices, what the last has found and a number of each.

        Args:
            found: Of the last stage.
            norms: Of each stage; or none at all.
        """
        here, last = [stage.here for stage in self._stages], self.chunks[-1].stage
        if in_several(self._step.bound):
            asked = [norms[at : at + 1] for at in range(len(here))]
            others = shapes_of(found)
            parts = [(found if at == last else others, asked[at]) for at in range(len(here))]
            rows = from_each(self._step.bound, here, parts)
            found, norms = rows[last][0], [norm for _, row in rows for norm in row]
            return [of_stage((found, norms), there) for there in here]
        return [
            (
                sent(found, here[last], there),
                [sent(norm, here[at], there) for at, norm in enumerate(norms)],
            )
            for there in here
        ]

    def _cut_up(self, stage: Stage) -> Callable[..., tuple[Any, Any, Any]]:
        """`(batch, shared) -> (arrays, keys, weighing)` on a stage's devices."""
        step, numbered = self._step, self._numbered
        weights = self._weights[stage.number]

        def cut(batch: Batch, shared: dict[str, Any]) -> tuple[Any, Any, Any]:
            with use(stage.here):
                batch, order = self._placer.in_order(batch)
                with in_order(order):
                    dims = batch_dims(batch, step.options.batch_dims)
                    if self._evaluates:
                        micro = cut_up(step.bound, batch, dims, jax.random.key(0))
                        return micro.arrays, None, None
                    key = jax.random.fold_in(
                        jax.random.wrap_key_data(shared["rng"]), shared["step"]
                    )
                    micro = cut_up(
                        step.bound,
                        batch,
                        dims,
                        key,
                        by_row=step.loss_call.by_row,
                        loss_scale=scale_in(shared),
                    )
                    nothing = [jnp.zeros(x.shape, x.dtype) for x in numbered.shapes]
                    params = numbered.tree(dict(enumerate(nothing)))
                    parts = split(params, step.trainable)
                    micro = with_term_weights(step.loss_call, *parts, shared["variables"], micro)
                    return *weights.cut(micro), micro.weighing

        return cut

    def _value(
        self, params: Params, microbatch: Batch, key: Any, weighing: Any, variables: Any
    ) -> Any:
        return objective(*self._step.loss_call(params, microbatch, variables, key), weighing)

    def _totals(
        self, params: Params, microbatch: Batch, key: Any, weighing: Any, variables: Any
    ) -> tuple[Any, Totals]:
        terms, metrics = self._step.loss_call(params, microbatch, variables, None)
        check_counted(self._step.loss_call, terms, self.count)
        totals = {**{name: term[:2] for name, term in terms.items()}, **metrics}
        return jnp.zeros(()), totals


def _order(placer: BatchPlacer, batch: Batch) -> RowOrder:
    """In which tokens lie when the loss sees them."""
    found = []
    jax.eval_shape(lambda batch: found.append(placer.in_order(batch)[1]), batch)
    return found[0]


def _table(step: "Step", microbatches: int) -> Table:
    asked, chunks = step.bound.plan.pipeline, chunks_of(step.bound).chunks
    stages = step.bound.mesh.shape[MeshAxis.STAGE]
    return schedule(asked.resolved, stages, microbatches, chunks, "free")
