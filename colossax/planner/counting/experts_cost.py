"""What a mixture of experts has, holds and sends under a plan, by formulas."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from colossax.config import BoundPlan, MeshAxis
from colossax.errors import PlanError
from colossax.nn import Experts
from colossax.sharding.experts.layout import Layout, layout_of
from colossax.sharding.experts.traffic import Sent, buffer_rows, sent
from colossax.step.step import Step
from colossax.typing import Dims

_GB = 1e9

FORMS = ("passes", "capacity", "gather", "weights")
"""Ways for tokens to meet their experts; see `ExpertsConfig`."""

SENT_FORMULA = (
    "with e devices in the group, r bytes of a buffer of e slots: 5 (e - 1)/e r forward and"
    " backward, as backward sends rows once more; gathered tokens of r bytes likewise; and what"
    " gathers the experts' matrices and sums their gradients"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsCost:
    """Experts of a model on a plan's devices; bytes are of one device.

    Attributes:
        layers: That have experts.
        experts: Of a layer; of the first where layers differ, as all that follows but sums.
        choices: Experts of a token, on average.
        parameters: Of all experts.
        active_parameters: Of the whole model, those that a token meets.
        flops_per_token_all: What a token would take if every expert computed it, forward and
            backward; None where a task does not say what it takes.
        layout: Where tokens and experts lie.
        capacity: Load of a device over a balanced one that goes in one pass.
        buffer_bytes: Rows that a layer's experts are given in a pass.
        sent: By form, in a step with one pass in each layer, bubbles of a pipeline not counted;
            None where the plan's devices do not do it so.
        assumed_loops: Loops of the program whose passes are taken to be one.
    """

    layers: int
    experts: int
    choices: float
    parameters: int
    active_parameters: int
    flops_per_token_all: int | None
    layout: Layout
    capacity: float
    buffer_bytes: int
    sent: Mapping[str, Sent | None]
    assumed_loops: int = 0

    @property
    def lines(self) -> list[str]:
        """For people; bytes are per device and step."""
        layout, plan = self.layout, self.layout.group
        over = f"over {', '.join(plan)}" if plan else "all on every device"
        sent = [
            f"{form} {'-' if one is None else f'{one.total / _GB:.3f}'}"
            for form, one in self.sent.items()
        ]
        rows = [
            f"experts: {self.experts} in {self.layers} layers, {self.choices:g} of a token,"
            f" {over}; {self.active_parameters:,} parameters meet a token",
            *self._flops,
            f"  dispatch {layout.way}; sent by form, GB: {', '.join(sent)}",
            f"  buffer of a layer: {self.buffer_bytes / 2**20:.1f} MiB",
        ]
        if layout.sends:
            rows.append(
                f"  one pass takes {self.capacity:g} times a balanced load; at worst it is"
                f" {self.worst_load:g} times, "
                + (
                    f"which takes {layout.passes} passes"
                    if layout.way == "passes"
                    else "and what is over is dropped"
                )
            )
        if self.assumed_loops:
            rows.append(
                f"  passes are a loop of unknown length ({self.assumed_loops} in the program):"
                " bytes and times below are those of one pass, or of as many as there are chunks"
            )
        return rows

    @property
    def _flops(self) -> list[str]:
        if self.flops_per_token_all is None:
            return []
        return [
            f"  FLOPs below are of the experts that a token takes; all of them would be"
            f" {self.flops_per_token_all / 1e9:.2f} G a token"
        ]

    @property
    def worst_load(self) -> float:
        """Load of the fullest device over a balanced one, where all tokens choose its experts."""
        here, choices = self.layout.experts_here, self.choices
        return min(here, choices) * self.layout.experts / (here * choices)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        layout = self.layout
        return {
            "experts": {
                "layers": self.layers,
                "experts": self.experts,
                "choices": self.choices,
                "parameters": self.parameters,
                "active_parameters": self.active_parameters,
                "flops_per_token_all": self.flops_per_token_all,
                "group": list(layout.group),
                "dispatch": layout.way,
                "sent_bytes": {
                    form: None
                    if one is None
                    else {"tokens": round(one.tokens), "weights": round(one.weights)}
                    for form, one in self.sent.items()
                },
                "sent_formula": SENT_FORMULA,
                "buffer_bytes": self.buffer_bytes,
                "load": {"one_pass": self.capacity, "worst": self.worst_load},
                "passes": {"assumed": 1, "worst": layout.passes},
            },
            **({"assumed_trips": 1} if self.assumed_loops else {}),
        }


def experts_cost(
    step: Step, microbatch: tuple[int, int], microbatches: int, flops_per_token: int | None
) -> ExpertsCost | None:
    """Of a step whose model has `nn.Experts`; None where it has none.

    Args:
        step: Its plan and model.
        microbatch: Rows on all devices, and tokens of a row.
        microbatches: Of a global batch.
        flops_per_token: Of the model, forward and backward, chosen experts alone.
    """
    found = _mixtures(step)
    if not found:
        return None
    first = found[0]
    idle = sum(one.numbers * (1 - one.choices / one.experts) for one in found)
    active = step.spec.parameter_count() - round(idle)
    bound = step.bound.stage(0) if step.bound.stage_programs else step.bound
    tokens = (*microbatch, first.width)
    layout = first.layout(bound, tokens)
    width = first.width * jnp.dtype(first.dtype(bound)).itemsize
    return ExpertsCost(
        layers=sum(one.layers for one in found),
        experts=first.experts,
        choices=first.choices,
        parameters=sum(one.numbers for one in found),
        active_parameters=active,
        flops_per_token_all=None if flops_per_token is None else flops_per_token + 6 * round(idle),
        layout=layout,
        capacity=bound.plan.experts.capacity,
        buffer_bytes=buffer_rows(layout) * width,
        sent=_by_form(found, bound, tokens, microbatches / _stages(step.bound)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mixture:
    """Experts of layers that are alike.

    Attributes:
        shapes: Of each array of a layer, by name.
        dims: Likewise.
        most: Of a token, the most experts.
    """

    layers: int
    choices: float
    most: int
    shapes: Mapping[str, tuple[int, ...]]
    dims: Mapping[str, Dims]

    @property
    def experts(self) -> int:
        return next(iter(self.shapes.values()))[0]

    @property
    def width(self) -> int:
        return self.shapes["up"][1]

    @property
    def numbers(self) -> int:
        """In all experts of all layers."""
        return self.layers * sum(math.prod(shape) for shape in self.shapes.values())

    def dtype(self, bound: BoundPlan) -> Any:
        """In which tokens are sent."""
        return jnp.dtype(bound.plan.precision.compute)

    def layout(self, bound: BoundPlan, tokens: tuple[int, int, int]) -> Layout:
        shapes = tuple((name, shape, self.dims[name]) for name, shape in self.shapes.items())
        return layout_of(bound, tokens, self.most, self.choices, shapes, self.dtype(bound))


def _mixtures(step: Step) -> list[_Mixture]:
    """Those of the step's model, in its order."""
    model = step.spec.merge(step.abstract["params"])
    return [_mixture(node) for _, node in nnx.iter_graph(model) if isinstance(node, Experts)]


