"""How many tokens are drafted after one that is said, and what came of it; numbers alone."""

import math

from colossax.scheduling.running import Run

RARELY = 0.05
"""A place of a draft that is reached less often is not worth looking at."""

RECENT = 0.25
"""How much the last step counts in what is expected of a request's drafts."""


class Drafts:
    """Of all requests of a scheduler.

    Attributes:
        most: Tokens drafted after one that is said.
        drafted: Tokens looked at so far.
        accepted: Those of them that were said.
    """

    def __init__(self, most: int, *, adapts: bool):
        """Nothing has been drafted.

        Args:
            most: Tokens drafted after one that is said; 0: none ever.
            adapts: Whether requests whose drafts are seldom said get fewer of them; not where
                drafts are trees, whose nodes are not places behind one another.
        """
        self.most, self._adapts = most, adapts
        self.drafted = self.accepted = 0
        self._tokens = [tuple(-1 - i for i in range(count + 1)) for count in range(most + 1)]

    def tokens(self, run: Run) -> tuple[int, ...]:
        """Of a piece: what was said last, and as many drafts as are worth it."""
        return self._tokens[run.drafts]

    def took(self, run: Run, offered: int, accepted: int) -> None:
        """Note how many of a request's drafts were said, and expect the like.

        A share `hope` of drafts is said, so the i-th is reached with `hope**i`.
        """
        self.drafted += offered
        self.accepted += accepted
        if not (offered and self._adapts):
            return
        # Where one is refused those behind it are not looked at: of those looked at, a share.
        looked = min(offered, accepted + 1)
        run.hope += RECENT * (accepted / looked - run.hope)
        if run.hope >= RARELY ** (1 / self.most):
            run.drafts = self.most
        else:
            run.drafts = max(1, int(math.log(RARELY) / math.log(max(run.hope, RARELY))))
