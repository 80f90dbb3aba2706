"""Names of mesh axes and logical dims."""

import enum


class MeshAxis(enum.StrEnum):
    """Mesh axes, outermost (slowest links) first; every one always exists, size 1 is off.

    `ring_out ring_in` stand in for `ring` where the ring has two levels of links, `depth row col`
    for `tensor` under the tensor layouts 2d, 2.5d and 3d.
    """

    STAGE = "stage"
    DATA = "data"
    FSDP = "fsdp"
    EXPERT = "expert"
    RING_OUT = "ring_out"
    RING_IN = "ring_in"
    RING = "ring"
    ULYSSES = "ulysses"
    TENSOR = "tensor"
    DEPTH = "depth"
    ROW = "row"
    COL = "col"


MESH_AXES: tuple[str, ...] = tuple(axis.value for axis in MeshAxis)

RING_AXES: tuple[str, ...] = (MeshAxis.RING_OUT, MeshAxis.RING_IN, MeshAxis.RING)
"""Axes around which keys and values travel."""

SEQUENCE_AXES: tuple[str, ...] = (*RING_AXES, MeshAxis.ULYSSES)
"""Axes that split a sequence, outer first."""

GROUP_AXES: tuple[str, ...] = (MeshAxis.EXPERT, *SEQUENCE_AXES, MeshAxis.TENSOR)
"""Axes over which the experts of a mixture may be split, outer first."""

LOGICAL_DIMS: frozenset[str] = frozenset(
    "batch seq embed heads kv_heads head_dim mlp vocab layers stages experts expert_embed"
    " expert_mlp scores q_latent kv_latent".split()
)
"""Dims that every plan may speak of; a model may add its own."""
