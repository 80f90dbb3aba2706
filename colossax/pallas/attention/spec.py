"""What an attention call asks for, as far as choosing an implementation needs to know."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np

from colossax.pallas.proof import Variant
from colossax.pallas.varying import varies

from .mask import Mask
from .operands import Operands, Scoring


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Static facts of one call.

    `mask` holds shapes or arrays, of which only presence counts; `checked` is whether the call
    stands in a `shard_map` that checks along which mesh axes its operands differ; `block` whether
    it is a step of a ring.
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
    relative: int = 0
    alibi: bool = False
    soft_cap: bool = False
    sinks: bool = False
    dropout: bool = False
    return_lse: bool = False
    checked: bool = False
    block: bool = False

    @classmethod
    def of(
        cls, operands: Operands, scoring: Scoring, *, return_lse: bool, block: bool = False
    ) -> "AttentionSpec":
        """Of operands with one batch dim, arrays or their shapes."""
        q, k, v = operands.q, operands.k, operands.v
        return cls(
            batch=q.shape[0],
            q_length=q.shape[1],
            kv_length=k.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            dtype=q.dtype,
            mask=operands.mask,
            biases=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in scoring.arrays),
            relative=len(scoring.relative),
            alibi=scoring.alibi_slopes is not None,
            soft_cap=scoring.soft_cap is not None,
            sinks=scoring.sinks is not None,
            dropout=scoring.dropout is not None,
            return_lse=return_lse,
            checked=varies((operands, scoring.biases)),
            block=block,
        )

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.q_length} x {self.kv_length}"
        dims = {self.head_dim, self.v_head_dim}
        heads = f"{self.heads}/{self.kv_heads} heads of {'/'.join(map(str, sorted(dims)))}"
        mask = self.mask
        asked = {
            "causal": mask.causal,
            f"window {mask.window}": mask.window is not None,
            "prefix": mask.prefix is not None,
            "segments": mask.q_segments is not None,
            "positions": not mask.indexed,
            "kv_valid": mask.kv_valid is not None,
            f"{len(self.biases)} biases": self.biases,
            f"{self.relative} relative biases": self.relative,
            "alibi": self.alibi,
            "soft cap": self.soft_cap,
            "sinks": self.sinks,
            "dropout": self.dropout,
            "block": self.block,
        }
        return ", ".join(
            [sizes, heads, str(self.dtype), *(name for name, yes in asked.items() if yes)]
        )

    @property
    def variant(self) -> "AttentionVariant":
        """Of the kernels that the call would take."""
        return AttentionVariant(
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.dtype.name,
            bias=self.biases[0].dtype.name if self.biases else "",
            soft_cap=self.soft_cap,
            block=self.block,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionVariant(Variant):
    """What selects compiled kernels, forward and backward; masks and sizes are their operands.

    `bias` is its dtype or empty. A block has its output in float32 and may start from what others
    have found.
    """

    operation: ClassVar[str] = "attention"
    head_dim: int
    v_head_dim: int
    dtype: str
    bias: str = ""
    soft_cap: bool = False
    block: bool = False

    def __str__(self) -> str:
        sizes = dict.fromkeys((self.head_dim, self.v_head_dim))
        asked = {
            f"bias of {self.bias}": self.bias,
            "soft cap": self.soft_cap,
            "steps of a ring": self.block,
        }
        more = (name for name, yes in asked.items() if yes)
        return ", ".join(["attention", f"heads of {'/'.join(map(str, sizes))}", self.dtype, *more])
