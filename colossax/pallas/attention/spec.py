"""What an attention call asks for, as far as choosing an implementation needs to know."""

import dataclasses

import jax
import numpy as np

from .mask import Mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static facts of one call.

    `mask` holds shapes or arrays, of which only presence counts; `checked` is whether the call
    stands in a `shard_map` that checks along which mesh axes its operands differ.
    """

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: np.dtype
    mask: Mask = dataclasses.field(compare=False)
    biases: tuple[jax.ShapeDtypeStruct, ...] = ()
    alibi: bool = False
    soft_cap: bool = False
    sinks: bool = False
    return_lse: bool = False
    checked: bool = False
