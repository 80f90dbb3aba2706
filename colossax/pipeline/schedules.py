"""The schedules by name, and the plain ones.

In *lock step* all devices run one program: in a tick a kind of operation that any stage needs is
run by all, on zeros where a cell has none. The fewer ticks need a kind, the less is computed in
vain. *Free*, each stage runs a program of its own and waits for its inputs alone; what counts is
the order of each stage.

P stages, M microbatches, v chunks; F, I, W seconds of a stage's forward, input and weight
gradient, B = I + W. Bubbles are seconds, and of the longest stage.
"""

from collections.abc import Callable

from colossax.config import nearest
from colossax.errors import PlanError
from colossax.pipeline.placing import packed, placed
from colossax.pipeline.table import FORMS, Kind, Op, Table, round_layout
from colossax.pipeline.zero_bubble import zb_h1, zb_h1_free, zb_v, zb_v_free


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
    return interleaved(stages, microbatches, 1)


def one_f_one_b_free(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """One forward and one backward in turn once a stage has had its first gradient; free.

    Bubble (P - 1)(F + B); stage s saves P - s inputs.

    Reference: as of `one_f_one_b`.
    """
    orders = [in_turn(microbatches, stages - stage) for stage in range(stages)]
    return packed(microbatches, round_layout(stages, 1), orders)


def in_turn(microbatches: int, ahead: int) -> list[Op]:
    """What a stage does that is so many forwards ahead of its backwards."""
    order = []
    for turn in range(microbatches + ahead - 1):
        if turn < microbatches:
            order.append(Op(Kind.FORWARD, turn))
        if turn >= ahead - 1:
            order.append(Op(Kind.BACKWARD, turn - ahead + 1))
    return order


def interleaved(stages: int, microbatches: int, chunks: int) -> Table:
    """1F1B of chunks, v on each stage, which are no neighbours in the model; both forms.

    Microbatches go in groups, each through a chunk of all stages before the next chunk. Groups of
    P, as in the paper, leave holes in the last where P does not divide M; here groups have P or
    more, so that vM + P - 1 ticks need a forward, and as many a backward, whatever M >= P is. Fewer
    microbatches than stages cannot fill them: (v - 1) P + M + P - 1 ticks.

    Bubble (P - 1)(F + B) / v. Stage s saves (v - 1) G + 2 (P - 1 - s) + 1 inputs of chunks, with
    the largest group G: P where it divides M, and at most 2P - 1.

    Reference: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters.
    """
    starts, strides = _groups(stages, microbatches, chunks)
    delay = (chunks - 1) * max(strides) + stages - 1

    def turn(chunk: int, microbatch: int) -> int:
        return starts[microbatch] + chunk * strides[microbatch]

    ticks_of = {
        Kind.FORWARD: lambda stage, chunk, m: turn(chunk, m) + stage,
        Kind.BACKWARD: lambda stage, chunk, m: (
            turn(chunks - 1 - chunk, m) + stages - 1 - stage + delay
        ),
    }
    return placed(microbatches, round_layout(stages, chunks), ticks_of)


def _groups(stages: int, microbatches: int, chunks: int) -> tuple[list[int], list[int]]:
    """Of each microbatch the turn of its first chunk, and the turns from a chunk to the next."""
    count = max(1, microbatches // stages)
    starts, strides, begin = [], [], 0
    for group in range(count):
        size = microbatches // count + (group < microbatches % count)
        starts += range(begin, begin + size)
        strides += [max(size, stages)] * size
        begin += chunks * max(size, stages)
    return starts, strides


SCHEDULES: dict[str, dict[str, Callable[[int, int, int], Table]]] = {
    "gpipe": {"lockstep": gpipe, "free": gpipe},
    "1f1b": {"lockstep": one_f_one_b, "free": one_f_one_b_free},
    "interleaved": {"lockstep": interleaved, "free": interleaved},
    "zb_h1": {"lockstep": zb_h1, "free": zb_h1_free},
    "zb_v": {"lockstep": zb_v, "free": zb_v_free},
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
        chunks: Of each stage; may be left out but for `interleaved`: `zb_v` has 2, others 1.
        form: One of `FORMS`.

    Raises:
        PlanError: An unknown name or form, sizes below 1, chunks that the schedule cannot have.

    Cost: O(operations + cells).
    """
    for word, known in ((name, SCHEDULES), (form, FORMS)):
        if word not in known:
            raise PlanError(f"pipeline.schedule: unknown '{word}'{nearest(word, known)}")
    for what, count in (("stages", stages), ("microbatches", microbatches)):
        if count < 1:
            raise PlanError(f"pipeline.{what}: found {count}; give 1 or more")
    return SCHEDULES[name][form](stages, microbatches, _chunks(name, chunks))


_CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_v": 2}


def _chunks(name: str, given: int | None) -> int:
    """How many a stage has under a schedule."""
    own = _CHUNKS.get(name)
    if own is None and (given is None or given < 2):
        raise PlanError(
            f"pipeline.chunks: '{name}' needs 2 or more chunks on each stage, and found"
            f" {given or 'none'}; give pipeline.chunks, or schedule '1f1b'"
        )
    if own is not None and given not in (None, own):
        raise PlanError(
            f"pipeline.chunks: '{name}' has {own} on each stage, and found {given}; leave it out,"
            " or take schedule 'interleaved'"
        )
    return given or own or 1
