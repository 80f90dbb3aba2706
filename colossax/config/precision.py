"""Dtypes of a plan, how a loss in float16 is scaled, and which matmuls are in float8."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from colossax.config.bounds import Bound, Count, Positive, at_least
from colossax.config.frozen import check_types
from colossax.config.words import nearest
from colossax.errors import PlanError

DTYPES: tuple[str, ...] = ("float32", "bfloat16")

NARROW: tuple[str, ...] = (*DTYPES, "float16")
"""Of what is made anew in each step, and not added up over many."""

ROUNDINGS: tuple[str, ...] = ("nearest", "stochastic")

MATMULS: tuple[str, ...] = ("compute", "float8")

SCALINGS: tuple[str, ...] = ("current", "delayed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """By what a loss computed in float16 is multiplied before it is differentiated.

    float16 knows no number below 6e-8: the scale keeps gradients above that. They are divided by
    it in the dtype of accumulation, before they are clipped. A step whose gradients overflow is
    skipped and backs the scale off; after `growth_interval` steps in a row without, it grows.

    Attributes:
        initial: Of a new run; powers of two scale exactly.
        growth_factor: What it is multiplied by after that many steps.
        growth_interval: Steps in a row without overflow after which it grows.
        backoff_factor: What it is multiplied by when gradients overflow.
        minimum: It never falls below. Steps that overflow there count as not finite.
    """

    initial: Positive = 2.0**16
    growth_factor: Annotated[float, at_least(1)] = 2.0
    growth_interval: Count = 2000
    backoff_factor: Annotated[
        float, Bound(low=0, high=1, above=True, below=True, told="a number between 0 and 1")
    ] = 0.5
    minimum: Positive = 1.0

    def __post_init__(self):
        check_types(self, "precision.loss_scale", error=PlanError)
        if self.initial < self.minimum:
            raise PlanError(
                f"precision.loss_scale.initial: found {self.initial:g}, which is below the minimum"
                f" {self.minimum:g}; give as much or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
    """How matmuls in float8 are scaled, and which stay in the compute dtype.

    Attributes:
        scaling: By the largest of what is multiplied (`current`), or of what was in the steps
            before (`delayed`), which has to wait for nothing.
        history: Of `delayed`, how many steps back.
        margin: Of `delayed`, powers of two that are left for what is larger than before; what is
            still larger is cut to the largest number.
        keep: Matrices with a dim of these names stay in the compute dtype; one text, divided by
            commas, or several.
    """

    scaling: str = dataclasses.field(default="current", metadata={"choices": SCALINGS})
    history: Count = 16
    margin: Annotated[int, at_least(0)] = 0
    keep: Any = ("vocab",)

    def __post_init__(self):
        check_types(self, "precision.float8", error=PlanError)
        object.__setattr__(self, "keep", _names(self.keep))
        if self.scaling not in SCALINGS:
            raise PlanError(
                f"precision.float8.scaling: unknown '{self.scaling}'"
                f"{nearest(self.scaling, SCALINGS)}"
            )


def _names(given: Any) -> tuple[str, ...]:
    """Names of dims, from a text or several."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise PlanError(
            f"precision.float8.keep: found {given!r}; give names of dims, as in 'vocab,experts'"
        )
    return tuple(name.strip() for name in names if name.strip())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtype per role, by NumPy name or as a dtype: float32, bfloat16, of some float16.

    Attributes:
        params: Parameters at rest.
        compute: Matmuls and activations. In float16 the loss is scaled (`loss_scale`).
        reduction: Parameters' gradients as devices sum them; None: as `compute`, half the bytes
            of float32. float16 only where `compute` is.
        accumulation: Gradients summed over microbatches, and as the optimizer gets them.
        cache: Keys and values of inference.
        rounding: Of parameters in bfloat16 when they are updated: to the `nearest`, which loses
            updates below 1/512 of a parameter, or `stochastic`, which keeps them on average.
        loss_scale: How the loss is scaled in float16; else it is not.
        matmul: Of weights, in training: in the `compute` dtype, or in `float8`: inputs and weights
            in e4m3, gradients of results in e5m2, added up in float32.
        float8: How they are scaled then, and which.
    """

    params: Any = dataclasses.field(default="float32", metadata={"choices": DTYPES})
    compute: Any = dataclasses.field(default="float32", metadata={"choices": NARROW})
    reduction: Any = dataclasses.field(default=None, metadata={"choices": NARROW})
    accumulation: Any = dataclasses.field(default="float32", metadata={"choices": DTYPES})
    cache: Any = dataclasses.field(default="float32", metadata={"choices": NARROW})
    rounding: str = dataclasses.field(default="nearest", metadata={"choices": ROUNDINGS})
    loss_scale: LossScale = LossScale()
    matmul: str = dataclasses.field(default="compute", metadata={"choices": MATMULS})
    float8: Float8 = Float8()

    def __post_init__(self):
        check_types(self, "precision", error=PlanError)
        for field in dataclasses.fields(self):
            known = field.metadata.get("choices")
            value = getattr(self, field.name)
            if known is None or (value is None and field.default is None):
                continue
            name = value if isinstance(value, str) else _dtype_name(value)
            if name in NARROW and name not in known:
                raise PlanError(
                    f"precision.{field.name}: found '{name}', in which what is added up over many"
                    f" steps or microbatches is lost; give {' or '.join(known)}"
                )
            if name not in known:
                raise PlanError(f"precision.{field.name}: unknown '{name}'{nearest(name, known)}")
            object.__setattr__(self, field.name, name)
        if self.reduction == "float16" and not self.scales_loss:
            raise PlanError(
                f"precision.reduction: found 'float16' beside compute '{self.compute}', whose loss"
                " is not scaled; give compute 'float16' too, or another reduction"
            )
        if self.rounding == "stochastic" and self.params != "bfloat16":
            raise PlanError(
                f"precision.rounding: found 'stochastic', and parameters are kept in {self.params},"
                " which is not rounded; give precision.params 'bfloat16', or rounding 'nearest'"
            )

        if self.matmul == "float8" and self.scales_loss:
            raise PlanError(
                "precision.matmul: found 'float8' beside compute 'float16', in which products of"
                " numbers as large as 448 overflow; give compute 'bfloat16'"
            )

    def in_float8(self, dims: Sequence[str | None]) -> bool:
        """Whether a matrix with these dims is multiplied in float8; those of adapters are not."""
        return self.matmul == "float8" and not {*self.float8.keep, "rank"}.intersection(dims)

    def remembers(self, dims: Sequence[str | None]) -> bool:
        """Whether it has a history of scales."""
        return self.in_float8(dims) and self.float8.scaling == "delayed"

    @property
    def multiplies_in(self) -> str:
        """`float8`, or the compute dtype: what a share of the devices' peak is measured by."""
        return "float8" if self.matmul == "float8" else self.compute

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is multiplied by a scale before it is differentiated."""
        return self.compute == "float16"


def _dtype_name(value: Any) -> str:
    import numpy as np  # takes longer to import than all of this room

    try:
        return np.dtype(value).name
    except TypeError:
        return repr(value)
