"""How many tokens keep their MLP's hidden states in host memory: `Segment.mlp_share` auto.

As many as reach it while a layer is computed (`offload.kept_token_share`). What a layer multiplies
and names is read off the traced model, as one device would compute a whole batch with attention
written out, and divided by devices and microbatches.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from colossax.aot.saved import inner_jaxprs, scopes
from colossax.config import AttentionConfig, Plan, Segment
from colossax.errors import PlanError
from colossax.layerwise import kept_sharding
from colossax.offload import GB, Rates, kept_token_share, load_rates
from colossax.sharding import seq_axes, use
from colossax.step.microbatches import batch_dims, num_microbatches
from colossax.step.offloaded.host_arrays import state_bytes

if TYPE_CHECKING:
    from colossax.step.step import Step

MLP_SHARE = "segments.mlp_share auto"
"""How lines of what was decided begin."""

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer's forward pass over a microbatch, a device's part of it.

    Attributes:
        flops: Of its matmuls, attention over all pairs of tokens.
        kept_bytes: Of what it gets (`input`), and of what has a name.
    """

    flops: float
    kept_bytes: dict[str, float]


def with_mlp_share(
    step: "Step",
    build: Callable[[Plan], "Step"],
    *,
    rates: Callable[[str], Rates | None] = load_rates,
) -> tuple[Plan, str]:
    """The step's plan with shares in place of `auto`, and why, in one line.

    All hidden states are recomputed where nothing was measured, and in several processes, which
    may have measured different rates. Host memory bounds the share where `plan.offload.host_gb`
    is given.

    Args:
        step: Of that plan; none of its layers has been traced.
        build: The step of another plan, on one device.
        rates: What was measured of a kind of device.

    Raises:
        PlanError: The batch is not known, or no layer names what its MLP keeps.
        InputError: The file of rates is damaged.

    Cost: a forward pass is traced.
    """
    plan = step.bound.plan
    if step.options.shapes is None:
        raise PlanError(
            f"{MLP_SHARE}: it depends on the tokens of a batch, and they are not known; give a"
            " batch or its shapes, as in boost(..., shapes=batch), or a number"
        )
    shares, line = _measured_shares(step, build, rates)
    segments = tuple(
        dataclasses.replace(segment, mlp_share=shares.get(segment, segment.mlp_share))
        for segment in plan.segments
    )
    line = f"{MLP_SHARE}: {line}"
    _LOG.info(line)
    return plan.replace(segments=segments, offload=plan.offload.settled), line


def _measured_shares(
    step: "Step",
    build: Callable[[Plan], "Step"],
    rates_of: Callable[[str], Rates | None] = load_rates,
) -> tuple[dict[Segment, float], str]:
    wanted = [segment for segment in step.bound.plan.segments if segment.mlp_share == "auto"]
    none = dict.fromkeys(wanted, 0.0)
    kind = step.bound.mesh.devices.flat[0].device_kind
    if jax.process_count() > 1:
        return none, "0%, several processes may have measured different rates"
    rates = rates_of(kind)
    if rates is None:
        return none, f"0%, nothing was measured for '{kind}'; colossax bench offload does it"
    layers, memory = _layers(step, build)
    shares = {each: _share(step.bound.plan, each, layers, rates, memory) for each in wanted}
    shown = " and ".join(f"{share:.0%}" for share in shares.values())
    if seq_axes(step.bound) and any(0 < share < 1 for share in shares.values()):
        rounded = {segment: float(share == 1) for segment, share in shares.items()}
        return rounded, f"all or none, several devices hold parts of a row; rates say {shown}"
    return shares, f"{shown} of the tokens keep 'mlp' in host memory, as rates say"


