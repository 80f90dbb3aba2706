"""Terms and metrics of a batch through the stages, without a step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import BoundPlan
from colossax.layerwise import added, nothing
from colossax.pipeline.routes import Phase, routes_of
from colossax.pipeline.table import Table
from colossax.step.gradients.accumulate import LossCall, check_counted
from colossax.step.loss import Totals
from colossax.step.microbatches import Microbatches
from colossax.step.stages.forward import Ahead, Stages, by_stack, through, zeros
from colossax.step.trainable import joined
from colossax.typing import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    ahead: Ahead
    totals: Any


jax.tree_util.register_dataclass(_State, ["ahead", "totals"], [])


def pipelined_totals(
    call: LossCall,
    bound: BoundPlan,
    infos: Any,
    params: Params,
    variables: Any,
    micro: Microbatches,
    table: Table,
) -> Totals:
    """Terms and metrics of a global batch as (total, weight), the layers shared by the stages.

    Args:
        call: The loss; it gets no random key.
        bound: Plan and devices, several of them along `stage`.
        infos: Of all parameters.
        params: All of them.
        variables: See `TrainState`.
        micro: The batch.
        table: Of forward passes.

    Raises:
        PlanError: See `Stages`.
        InputError: The loss is one number, and there are several microbatches.
    """

    def totals(outer: Params, inner: Params, microbatch: Any, key: Any, weights: Any) -> Totals:
        terms, metrics = call(joined(outer, inner), microbatch, variables, None)
        check_counted(call, terms, micro.count)
        return {**{name: term[:2] for name, term in terms.items()}, **metrics}

    stack_infos = by_stack(infos, infos)[1]
    routes = routes_of(table)
    stages = Stages(totals, bound, stack_infos, by_stack(params, infos), micro, routes)
    ticks = routes.forward_ticks

    def of(number: Array, last: Any, sums: Any) -> Totals:
        return stages.leave(stages.outer, number, last, sums)

    def tick(phase: Phase, state: _State, xs: Any) -> _State:
        now, cells, *_, plain = xs
        enters = plain["enters"] if phase.enters else None
        out, ahead, _ = stages.forward(state.ahead, now, cells, enters)
        found = state.totals
        if phase.loss:
            last = stages.travel.of_stage(out, routes.last)
            sums = stages.counted(ahead, ticks, plain["ends"])
            found = added(found, of(plain["ends"], last, sums))
        return _State(ahead=stages.send(ahead, now, out), totals=found)

    start = stages.start()
    sums = jax.eval_shape(lambda: stages.counted(start, ticks, jnp.int32(0)))
    shapes = jax.eval_shape(lambda: of(jnp.int32(0), zeros(stages.travel.shapes), zeros(sums)))
    return through(routes, tick, _State(ahead=start, totals=nothing(shapes))).totals
