"""Parts of a plan, each checked by itself."""

import dataclasses
import functools
from typing import Annotated, Any

from colossax.config.bounds import Bound, Count
from colossax.config.frozen import check_types
from colossax.config.placement import SAVEABLE, Placement
from colossax.config.words import nearest
from colossax.errors import PlanError

KERNELS: tuple[str, ...] = ("auto", "mosaic", "cudnn", "xla", "reference")
"""Not `interpret`: it runs on one device, and not inside `jax.checkpoint`, as layers do."""

SCHEMES: tuple[str, ...] = ("auto", "zigzag", "ring", "all_gather", "self_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How attention is computed.

    Attributes:
        kernel: Implementation on a device: `auto`, or a backend that must serve or be refused.
        scheme: What the devices along the ring axes do when they hold parts of a sequence. `zigzag`
            sends keys and values around, each device holding two chunks that together see as many
            keys as any other's (causal attention only); `ring` does so with consecutive tokens;
            `all_gather` gathers keys and values before the computation, fewer and larger messages
            for more memory; `self_attention` is the original Ring Self-Attention, which keeps all
            scores. `auto`: zigzag where attention is causal, ring elsewhere; where windows are much
            shorter than a row, `ring` sends less, because distant devices never meet. The axis
            `ulysses` exchanges sequence for heads inside of any of them.
    """

    kernel: str = dataclasses.field(default="auto", metadata={"choices": KERNELS})
    scheme: str = dataclasses.field(default="auto", metadata={"choices": SCHEMES})

    def __post_init__(self):
        check_types(self, "attention", error=PlanError)
        for field, known in (("kernel", KERNELS), ("scheme", SCHEMES)):
            value = getattr(self, field)
            if value not in known:
                raise PlanError(f"attention.{field}: unknown '{value}'{nearest(value, known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a global batch is cut into microbatches, which run one after another.

    Attributes:
        accumulation: How many microbatches.
        microbatch: Rows of each device at a time instead; how many microbatches follows from the
            global batch and the devices that split it.
        reduce_once: Devices sum gradients once per step and not for each microbatch; every device
            then accumulates them whole. Only where the batch's axes split no parameter, or stages
            gather them once a step (`pipeline.gather`). Attention is then XLA's, but under stages,
            not cuDNN's, whose rule for `vmap` takes no mask; a loss that draws random numbers gets
            a key of its own on each device.
    """

    accumulation: Annotated[int, Bound(low=1, told="1 (off) or more microbatches")] = 1
    microbatch: Annotated[int, Bound(low=1, told="1 or more rows")] | None = None
    reduce_once: bool = False

    def __post_init__(self):
        check_types(self, "batch", error=PlanError)
        if self.microbatch is not None and self.accumulation != 1:
            raise PlanError(
                "batch: both accumulation and microbatch are given; one follows from the other,"
                " so give one"
            )


GATHERS: tuple[str, ...] = ("microbatch", "step")

SCHEDULES: tuple[str, ...] = ("auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a batch goes through the stages, where mesh axis `stage` is larger than 1.

    Attributes:
        schedule: In which order stages compute; `auto`: interleaved with several chunks, else 1f1b.
        microbatches: How many each microstep of `batch.accumulation` is cut into; None: what
            `batch.microbatch` gives, or four times as many as stages where the rows suffice. Given
            both, they must come to the same.
        chunks: Parts of the model on each stage that are not neighbours; more of them, shorter
            bubbles and more messages. `zb_v` has two.
        gather: How often the layers' weights are gathered over the axes that split tokens: for each
            `microbatch`, forward and backward; or once a `step`, for memory that holds a stage's
            weights whole in the compute dtype.
        cuts: Layers of each chunk, in the order of the model: numbers, or their text as `10,8,8,6`.
            Each stage then has a program of its own, which waits for its inputs alone. `auto`: such
            that the slowest is fastest, by modelled seconds, within the devices' memory; settled
            before a run. None: chunks of as many layers each, in one program for all stages.
        speeds: For cuts of `auto`, of the devices of each stage, as they come: how fast they are,
            in any unit; numbers, or their text as `2,1,1,1`. None: devices of one kind are equally
            fast, those of several as fast as `colossax bench stages RECIPE` measured.
        order: Of each stage, the number of its devices among those of all stages, as they come:
            with `1,0` the first stage has the second half of all devices. `auto`, with cuts of
            `auto`: the order whose slowest stage is fastest. None: as they come.
        table: Path of a table of one's own in place of a schedule by name, as
            `colossax.pipeline.Table.to_json` writes it, for the plan's stages, chunks and
            microbatches. Evaluation goes forward without it.
    """

    schedule: str = dataclasses.field(default="auto", metadata={"choices": SCHEDULES})
    microbatches: Annotated[int, Bound(low=1, told="1 or more microbatches")] | None = None
    chunks: Annotated[int, Bound(low=1, told="1 or more chunks")] = 1
    gather: str = dataclasses.field(default="microbatch", metadata={"choices": GATHERS})
    cuts: Any = None
    speeds: Any = None
    order: Any = None
    table: str | None = None

    def __post_init__(self):
        check_types(self, "pipeline", error=PlanError)
        object.__setattr__(self, "cuts", _cuts(self.cuts))
        object.__setattr__(self, "speeds", _speeds(self.speeds))
        object.__setattr__(self, "order", _order(self.order))
        for field, known in (("schedule", SCHEDULES), ("gather", GATHERS)):
            value = getattr(self, field)
            if value not in known:
                raise PlanError(f"pipeline.{field}: unknown '{value}'{nearest(value, known)}")
        if self.speeds is not None and self.cuts is None:
            raise PlanError(
                f"pipeline.speeds: found {','.join(f'{n:g}' for n in self.speeds)}, and only cuts"
                " of auto are found by them; give plan.pipeline.cuts auto, or leave them out (none)"
            )
        if self.order == "auto" and self.cuts != "auto":
            raise PlanError(
                "pipeline.order: 'auto' is found with cuts of auto; give plan.pipeline.cuts auto,"
                " or the order, as 1,0"
            )
        if self.table is not None and self.schedule != "auto":
            raise PlanError(
                f"pipeline: both schedule '{self.schedule}' and table '{self.table}' are given;"
                " leave one of them out"
            )

    @property
    def resolved(self) -> str:
        """The schedule, `auto` decided; a table's path."""
        if self.table is not None:
            return self.table
        if self.schedule != "auto":
            return self.schedule
        return "interleaved" if self.chunks > 1 else "1f1b"

    @property
    def chunks_of_stage(self) -> int:
        """How many parts of the model a stage has: `chunks`, and of `zb_v` two."""
        return 2 if self.schedule == "zb_v" and self.chunks == 1 else self.chunks


def _cuts(given: Any) -> tuple[int, ...] | str | None:
    """Layers of each chunk, from numbers or their text; `auto` as it is."""
    if given is None or given == "auto":
        return given
    words = _words(given)
    counts = tuple(int(word) for word in words if word.isdecimal())
    if not counts or len(counts) < len(words) or min(counts) < 1:
        raise PlanError(
            f"pipeline.cuts: found {given!r}; give the layers of each stage, 1 or more, as 10,8,8,6"
            " or auto"
        )
    return counts


def _speeds(given: Any) -> tuple[float, ...] | None:
    """Of each stage, from numbers or their text."""
    if given is None:
        return None
    try:
        speeds = tuple(float(word) for word in _words(given))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < float("inf") for speed in speeds):
        raise PlanError(
            f"pipeline.speeds: found {given!r}; give a number above 0 for each stage, as 2,1,1,1"
        )
    return speeds


def _order(given: Any) -> tuple[int, ...] | str | None:
    """Numbers of the devices of each stage, from numbers or their text; `auto` as it is."""
    if given is None or given == "auto":
        return given
    words = _words(given)
    numbers = tuple(int(word) for word in words if word.isdecimal())
    if len(numbers) < len(words) or sorted(numbers) != list(range(len(numbers))) or not numbers:
        raise PlanError(
            f"pipeline.order: found {given!r}; give each number from 0 on once, as 1,0 for two"
            " stages, or auto"
        )
    return numbers


def _words(given: Any) -> list[str]:
    found = given.split(",") if isinstance(given, str) else given
    return [str(one).strip() for one in (found if isinstance(found, list | tuple) else [found])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of layers treated alike.

    Attributes:
        count: Layers in the segment; -1 takes what the others leave (at most one segment). Under
            stages, counts that add up to the layers of a stage (of one of its chunks) are of each.
        remat: `none` saves every intermediate, `full` only the layer's input, `dots` the results
            of matmuls with parameters; else names joined by `+` (`qkv attention mlp`). Gathered
            weights are never kept: backward gathers them again.
        offload: What of these layers lives in host memory, joined by `+`, the text of a
            `Placement`, kept as it was given (it is a part of the plan's hash): `parameters`,
            `optimizer` (its state; with `disk` beside it, in a file; with `parameters+cpu`, the
            CPU updates the layers), `activations` (all that backward keeps), or of those only
            `input` (what a layer gets from the one before), `qkv`, `attention`, `mlp`, which are
            then kept there beside what `remat` keeps on the device. `none`: nothing.
        mlp_share: Of the tokens, those whose `mlp` is kept, the first of each row; that of the
            others is recomputed. `auto`, where `offload` names `mlp`: as many as reach host memory
            while a layer is computed, by what `colossax bench offload` measured; 0 where nothing
            was.
    """

    count: int = -1
    remat: str = "none"
    offload: str = "none"
    mlp_share: float | int | str = 1.0

    def __post_init__(self):
        if type(self.mlp_share) is int:
            object.__setattr__(self, "mlp_share", float(self.mlp_share))
        check_types(self, "segments", error=PlanError)
        if self.count != -1 and self.count < 1:
            raise PlanError(f"segments: found a count of {self.count}; give 1 or more, or -1")
        for name in self.remat.split("+"):
            known = ("none", "full", "dots", *SAVEABLE) if "+" not in self.remat else SAVEABLE
            if name not in known:
                raise PlanError(f"segments.remat: unknown policy '{name}'{nearest(name, known)}")
        named = self.placement.saved_on_host
        if named and self.remat in ("none", "dots"):
            raise PlanError(
                f"segments.offload: '{min(named)}' is kept by name, and remat '{self.remat}' keeps"
                " more than names; use remat 'full', or names, or offload 'activations'"
            )
        self._check_mlp_share()

    def _check_mlp_share(self) -> None:
        share = self.mlp_share
        if share == "auto":
            if "mlp" not in self.placement.named_activations:
                raise PlanError(
                    f"segments.mlp_share 'auto': it is found for an 'mlp' that goes to host memory,"
                    f" and offload '{self.offload}' does not name it; add 'mlp' there, or give a"
                    " number"
                )
            return
        if not isinstance(share, float) or not 0 <= share <= 1:
            raise PlanError(
                f"segments.mlp_share: found {share!r}; give a share of the tokens, 0 to 1, or auto"
            )
        named = (*self.remat.split("+"), *self.placement.named_activations)
        if share < 1 and "mlp" not in named:
            raise PlanError(
                f"segments.mlp_share: {share} is a share of the tokens whose 'mlp' is"
                " kept, and neither remat nor offload names it; add 'mlp' to one of them"
            )

    @functools.cached_property
    def placement(self) -> Placement:
        """What `offload` says."""
        return Placement.from_text(self.offload)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How the loss is computed.

    Attributes:
        vocab_chunks: Pieces in which logits are made, one at a time; 1 makes them whole.
    """

    vocab_chunks: Count = 1

    def __post_init__(self):
        check_types(self, "loss", error=PlanError)