def _share(
    plan: Plan, segment: Segment, layers: Sequence[_Layer], rates: Rates, memory: float
) -> float:
    """The least of any layer's."""
    fetched = plan.offload.auto or plan.offload.parameters or segment.placement.params_on_host
    speed = rates.both_ways_bytes_per_s if fetched else rates.to_host_bytes_per_s
    names = set(segment.placement.named_activations)
    if plan.offload.activations or segment.placement.activations_on_host:
        names.update(("input", *segment.remat.split("+")))
    return min(
        kept_token_share(
            bytes_per_s=speed,
            layer_s=layer.flops / rates.matmul_flops_per_s,
            fixed_bytes=sum(layer.kept_bytes.get(name, 0) for name in names - {"mlp"}),
            mlp_bytes=layer.kept_bytes["mlp"],
            host_bytes=memory,
        )
        for layer in layers
    )


def _layers(step: "Step", build: Callable[[Plan], "Step"]) -> tuple[list[_Layer], float]:
    """Layers that differ, and bytes of host memory for what each of all keeps."""
    bound, shapes = step.bound, jax.eval_shape(lambda x: x, dict(step.options.shapes or {}))
    microbatches = num_microbatches(bound, shapes, batch_dims(shapes, step.options.batch_dims))
    plain = build(_plain(bound.plan))
    state = plain.abstract
    traced = plain.evaluation.trace(
        state["params"], state["variables"], plain.abstract_batch(shapes)
    )
    bodies = list(_bodies(traced.jaxpr))
    if not bodies:
        raise PlanError(
            f"{MLP_SHARE}: no layer of the model names its hidden states 'mlp', as"
            " jax.ad_checkpoint.checkpoint_name does; name them, or give 1"
        )
    with use(bound):
        layers = [_layer(body, parts=(bound.mesh.size, microbatches)) for _, body in bodies]
    if bound.plan.offload.host_gb is None:
        return layers, math.inf
    rest = bound.plan.offload.host_gb * GB - sum(state_bytes(step, microbatches).values())
    return layers, rest / sum(times for times, _ in bodies)


def _plain(plan: Plan) -> Plan:
    """One that runs on one device as the model is written, each layer a jaxpr of its own."""
    return Plan(
        segments=(Segment(remat="full"),),
        precision=plan.precision,
        attention=AttentionConfig(kernel="reference"),
    )


def _bodies(jaxpr: Any, times: int = 1) -> Iterator[tuple[int, Any]]:
    """(runs, equation) of each layer in a loop or alone that names an MLP's hidden states."""
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            deeper = list(_bodies(inner, times * eqn.params.get("length", 1)))
            yield from deeper
            if not deeper and "prevent_cse" in eqn.params and "mlp" in _named(inner):
                yield times, eqn


def _layer(body: Any, *, parts: tuple[int, int]) -> _Layer:
    """Counted over devices and microbatches."""
    (inner,) = inner_jaxprs(body)
    devices, microbatches = parts
    kept = {"input": _bytes(body.outvars), **{n: _bytes(v) for n, v in _named(inner).items()}}
    return _Layer(
        flops=_flops(inner) / (devices * microbatches),
        kept_bytes={name: size / microbatches for name, size in kept.items()},
    )


def _named(jaxpr: Any) -> dict[str, list[Any]]:
    """Variables by the names that `checkpoint_name` gave them."""
    variables: dict[str, list[Any]] = {}
    for scope in scopes(jaxpr):
        for eqn in scope.eqns:
            if eqn.primitive.name == "name":
                variables.setdefault(eqn.params["name"], []).extend(eqn.outvars)
    return variables


def _bytes(variables: Sequence[Any]) -> int:
    """Of a device's part, kept as layers' activations are."""
    total = 0
    for aval in (variable.aval for variable in variables):
        sharding = kept_sharding(aval)
        shape = aval.shape if sharding is None else sharding.shard_shape(aval.shape)
        total += math.prod(shape) * aval.dtype.itemsize
    return total


def _flops(jaxpr: Any) -> int:
    """Two for each product that a matmul adds up."""
    total = 0
    for eqn in jaxpr.eqns:
        inside = sum(_flops(inner) for inner in inner_jaxprs(eqn))
        total += inside * eqn.params.get("length", 1)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += (
                2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
            )
    return total
