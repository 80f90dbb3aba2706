"""Names of mesh axes and logical dims."""

import enum


class MeshAxis(enum.StrEnum):
    """Mesh axes, outermost (slowest links) first; every one always exists, size 1 is off."""

    STAGE = "stage"
    DATA = "data"
    FSDP = "fsdp"
    EXPERT = "expert"
    RING = "ring"
    ULYSSES = "ulysses"
    TENSOR = "tensor"


MESH_AXES: tuple[str, ...] = tuple(axis.value for axis in MeshAxis)

USABLE_AXES: frozenset[str] = frozenset({MeshAxis.DATA, MeshAxis.FSDP, MeshAxis.TENSOR})
"""Axes that may be larger than 1 today; the others are declared so that meshes keep their shape."""

LOGICAL_DIMS: frozenset[str] = frozenset(
    "batch seq embed heads kv_heads head_dim mlp vocab layers stages experts capacity".split()
)
"""Dims that every plan may speak of; a model may add its own."""