def _mixture(module: Experts) -> _Mixture:
    names = ("up", "gate", "down") if module.gated else ("up", "down")
    shapes = {name: tuple(getattr(module, name).shape) for name in names}
    stacked = len(shapes["up"]) > len(_DIMS["up"])
    return _Mixture(
        layers=shapes["up"][0] if stacked else 1,
        choices=module.gating.choices,
        most=module.gating.width(shapes["up"][stacked]),
        shapes={name: shape[stacked:] for name, shape in shapes.items()},
        dims={name: _DIMS[name] for name in names},
    )


_DIMS: dict[str, Dims] = {
    "up": ("experts", "expert_embed", "expert_mlp"),
    "gate": ("experts", "expert_embed", "expert_mlp"),
    "down": ("experts", "expert_mlp", "expert_embed"),
}


def _by_form(
    found: list[_Mixture], bound: BoundPlan, tokens: tuple[int, int, int], times: float
) -> dict[str, Sent | None]:
    """Bytes of all layers in a step, each `times` times."""
    forms: dict[str, Sent | None] = {}
    for form in FORMS:
        now, whole = bound.plan.experts, form == "weights"
        try:
            asked = dataclasses.replace(
                now,
                dispatch=form,
                group=None if whole else now.group,
                placement=None if whole else now.placement,
            )
            each = [(one, one.layout(bound.replace(experts=asked), tokens)) for one in found]
        except PlanError:
            forms[form] = None
            continue
        if any(layout.way != form for _, layout in each):
            forms[form] = None
            continue
        parts = [
            (one.layers * times, sent(layout, one.width, one.dtype(bound), one.shapes))
            for one, layout in each
        ]
        forms[form] = Sent(
            tokens=sum(count * part.tokens for count, part in parts),
            weights=sum(count * part.weights for count, part in parts),
        )
    return forms


def _stages(bound: BoundPlan) -> int:
    """Over which layers are shared out."""
    return bound.mesh.shape[MeshAxis.STAGE]
