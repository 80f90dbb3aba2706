"""One way to run on a mesh, as formulas score it."""

import dataclasses

from colossax.planner.searching.predicting import Policies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """Layers whose arrays live in host memory.

    Attributes:
        layers: Of the deepest stack.
        parameters: Of them.
        optimizer: Likewise those whose optimizer state does.
        activations: Likewise those of which what backward keeps does.
    """

    layers: int
    parameters: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def shares(self) -> dict[str, float]:
        """Of the layers, by the names that plans have."""
        names = ("parameters", "optimizer", "activations")
        return {name: getattr(self, name) / self.layers for name in names}

    @property
    def shown(self) -> str:
        """For people; empty where all is on the device."""
        parts = [
            f"{name} of {'all' if count == self.layers else count} layers"
            for name in ("parameters", "optimizer", "activations")
            if (count := getattr(self, name))
        ]
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
