"""The schedules by name.

In *lock step* all devices run one program: in a tick a kind of operation that any stage needs is
run by all, on zeros where a cell has none. A schedule is then as long as its ticks, and the fewer
of them need a kind, the less is computed in vain. *Free*, each stage runs a program of its own and
waits for its inputs alone; what counts is the order of each stage.

P stages, M microbatches, v chunks; F, I, W seconds of a stage's forward, input and weight
gradient, B = I + W.
"""

from collections.abc import Callable

from colossax.config import nearest
from colossax.errors import PlanError
from colossax.pipeline.placing import packed, placed
from colossax.pipeline.table import Kind, Op, Table, round_layout

FORMS = ("lockstep", "free")


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """All microbatches forward, then all backward; both forms.

    2 (M + P - 1) ticks; bubble (P - 1)(F + B); saves M inputs.

    Reference: Huang et al. 2019, GPipe.
    """
    turn = microbatches + stages - 1
    ticks_of = {
        Kind.FORWARD: lambda stage, chunk, m: m + stage,
        Kind.BACKWARD: lambda stage, chunk, m: turn + m + stages - 1 - stage,
    }
    return placed(microbatches, round_layout(stages, 1), ticks_of)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """One forward and one backward a tick once the pipeline is full; lock step.

    M + 2P - 2 ticks, of which M + P - 1 need a forward and as many a backward; bubble
    (P - 1)(F + B); stage s saves 2 (P - 1 - s) + 1 inputs.

    Reference: Narayanan et al. 2019, PipeDream; Fan et al. 2021, DAPPLE.
    """
    last = stages - 1
    ticks_of = {
        Kind.FORWARD: lambda stage, chunk, m: m + stage,
        Kind.BACKWARD: lambda stage, chunk, m: m + 2 * last - stage,
    }
    return placed(microbatches, round_layout(stages, 1), ticks_of)


def one_f_one_b_free(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """One forward and one backward in turn once a stage has had its first gradient; free.

    Bubble (P - 1)(F + B); stage s saves P - s inputs.

    Reference: as of `one_f_one_b`.
    """
    orders = [_in_turn(microbatches, stages - stage) for stage in range(stages)]
    return packed(microbatches, round_layout(stages, 1), orders)


def _in_turn(microbatches: int, ahead: int) -> list[Op]:
    """Forwards and backwards of a stage that is so many forwards ahead of its backwards."""
    order = []
    for turn in range(microbatches + ahead - 1):
        if turn < microbatches:
            order.append(Op(Kind.FORWARD, turn))
        if turn >= ahead - 1:
            order.append(Op(Kind.BACKWARD, turn - ahead + 1))
    return order


SCHEDULES: dict[str, dict[str, Callable[[int, int, int], Table]]] = {
    "gpipe": {"lockstep": gpipe, "free": gpipe},
    "1f1b": {"lockstep": one_f_one_b, "free": one_f_one_b_free},
}
"""By name and form."""


def schedule(
    name: str, stages: int, microbatches: int, chunks: int | None = None, form: str = "lockstep"
) -> Table:
    """The table of a schedule.

    Args:
        name: One of `SCHEDULES`.
        stages: How many.
        microbatches: How many.
        chunks: Of each stage; None: as many as the schedule has when it is not asked, 1 or 2.
        form: One of `FORMS`.

    Raises:
        PlanError: An unknown name or form, or chunks that the schedule cannot have.

    Cost: O(operations + cells).
    """
    for word, known in ((name, SCHEDULES), (form, FORMS)):
        if word not in known:
            raise PlanError(f"pipeline.schedule: unknown '{word}'{nearest(word, known)}")
    return SCHEDULES[name][form](stages, microbatches, chunks or 1)
