"""Schedules that put weight gradients where a stage would wait.

Letters as in `schedules`. Reference: Qi et al. 2023, Zero Bubble Pipeline Parallelism (ZB-H1), and
Qi et al. 2024, Pipeline Parallelism with Controllable Memory (ZB-V).
"""

from colossax.pipeline.placing import packed, placed
from colossax.pipeline.table import Kind, Op, Table, round_layout, v_layout


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """1F1B whose weight gradients all stages do in the same ticks; lock step.

    M + 2P - 2 ticks: M + P - 1 need a forward, as many an input gradient, and M a weight gradient,
    none of them on zeros. Bubble (P - 1)(F + I). Stage s saves 2 (P - 1 - s) + 1 inputs for input
    gradients, and s + 1 wait for weight gradients.
    """
    full = 2 * (stages - 1)
    ticks_of = {
        Kind.FORWARD: lambda stage, chunk, m: m + stage,
        Kind.INPUT: lambda stage, chunk, m: m + full - stage,
        Kind.WEIGHT: lambda stage, chunk, m: m + full,
    }
    return placed(microbatches, round_layout(stages, 1), ticks_of)


def zb_h1_free(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """1F1B in which stage s is s weight gradients behind; free.

    Bubble (P - 1)(F + I - W) where W is F at most and M is 2P - 1 or more; each stage keeps at most
    P microbatches, as many as the first one of 1F1B.
    """
    orders = [_behind(microbatches, stages - stage, stage) for stage in range(stages)]
    return packed(microbatches, round_layout(stages, 1), orders)


def _behind(microbatches: int, ahead: int, behind: int) -> list[Op]:
    """What a stage does so many forwards ahead, and weight gradients behind, of input gradients."""
    order = []
    for turn in range(1 - ahead, microbatches + behind):
        steps = ((Kind.FORWARD, ahead - 1), (Kind.INPUT, 0), (Kind.WEIGHT, -behind))
        order += [Op(kind, turn + step) for kind, step in steps if 0 <= turn + step < microbatches]
    return order


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Two chunks a stage, down the stages and up again; lock step.

    2M + 4P - 3 ticks of half a stage: 2M + 2P - 2 need a forward, as many an input gradient, which
    is the least a V can do, and 2M a weight gradient, none of them on zeros. Bubble (P - 1)(F + I).
    Each stage saves 2P inputs of chunks, half as much as 1F1B's first.
    """
    back = 2 * stages - 1

    def down(stage: int, microbatch: int) -> int:
        return 2 * microbatch + stage

    def up(stage: int, microbatch: int) -> int:
        return 2 * microbatch + 2 * stages - 1 - stage

    # After the last stage's; one apart in turn, so that the chunks' ticks differ.
    first = back + stages - 1 + (stages % 2 == 0)
    ticks_of = {
        Kind.FORWARD: lambda stage, chunk, m: (up if chunk else down)(stage, m),
        Kind.INPUT: lambda stage, chunk, m: back + (down if chunk else up)(stage, m),
        Kind.WEIGHT: lambda stage, chunk, m: 2 * m + (first if chunk else 2 * back),
    }
    return placed(microbatches, v_layout(stages), ticks_of)


def zb_v_free(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Two chunks a stage, down the stages and up again, a weight gradient wherever one waits; free.

    Where F = I = W and M is 2P - 1 or more, a stage never waits once it has begun: bubble
    (P - 1) F / 2. Each keeps at most 2P chunks, as much as 1F1B's first.
    """
    count = max(microbatches, 2 * stages - 1)
    orders = [
        [op for op in _v_order(stages, stage, count) if op.microbatch < microbatches]
        for stage in range(stages)
    ]
    return packed(microbatches, v_layout(stages), orders)


class _Counted:
    """An order in which the operations of each kind and chunk come by rising microbatch."""

    def __init__(self):
        self.order: list[Op] = []
        self.counts: dict[tuple[Kind, int], int] = {}

    def add(self, *steps: tuple[Kind, int]) -> None:
        """The next microbatch of each of these."""
        for kind, chunk in steps:
            at = self.counts.get((kind, chunk), 0)
            self.order.append(Op(kind, at, chunk))
            self.counts[kind, chunk] = at + 1


_F0, _F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
_I0, _I1 = (Kind.INPUT, 0), (Kind.INPUT, 1)
_W0, _W1 = (Kind.WEIGHT, 0), (Kind.WEIGHT, 1)


def _v_order(stages: int, stage: int, microbatches: int) -> list[Op]:
    """A stage's order, for at least 2P - 1 microbatches."""
    rows, ahead = _Counted(), stages - stage
    rows.add(*[_F0] * (2 * ahead - 1))
    rows.add(*[_F1, _F0] * stage)
    rows.add(*[_F1, _I1, _W1] * ahead)
    for left in reversed(range(microbatches - stages)):
        rows.add(*[_F0] * (left >= ahead - 1), _I0, _W0, _F1, _I1, _W1)
    rows.add(*[_I0, _I1] * stage)
    rows.add(*[_I0, _W0] * ahead)
    rows.add(*[_W1] * stage)
    rows.add(*[_W0] * stage)
    return rows.order
