"""The Plan: one frozen value that decides everything a model must not know."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from colossax.config import layouts
from colossax.config.axes import MESH_AXES
from colossax.config.experts import ExpertsConfig
from colossax.config.frozen import (
    FrozenDict,
    check_names,
    check_types,
    from_json,
    nearest,
    non_default_json,
    to_json,
)
from colossax.config.offload import PIPELINED_OPTION, OffloadConfig
from colossax.config.parts import (
    AttentionConfig,
    BatchConfig,
    LossConfig,
    PipelineConfig,
    Segment,
)
from colossax.config.precision import Precision
from colossax.config.rules import Rules
from colossax.documents import parse_json
from colossax.errors import PlanError

if TYPE_CHECKING:
    import jax

    from colossax.config.binding import BoundPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is spread over devices and time; pure data, hashable, JSON both ways.

    Attributes:
        version: Of the JSON form.
        mesh: Size per mesh axis; one may be -1 (all remaining devices), absent axes are 1.
            Empty: `fsdp` takes all devices.
        rules: Logical dims to mesh axes, per role.
        tensor_layout: How matrices are split: `1d` over `tensor`, `2d` over `row` and `col`, `2.5d`
            also over `depth`, or `3d` over all three.
        tensor_matmul: How split matmuls communicate. `compiler` leaves it to XLA; `gather` gathers
            operands in regions of our own; `cannon` (2d, 2.5d, row equal to col) passes blocks
            around instead; `overlap` (1d with the sequence split between blocks) runs gathers and
            reductions step by step under the matmuls. `auto`: `compiler` for 1d, `gather` else.
        attention: Attention kernel and sequence scheme.
        batch: Microbatches.
        pipeline: Schedule and microbatches of the stages.
        experts: Where the experts of mixtures live, and how tokens get to them.
        segments: Layer runs and their remat policies; counts sum to the stack's layers.
        precision: Dtypes per role.
        loss: Chunks of the vocabulary loss.
        offload: Host memory as a second tier.
        compiler_options: Passed to XLA as they are.
    """

    version: int = 1
    mesh: Mapping[str, Any] = dataclasses.field(
        default=FrozenDict(), metadata={"choices": MESH_AXES}
    )
    rules: Rules = Rules()
    tensor_layout: str = dataclasses.field(
        default="1d", metadata={"choices": layouts.TENSOR_LAYOUTS}
    )
    tensor_matmul: str = dataclasses.field(
        default="auto", metadata={"choices": layouts.TENSOR_MATMULS}
    )
    attention: AttentionConfig = AttentionConfig()
    batch: BatchConfig = BatchConfig()
    pipeline: PipelineConfig = PipelineConfig()
    experts: ExpertsConfig = ExpertsConfig()
    segments: tuple[Segment, ...] = (Segment(),)
    precision: Precision = Precision()
    loss: LossConfig = LossConfig()
    offload: OffloadConfig = OffloadConfig()
    compiler_options: Mapping[str, Any] = FrozenDict()

    def __new__(cls, **fields: Any):
        """Refuse what is no field, with the nearest, before Python does without."""
        check_names(cls, fields, "plan", error=PlanError)
        return super().__new__(cls)

    def __post_init__(self):
        if self.version != 1:
            raise PlanError(f"plan.version: found {self.version}; this library reads version 1")
        if not isinstance(self.mesh, Mapping):
            raise PlanError(f"plan.mesh: found {self.mesh!r}; write it as axis=size, e.g. fsdp=4")
        object.__setattr__(self, "mesh", FrozenDict(dict(self.mesh)))
        object.__setattr__(self, "compiler_options", FrozenDict(dict(self.compiler_options)))
        if not isinstance(self.segments, Iterable):
            raise PlanError(f"plan.segments: found {self.segments!r}; give a tuple of segments")
        object.__setattr__(self, "segments", tuple(self.segments))
        check_types(self, "plan", error=PlanError)
        _check_mesh(self.mesh)
        layouts.check_names(self.tensor_layout, self.tensor_matmul)
        if sum(s.count == -1 for s in self.segments) > 1 or not self.segments:
            raise PlanError(
                "plan.segments: at most one segment may have count -1, at least one is needed"
            )
        if self.offload.pipelined == "auto" and PIPELINED_OPTION in self.compiler_options:
            raise PlanError(
                f"plan.compiler_options: sets {PIPELINED_OPTION}, and plan.offload.pipelined 'auto'"
                " decides on it; drop one of them"
            )

    @property
    def _finds_mlp(self) -> bool:
        return any(segment.mlp_share == "auto" for segment in self.segments)

    def check_budgets(self) -> None:
        """Refuse an `offload.device_gb` or `host_gb` that nothing would keep within.

        Raises:
            PlanError: With the remedy.
        """
        offload = self.offload
        if offload.device_gb is not None and not offload.auto:
            raise PlanError(
                f"plan.offload.device_gb: found {offload.device_gb:g}, and only plan.offload auto"
                " keeps within it; give auto, or leave the budget out (none)"
            )
        if offload.host_gb is not None and not (offload.auto or self._finds_mlp):
            raise PlanError(
                f"plan.offload.host_gb: found {offload.host_gb:g}, and only plan.offload auto and"
                " a segment's mlp_share auto keep within it; give one of them, or leave the budget"
                " out (none)"
            )

    def placed(self, shares: Mapping[str, Any]) -> "Plan":
        """With these offload settings, found within a budget, in place of `auto` and the budget.

        An `mlp_share` that is yet to be found keeps the budget of the host.
        """
        host_gb = self.offload.host_gb if self._finds_mlp else None
        changes: dict[str, Any] = {"auto": False, "device_gb": None, "host_gb": host_gb, **shares}
        return self.replace(offload=dataclasses.replace(self.offload, **changes))

    def mesh_sizes(self, devices: int) -> dict[str, int]:
        """Size of every mesh axis on this many devices.

        Raises:
            PlanError: The product is not the number of devices.
        """
        mesh = dict(self.mesh) or {"fsdp": -1}
        sizes = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
        if open_axis is not None and devices % fixed == 0:
            sizes[open_axis] = devices // fixed
        if math.prod(sizes.values()) != devices:
            shown = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
            raise PlanError(
                f"plan.mesh {shown}: the sizes multiply to {fixed},"
                f" but there are {devices} devices;"
                f" choose sizes whose product is {devices}, or set one axis to -1"
            )
        layouts.check_sizes(self.tensor_layout, self.tensor_matmul, sizes)
        return sizes

    @functools.cached_property
    def effective_rules(self) -> Rules:
        """`rules` as the tensor layout turns them."""
        return layouts.spread(self.rules, self.tensor_layout, self.tensor_matmul)

    def bind(self, devices: "Sequence[jax.Device] | None" = None) -> "BoundPlan":
        """This plan on these devices (default: all of them); see `BoundPlan`."""
        from colossax.config.binding import bind

        return bind(self, devices)

    def to_json(self) -> str:
        """All fields, keys sorted; `Plan.from_json` gives an equal plan."""
        return json.dumps(to_json(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> "Plan":
        """The plan `to_json` wrote, or the object in that text.

        Raises:
            PlanError: Not JSON, an unknown field, or a value that does not fit.
        """
        try:
            data = parse_json(text, (dict, list)) if isinstance(text, str) else dict(text)
        except ValueError as problem:
            raise PlanError(f"plan: not JSON ({problem}); write it with Plan.to_json") from problem
        return from_json(cls, data, where="plan", error=PlanError)

    @property
    def hash(self) -> str:
        """16 hex digits over the fields that differ from their defaults."""
        text = json.dumps(non_default_json(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> "Plan":
        """A copy with fields replaced."""
        return dataclasses.replace(self, **changes)


def _check_mesh(mesh: Mapping[str, Any]) -> None:
    for axis, size in mesh.items():
        if axis not in MESH_AXES:
            raise PlanError(f"plan.mesh: no axis is called '{axis}'{nearest(axis, MESH_AXES)}")
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise PlanError(
                f"plan.mesh: axis '{axis}' has size {size!r}; give 1 or more, or -1 once"
            )
    if sum(size == -1 for size in mesh.values()) > 1:
        raise PlanError("plan.mesh: several axes are -1; only one can take the remaining devices")
