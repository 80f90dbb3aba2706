"""RoBERTa: a BERT whose positions begin behind the number of its padding."""

import dataclasses

from colossax.config import Natural
from colossax.models.bert.config import BERTConfig
from colossax.nn import TransformConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoBERTaConfig(BERTConfig):
    """Sizes of a RoBERTa: as BERT, `pad + 1` rows of the position table are never reached.

    Attributes:
        pad: Token that fills rows up, whose number positions begin behind.

    Source: Liu et al. 2019.
    """

    token_types: Natural = 1
    pad: Natural = 1

    @property
    def position_offset(self) -> int:
        """Rows of the position table before the first that is reached."""
        return self.pad + 1

    @property
    def transformed(self) -> TransformConfig:
        """What stands before logits of the vocabulary, always with GELU."""
        return TransformConfig()
