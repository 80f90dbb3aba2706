"""What the Mosaic kernels of grouped matmuls are tried on before `auto` takes them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from colossax.pallas.bench import tolerance
from colossax.pallas.proof.trial import Trial

from .api import grouped_matmul
from .spec import GroupedVariant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the cases: rows of each group and behind the last, and features narrow and wide."""

    small: tuple[int, ...] = (0, 37, 130, 1, 101)
    behind: int = 30
    small_features: tuple[int, int] = (120, 248)
    large: tuple[int, ...] = (2048, 512, 1024, 1536, 0, 1000, 1048, 1024)
    large_features: tuple[int, int] = (1920, 2048)


def variants() -> Iterator[GroupedVariant]:
    """All that `auto` asks for."""
    wide = (True, False)
    for dtype, wide_in, wide_out in itertools.product(("bfloat16", "float16"), wide, wide):
        yield GroupedVariant(dtype=dtype, wide_in=wide_in, wide_out=wide_out)


def trials(
    variant: GroupedVariant, *, kernel: str = "mosaic", sizes: Sizes = Sizes()
) -> Iterator[Trial]:
    """A small case of uneven groups, and a larger one that is timed."""
    small = (sizes.small, sizes.behind, sizes.small_features)
    yield _trial(variant, kernel, "uneven groups", *small)
    larger = _trial(variant, kernel, "many rows", sizes.large, 0, sizes.large_features)
    yield dataclasses.replace(larger, peers={"xla": functools.partial(_call, "xla")})


def _trial(
    variant: GroupedVariant,
    kernel: str,
    name: str,
    groups: tuple[int, ...],
    behind: int,
    features: tuple[int, int],
) -> Trial:
    t, d, f = sum(groups) + behind, features[variant.wide_in], features[variant.wide_out]
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((t, d), (len(groups), d, f), (t, f))
    arrays = (jax.random.normal(r, x, variant.dtype) for r, x in zip(keys, shapes, strict=True))
    return Trial(
        name=name,
        inputs=(*arrays, jnp.asarray(groups, jnp.int32)),
        kernel=functools.partial(_call, kernel),
        truth=functools.partial(_call, "xla"),
        tolerance=tolerance(variant.dtype),
    )


def _call(name: str, x: Any, w: Any, dy: Any, groups: Any) -> dict[str, Any]:
    """The product and both gradients."""
    out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, groups, implementation=name), x, w)
    dx, dw = pull(dy)
    return {"out": out, "dx": dx, "dw": dw}
