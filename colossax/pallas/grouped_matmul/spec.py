"""What a grouped matmul asks for, as far as choosing an implementation needs to know."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSpec:
    """Static facts of one call: t rows in e groups, d to f features."""

    rows: int
    groups: int
    features_in: int
    features_out: int
    dtype: np.dtype

    def __str__(self) -> str:
        sizes = f"{self.rows} x {self.features_in} x {self.features_out}"
        return f"{sizes} in {self.groups} groups, {self.dtype}"
