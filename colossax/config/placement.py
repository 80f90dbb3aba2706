"""Where the arrays of a layer live, and who updates it."""

import dataclasses
from collections.abc import Collection

from colossax.config.frozen import check_types
from colossax.config.offload import HOST_KINDS
from colossax.config.words import nearest
from colossax.errors import PlanError

SAVEABLE: tuple[str, ...] = ("qkv", "attention", "mlp")
"""Names a layer gives to intermediates that a remat policy may keep."""

NAMED_ACTIVATIONS: tuple[str, ...] = ("input", *SAVEABLE)
"""Those that may be kept in host memory by name."""

NAMES: tuple[str, ...] = (
    *("parameters", "optimizer", "experts", "disk", "cpu", "activations"),
    *NAMED_ACTIVATIONS,
)
"""What a placement's text may name, in the order in which it is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where parameters, optimizer state and activations of a layer live, and who updates it.

    `from_text` reads the text of `Segment.offload` and `str` writes it: `none`, or what is not on
    the device, joined by `+`.

    Attributes:
        params: `device` or `host`.
        optimizer: The optimizer's state: `device`, `host`, or `disk`, a file.
        experts: Parameters and optimizer state of a mixture's experts, where the layer's others
            may be elsewhere: `device` or `host`.
        activations: All that backward keeps of the layer: `device` or `host`.
        named_activations: What is kept in host memory by name, beside what remat keeps: `input`
            (what the layer gets from the one before), `qkv`, `attention`, `mlp`.
        updated_by_cpu: Whether the CPU updates the layer, in host memory.

    Raises:
        PlanError: An unknown memory or name; the CPU would update what is not in its memory.
    """

    params: str = "device"
    optimizer: str = "device"
    experts: str = "device"
    activations: str = "device"
    named_activations: frozenset[str] = frozenset()
    updated_by_cpu: bool = False

    def __post_init__(self):
        check_types(self, "placement", error=PlanError)
        _check_memory("params", self.params, ("device", "host"))
        _check_memory("optimizer", self.optimizer, ("device", "host", "disk"))
        _check_memory("experts", self.experts, ("device", "host"))
        _check_memory("activations", self.activations, ("device", "host"))
        _check_named(self.named_activations)
        if self.updated_by_cpu and not self.cpu_can_update:
            raise PlanError(
                f"segments.offload: '{self}' lets the CPU update what is not in its memory;"
                " write parameters+optimizer+cpu"
            )

    @classmethod
    def from_text(cls, text: str) -> "Placement":
        """The placement that a text names, in whatever order.

        Raises:
            PlanError: An unknown name, or names that do not go together.
        """
        return cls() if text == "none" else cls._from_names(text.split("+"))

    @classmethod
    def _from_names(cls, names: Collection[str]) -> "Placement":
        for name in names:
            if name not in NAMES:
                raise PlanError(f"segments.offload: unknown '{name}'{nearest(name, NAMES)}")
        if "disk" in names and "optimizer" not in names:
            raise PlanError(
                "segments.offload: 'disk' says where the optimizer's state lies that is not on the"
                " device; write optimizer+disk"
            )

        def memory(kind: str) -> str:
            return "host" if kind in names else "device"

        return cls(
            params=memory("parameters"),
            optimizer="disk" if "disk" in names else memory("optimizer"),
            experts=memory("experts"),
            activations=memory("activations"),
            named_activations=frozenset(NAMED_ACTIVATIONS).intersection(names),
            updated_by_cpu="cpu" in names,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What its text names, in the order of `NAMES`."""
        there = {
            "parameters": self.params_on_host,
            "optimizer": self.optimizer_off_device,
            "experts": self.experts_on_host,
            "disk": self.optimizer_on_disk,
            "cpu": self.updated_by_cpu,
            "activations": self.activations_on_host,
        }
        return tuple(name for name in NAMES if there.get(name, name in self.named_activations))

    def __str__(self) -> str:
        return "+".join(self.names) or "none"

    def with_name(self, name: str) -> "Placement":
        """This placement with one more name in its text: what was away stays where it was.

        Raises:
            PlanError: It is unknown, or does not go with the others.
        """
        return self._from_names((*self.names, name))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of `HOST_KINDS`, those that are not on the device."""
        return tuple(kind for kind in HOST_KINDS if kind in self.names)

    @property
    def all_on_device(self) -> bool:
        """Whether nothing of the layer is anywhere else."""
        return self == Placement()

    @property
    def params_on_host(self) -> bool:
        """Whether parameters are in host memory."""
        return self.params == "host"

    @property
    def optimizer_off_device(self) -> bool:
        """Whether the optimizer's state is in host memory or in a file."""
        return self.optimizer != "device"

    @property
    def optimizer_on_disk(self) -> bool:
        """Whether the optimizer's state is in a file."""
        return self.optimizer == "disk"

    @property
    def experts_on_host(self) -> bool:
        """Whether experts are in host memory, by a name of their own."""
        return self.experts == "host"

    @property
    def any_params_on_host(self) -> bool:
        """Whether any parameters are in host memory."""
        return self.params_on_host or self.experts_on_host

    @property
    def experts_alone(self) -> bool:
        """Whether of the parameters those of experts alone are in host memory."""
        return self.experts_on_host and not self.params_on_host

    @property
    def cpu_can_update(self) -> bool:
        """Whether all that an update changes is in host memory."""
        return self.params == self.optimizer == "host"

    @property
    def activations_on_host(self) -> bool:
        """Whether all that backward keeps is in host memory."""
        return self.activations == "host"

    @property
    def input_on_host(self) -> bool:
        """Whether what the layer gets from the one before is kept in host memory."""
        return self.activations_on_host or "input" in self.named_activations

    @property
    def saved_on_host(self) -> frozenset[str]:
        """Those kept in host memory by a name that a remat policy may keep."""
        return self.named_activations.intersection(SAVEABLE)


def _check_memory(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"placement.{field}: unknown '{value}'{nearest(value, known)}")


def _check_named(names: frozenset[str]) -> None:
    if not isinstance(names, frozenset):
        raise PlanError(
            f"placement.named_activations: found {names!r}; give a frozenset of names, of"
            f" {', '.join(NAMED_ACTIVATIONS)}"
        )
    for name in sorted(names.difference(NAMED_ACTIVATIONS), key=str):
        raise PlanError(
            f"placement.named_activations: unknown '{name}'{nearest(str(name), NAMED_ACTIVATIONS)}"
        )
