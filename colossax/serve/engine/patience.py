"""How often engines are started again that serve nobody."""

STARTS = 5
"""So many engines in a row that failed by themselves, and said no token, are enough."""

DEATHS = 20
"""So many in a row that said no token, though each died while it ran somebody, are too."""

STEADY_S = 60.0
"""An engine that was ready for so long did start."""


class Patience:
    """Ends after failures in a row.

    What requests do to engines is `Handing`'s, which finds the one and gives it up; a few of them
    that come together are no reason to end a server. Counted are engines that died with nobody to
    blame; those with somebody, too, at a greater number.
    """

    def __init__(self) -> None:
        self._alone = self._deaths = 0

    def served(self) -> None:
        """A token was said."""
        self._alone = self._deaths = 0

    def died(self, *, blamed: bool, ready_s: float) -> bool:
        """Whether no other is to be started.

        Args:
            blamed: Whether a request was on its way that may be why.
            ready_s: For how long the engine had been ready.
        """
        if ready_s >= STEADY_S:
            self.served()
        self._deaths += 1
        self._alone += not blamed
        return self._alone >= STARTS or self._deaths >= DEATHS

    @property
    def deaths(self) -> int:
        """Of engines in a row."""
        return self._deaths
