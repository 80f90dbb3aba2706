"""The programs for batches of one form, and such a batch on its way through them."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import MeshAxis
from colossax.layerwise import shapes_of
from colossax.pipeline import Kind, Table, schedule
from colossax.sharding import RowOrder, in_order, use
from colossax.sharding.rules import chunks_of
from colossax.step.batches import BatchPlacer
from colossax.step.gradients.accumulate import check_counted, objective, with_term_weights
from colossax.step.loss import Totals
from colossax.step.microbatches import batch_dims, cut_up
from colossax.step.programs.chunks import Given, cut_chunks
from colossax.step.programs.numbered import Leaves, Numbered
from colossax.step.programs.passes import BothWays, Forward, Underway
from colossax.step.programs.processes import connect, from_each, in_several, program
from colossax.step.programs.sending import of_stage, sent, spec_of
from colossax.step.programs.stage import Stage
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
        self._step, self._numbered, self._stages = step, numbered, stages
        self._placer, self._evaluates = placer, evaluates
        self._cut = [program(stage.here, self._cut_up(stage), **options) for stage in stages]
        shared = {name: step.abstract[name] for name in ("step", "rng", "variables")}
        arrays, keys, weights = jax.eval_shape(self._cut_up(stages[0]), batch, shared)
        variables = shapes_of(shared["variables"])
        given = Given(fixed={}, arrays=arrays, keys=keys, weights=weights, variables=variables)
        self.count = jax.tree.leaves(arrays)[0].shape[0]
        loss = self._totals if evaluates else self._value
        order = _order(placer, batch)
        self.chunks = cut_chunks(loss, step.bound, numbered, given, order)
        self.table = _table(step, self.count)
        apart = any(op.kind is Kind.WEIGHT for _, _, op in self.table.operations())
        if in_several(step.bound):
            connect(step.bound, [stage.here for stage in stages], self._links())
        self.passes: Forward = (
            Forward(self.chunks, **options)
            if evaluates
            else BothWays(self.chunks, numbered, given, apart, **options)
        )

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
        leaves = jax.tree.leaves(params)
        there: dict[tuple[int, int], Any] = {}

        def at(number: int, stage: int) -> Any:
            if self._numbered.homes[number] == stage:
                return leaves[number]
            if (number, stage) not in there:
                home = self._stages[self._numbered.homes[number]].here
                here = self._stages[stage].here
                there[number, stage] = sent(leaves[number], home, here, spec_of)
            return there[number, stage]

        own = [{n: at(n, chunk.stage) for n in chunk.learning} for chunk in self.chunks]
        given = []
        for chunk in self.chunks:
            arrays, keys, weights = cut[chunk.stage]
            fixed = {n: at(n, chunk.stage) for n in chunk.fixed}
            given.append(
                Given(
                    fixed=fixed,
                    arrays=arrays,
                    keys=keys,
                    weights=weights,
                    variables=variables[chunk.stage],
                )
            )
        return self.passes.run(self.table, own, given)

    def _links(self) -> Iterator[tuple[int, int]]:
        """From which stage to which anything is sent."""
        last = self.chunks[-1].stage
        for chunk in self.chunks:
            following = self.chunks[min(chunk.position + 1, len(self.chunks) - 1)].stage
            homes = [self._numbered.homes[at] for at in (*chunk.learning, *chunk.fixed)]
            for there in (following, last, *homes):
                yield chunk.stage, there
                yield there, chunk.stage

    def gradients(self, underway: Underway, params: Sequence[Array]) -> list[list[Leaves]]:
        """Of each stage what chunks found of its parameters, wherever they are.

        Args:
            underway: All chunks have been through it.
            params: All of them, where they live.
        """
        found: list[list[Leaves]] = [[] for _ in self._stages]
        homes = self._numbered.homes
        for chunk, grads in zip(self.chunks, underway.grads, strict=True):
            for stage in self._stages:
                own = {at: g for at, g in grads.items() if homes[at] == stage.number}
                if own and stage.number != chunk.stage:
                    specs = {at: spec_of(params[at]) for at in own}
                    own = sent(own, chunk.bound, stage.here, lambda _, specs=specs: specs)
                if own:
                    found[stage.number].append(own)
        return found

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
        """`(batch, shared) -> (arrays, keys, weights of terms)` on a stage's devices."""
        step, numbered = self._step, self._numbered

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
                    micro = cut_up(step.bound, batch, dims, key)
                    nothing = [jnp.zeros(x.shape, x.dtype) for x in numbered.shapes]
                    params = numbered.tree(dict(enumerate(nothing)))
                    parts = split(params, step.trainable)
                    micro = with_term_weights(step.loss_call, *parts, shared["variables"], micro)
                    return micro.arrays, micro.keys, micro.term_weights

        return cut

    def _value(
        self, params: Params, microbatch: Batch, key: Any, weights: Any, variables: Any
    ) -> Any:
        return objective(*self._step.loss_call(params, microbatch, variables, key), weights)

    def _totals(
        self, params: Params, microbatch: Batch, key: Any, weights: Any, variables: Any
    ) -> tuple[Any, Totals]:
        terms, metrics = self._step.loss_call(params, microbatch, variables, None)
        check_counted(terms, self.count)
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
