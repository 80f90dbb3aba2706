"""How a scheme of split sequences runs."""

import dataclasses

from colossax.pallas.attention import Operands

from .axes import RingAxes
from .order import Order, check_order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a scheme runs; what a trace depends on.

    Attributes:
        axes: The ring.
        order: How the sequence lies on its ranks, one of `Order`.
        implementation: Of each step, see `attend_block`.
    """

    axes: RingAxes
    order: str = Order.ZIGZAG
    implementation: str = "auto"

    def check(self, operands: Operands) -> None:
        """Refuse an order that is none, or cannot be had with these lengths.

        Raises:
            ValueError: In those cases.
        """
        for length in operands.lengths:
            check_order(self.order, length, self.axes.size)
