"""What learns beside a frozen model, as data."""

import dataclasses
import math

from colossax.config import Natural, Positive, check_types
from colossax.errors import InputError
from colossax.nn.config.dropout import Rate

BASES = ("own", "nf4", "int8")
"""How the frozen matrices of layers may be kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A narrow pair of matrices beside each of some frozen ones: `x W + scale (x A) B`.

    `A` is `[*in, rank]` and random, `B` `[rank, *out]` and begins at 0, so that a model begins as
    it is without. All that is no adapter is frozen.

    Attributes:
        rank: Columns of `A`; 0: there is no adapter, and all learns.
        alpha: The scale is `alpha / rank`.
        targets: Which maps have one: patterns of the names of maps in a layer (`attn/q`, `mlp/up`)
            and of those outside of all (`head`), by commas; `*` stands for anything.
        rslora: The scale is `alpha / sqrt(rank)`, which keeps updates alike whatever the rank.
        dora: Length and direction apart: columns of `W + scale A B` are brought to the lengths of
            those of `W` plus a vector that learns.
        base: How matrices of the layers' maps are kept: `own`, in their own type; `nf4`, in four
            bits; `int8`, in eight.
        double: Of `nf4`: whether scales are in eight bits too.
        dropout: Share of what `A` reads in layers that is 0 in a step of training, of each map by
            itself; the rest is divided by `1 - share`. `W` reads all of it.

    Source: Hu et al. 2021, LoRA; Kalajdzievski 2023, rsLoRA; Liu et al. 2024, DoRA;
    Dettmers et al. 2023, QLoRA.
    """

    rank: Natural = 0
    alpha: Positive = 16.0
    targets: str = "attn/*"
    rslora: bool = False
    dora: bool = False
    base: str = dataclasses.field(default="own", metadata={"choices": BASES})
    double: bool = False
    dropout: Rate = 0.0

    def __post_init__(self):
        check_types(self, "adapter")
        if not self.patterns:
            raise InputError(
                "adapter.targets: it names no maps; give patterns by commas, as 'attn/*,mlp/down'"
            )

        if self.base not in BASES:
            raise InputError(
                f"adapter.base: found '{self.base}'; give {', '.join(BASES[:-1])} or {BASES[-1]}"
            )
        if self.double and self.base != "nf4":
            raise InputError(
                f"adapter.double: it is of the scales of nf4, and adapter.base is {self.base};"
                " give adapter.base nf4, or leave it out"
            )
        if self.dropout and self.dora:
            raise InputError(
                f"adapter.dropout: found {self.dropout:g} beside adapter.dora, whose lengths are of"
                " columns that read all of an input; leave one of them out"
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        """Those of `targets`, one by one."""
        return tuple(filter(None, (one.strip() for one in self.targets.split(","))))

    @property
    def scale(self) -> float:
        """What `(x A) B` is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __bool__(self) -> bool:
        return self.rank > 0
