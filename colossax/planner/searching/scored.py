"""One way to run on a mesh, as formulas score it."""

import dataclasses
from typing import Any

from colossax.config import HOST_KINDS
from colossax.planner.searching.predicting import Policies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """Layers whose arrays live in host memory.

    Attributes:
        layers: Of the deepest stack.
        parameters: Of them.
        optimizer: Likewise those whose optimizer state does.
        activations: Likewise those of which what backward keeps does.
        disk: Of those whose optimizer state has left the device, those that have it in a file.
        staged: Whether stages share the layers.
    """

    layers: int
    parameters: int = 0
    optimizer: int = 0
    activations: int = 0
    disk: int = 0
    staged: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Of `plan.offload`: shares of the layers, which are updated one by one where they are of
        no stages, wherever they are."""
        shares = {name: getattr(self, name) / self.layers for name in (*HOST_KINDS, "disk")}
        return shares if self.staged else {"fused": True, **shares}

    @property
    def shown(self) -> str:
        """For people; empty where all is on the device."""
        parts = [
            f"{name} of {'all' if count == self.layers else count} layers"
            for name in HOST_KINDS
            if (count := getattr(self, name))
        ]
        if self.disk:
            in_file = f"optimizer of {'all' if self.disk == self.layers else self.disk} layers"
            return f"in host memory {', '.join(parts)}, but in a file {in_file}"
        return f"in host memory {', '.join(parts)}" if parts else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """A way to run.

    Attributes:
        seconds: Of a step.
        bytes: Of a device.
        rows: Of a microbatch.
        chunks: Of the vocabulary.
        mix: Policies of each kind of layer.
        fastest: Whether no policy would be faster, had it more room.
        placed: What lives in host memory; None where it was not looked at.
    """

    seconds: float
    bytes: float
    rows: int
    chunks: int
    mix: Policies
    fastest: bool
    placed: Placed | None = None
