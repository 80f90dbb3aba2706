"""Which layers' arrays live in host memory."""

import dataclasses
import math
from typing import Annotated, Any

from colossax.config.bounds import Bound
from colossax.config.frozen import check_types
from colossax.config.words import nearest
from colossax.errors import PlanError

STATE_KINDS: tuple[str, ...] = ("parameters", "optimizer")
"""What an update changes of a layer."""

HOST_KINDS: tuple[str, ...] = (*STATE_KINDS, "activations")
"""What of a layer may live in host memory; `activations` is all that backward keeps of it."""

SHARES: tuple[str, ...] = (*HOST_KINDS, "experts", "disk")
"""Fields that count layers."""

CPU_UPDATE: tuple[str, ...] = ("off", "auto")

PIPELINED: tuple[str, ...] = ("off", "auto")

PIPELINED_OPTION = "xla_gpu_enable_pipelined_host_offloading"
"""Of the compiler."""

LayerShare = Annotated[float, Bound(low=0, high=1, told="the share of the layers, 0 to 1")]

Gigabytes = Annotated[float, Bound(low=0, above=True, told="gigabytes above 0")]

CLIPPING: tuple[str, ...] = ("stack", "two_pass", "layer", "speculate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Host memory as a second tier under the devices', for models with layer stacks.

    Shares count layers of each stack, from its first one on; the others stay on the device. A
    layer's vectors (norms, biases) stay there always, as does what is in no stack. Where stages
    share the layers, shares are 0 or 1, of parameters, optimizer and activations alone.

    Attributes:
        auto: Find the shares by compiling: as many layers stay on the device as fit its budget.
        parameters: Share of the layers whose parameters live in host memory.
        optimizer: Share of the layers whose optimizer state does.
        activations: Share of the layers of which what backward keeps does.
        experts: Share of the layers of which the experts alone live in host memory, parameters and
            optimizer state. Two layers' are on the device: while one computes, the next one's are
            fetched. Where a model generates, those are fetched that its tokens choose.
        disk: Share of the layers whose optimizer state lies in a file instead: of those in host
            memory, the first ones.
        fused: Update each layer during backward, so that gradients are never whole, though nothing
            need be in host memory. Shares above 0 imply it.
        device_gb: With `auto`, memory of a device that may be used, in units of 1e9 bytes; None:
            97 % of what it has.
        host_gb: Likewise of the host's memory, for each device, and with a segment's `mlp_share`
            of `auto`; None: what is free, less 16 GiB or half of it, divided by the devices of
            this host.
        clipping: How the global norm is known before layers are updated. `stack` keeps every
            gradient until then, beside the optimizer's state, those of matrices in the plan's
            compute or reduction dtype, in which the library's layers give them. `two_pass` runs
            backward twice. `speculate` updates as if nothing had to be scaled, into a second copy
            of the state, and repeats the step if it had. These three are exact. `layer` scales
            each layer's gradient by its own norm: another optimizer, which needs neither memory
            nor time.
        cpu_update: Share of the layers, of those whose parameters and optimizer state are in host
            memory, that the CPU updates while the devices update the others, to the nearest number
            of layers. `auto`: what `colossax bench offload` measured decides, 0 where nothing was
            or where it does not pay. Gradients are kept for it, as with clipping `stack`. Too few
            cores, and the step waits for them.
        pipelined: `auto`: on GPUs, let the compiler move transfers of a loop's iteration into the
            one before or after it, where the test in `colossax bench offload` found that losses
            stay as they are.
    """

    auto: bool = False
    parameters: LayerShare = 0.0
    optimizer: LayerShare = 0.0
    activations: LayerShare = 0.0
    experts: LayerShare = 0.0
    disk: LayerShare = 0.0
    fused: bool = False
    device_gb: Gigabytes | None = None
    host_gb: Gigabytes | None = None
    clipping: str = dataclasses.field(default="stack", metadata={"choices": CLIPPING})
    cpu_update: float | int | str = "off"
    pipelined: str = dataclasses.field(default="off", metadata={"choices": PIPELINED})

    def __post_init__(self):
        for field in (*SHARES, "cpu_update"):
            if type(getattr(self, field)) is int:
                object.__setattr__(self, field, float(getattr(self, field)))
        check_types(self, "plan.offload", error=PlanError)
        for field, known in (("clipping", CLIPPING), ("pipelined", PIPELINED)):
            value = getattr(self, field)
            if value not in known:
                raise PlanError(f"plan.offload.{field}: unknown '{value}'{nearest(value, known)}")
        if self.disk > self.optimizer:
            raise PlanError(
                f"plan.offload.disk: {self.disk} is above plan.offload.optimizer {self.optimizer},"
                " and only what has left the device can lie on disk; raise optimizer to it"
            )
        if self.disk and self.clipping != "stack":
            raise PlanError(
                f"plan.offload.clipping '{self.clipping}': state on disk is updated after backward,"
                " from gradients that are kept; give clipping stack"
            )
        self._check_cpu_update()
        if self.auto and any(getattr(self, field) for field in SHARES):
            raise PlanError(
                "plan.offload: 'auto' finds the shares, and some are given as well; give one"
            )

    def _check_cpu_update(self) -> None:
        share = self.cpu_update
        if share not in CPU_UPDATE and not (isinstance(share, float) and 0 <= share <= 1):
            raise PlanError(
                f"plan.offload.cpu_update: found {share!r}; give off, auto, or the share of the"
                " layers in host memory, 0 to 1"
            )
        if share != "off" and self.clipping != "stack":
            raise PlanError(
                f"plan.offload.clipping '{self.clipping}': what the CPU updates is updated after"
                " backward, from gradients that are kept; give clipping stack, or cpu_update off"
            )

    def with_text(self, text: str) -> "OffloadConfig":
        """These settings with `auto`, `none`, or shares as `parameters=1,activations=0.5`.

        Raises:
            PlanError: The text is none of these, or does not go with the other settings.
        """
        return dataclasses.replace(self, **self.fields_from_text(text))

    def fields_from_text(self, text: str) -> dict[str, Any]:
        """The fields that `with_text` sets.

        Raises:
            PlanError: The text is none of these.
        """
        placed: dict[str, Any] = {"auto": text == "auto", **dict.fromkeys(SHARES, 0.0)}
        if self.auto and text != "auto":  # the budgets were for it
            placed.update(device_gb=None, host_gb=None)
        if text == "none":
            placed.update(fused=False, cpu_update="off")
        for item in text.split(",") if text not in ("auto", "none") else ():
            kind, equals, share = item.partition("=")
            if not equals or kind not in SHARES:
                raise PlanError(
                    f"plan.offload: found '{item}'; write auto, none, or shares of the layers, as"
                    " parameters=1,optimizer=1,activations=0.5"
                )
            try:
                placed[kind] = float(share)
            except ValueError:
                raise PlanError(
                    f"plan.offload.{kind}: found '{share}'; give the share of the layers, 0 to 1"
                ) from None
        return placed

    @property
    def wanted(self) -> bool:
        """Whether layers are updated during backward: any share is above 0, or to be found."""
        return self.auto or self.fused or any(getattr(self, field) for field in SHARES)

    @property
    def settled(self) -> "OffloadConfig":
        """Without budgets, once nothing is left to be found within them."""
        return self if self.auto else dataclasses.replace(self, device_gb=None, host_gb=None)

    def layers(self, kind: str, total: int) -> int:
        """Layers, of a stack of `total`, whose arrays of this kind live in host memory."""
        return math.ceil(getattr(self, kind) * total - 1e-6)

    def cpu_layers(self, total: int) -> int:
        """Layers that the CPU updates, of `total` in host memory; `auto` has yet to be decided."""
        return round(self.cpu_update * total) if isinstance(self.cpu_update, float) else 0
