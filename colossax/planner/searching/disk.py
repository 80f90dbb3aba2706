"""The disk tier by formula: a file in which layers' optimizer state lies, and what it takes.

A record of a layer has its parameters and its optimizer state; a file holds every record twice, as
one step reads an epoch and writes the next (docs/design/offload.md). The layers in it are updated
once a step's program has ended, so that nothing of it has compute beside it.
"""

import math

from colossax.aot import Target
from colossax.offload.disk import RING
from colossax.offload.disk.layout import BLOCK_BYTES, in_blocks
from colossax.planner.profiling import ModelProfile
from colossax.planner.searching.predicting import OnMesh

DISK_BYTES_PER_S = 2e9
"""Of a host's disk each way, while it reads and writes at once: assumed, for `colossax bench
offload` measures no disk."""

_EPOCHS, _TAIL_COPIES = 2, 2


class LayersFile:
    """Of a model on the devices of one host, which share its memory and its disk.

    Attributes:
        record: Bytes of a layer in an epoch.
        tail: Of all that is of no layer, which is there too where all layers are.
    """

    def __init__(self, mesh: OnMesh, layers: int):
        """Args:
        mesh: Without stages.
        layers: Of its one stack.
        """
        profile, params = mesh.profile, mesh.parts.bound.plan.precision.params
        self._devices, self._layers = mesh.target.size, layers
        self.record, self.tail = float(BLOCK_BYTES), 0.0
        for info, moment, learns in zip(
            profile.infos, profile.moments, profile.learns, strict=True
        ):
            numbers = math.prod(info.shape)
            sizes = numbers * info.at_rest(params).itemsize, numbers * moment
            if info.total_layers is not None and learns:
                self.record += sum(in_blocks(math.ceil(size / layers)) for size in sizes)
            else:
                self.tail += sum(sizes)

    def size(self, count):
        """Bytes of the file for each device, with so many layers in it."""
        held = count * self.record + in_blocks(int(self.tail)) * (count == self._layers)
        return _EPOCHS * held / self._devices

    def through(self, count):
        """Bytes of the host for each device, that records are read to and written from."""
        held = RING * self.record * (count > 0)
        return (held + _TAIL_COPIES * self.tail * (count == self._layers)) / self._devices

    def seconds(self, count):
        """Of a step, in which it is read and written once."""
        held = count * self.record + self.tail * (count == self._layers)
        return held / DISK_BYTES_PER_S


def unfiled(profile: ModelProfile, target: Target) -> str:
    """Why a model's optimizer state cannot lie in a file; empty where it can."""
    stacks = {info.segment for info in profile.infos} - {None}
    if target.nodes > 1:
        return f"a file is of one node's processes, and {target.name} has {target.nodes}"
    if len(stacks) != 1 or len(profile.kinds) != 1:
        return "a file holds the layers of one stack that are alike, and this model has others"
    if any(info.update is not None for info in profile.infos):
        return "a parameter of this model has an update of its own"
    states = zip(profile.infos, profile.moments, strict=True)
    if not any(moment for info, moment in states if info.total_layers is not None):
        return "the optimizer has no state of layers"
    return ""
