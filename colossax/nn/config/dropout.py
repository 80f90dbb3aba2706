"""What a model drops while it is trained, as data."""

import dataclasses
from typing import Annotated

from colossax.config import Bound, check_types

Rate = Annotated[float, Bound(low=0, high=1, below=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DropoutConfig:
    """Shares of values that are 0 in a step of training; the others are divided by `1 - share`.

    Attributes:
        embedding: Of what enters the first layer.
        residual: Of what each sublayer adds to the residual stream.
        attention: Of the probabilities of attention.

    Source: Srivastava et al. 2014, Dropout; the places are those of Vaswani et al. 2017.
    """

    embedding: Rate = 0.0
    residual: Rate = 0.0
    attention: Rate = 0.0

    def __post_init__(self):
        check_types(self, "model.dropout")

    def __bool__(self) -> bool:
        return bool(self.embedding or self.residual or self.attention)
