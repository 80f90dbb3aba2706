"""Every way to lay a run out on a target, by what a layer sends and keeps."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from colossax.aot import Target, collectives, target_devices, totals
from colossax.config import BatchConfig, BoundPlan, MeshAxis, Plan, Segment, preset
from colossax.errors import InputError, PlanError
from colossax.nn import DecoderConfig
from colossax.pallas.target import target as pallas_target
from colossax.planner.counting.compiled import compiled_step, usable_bytes
from colossax.planner.counting.islands import check_one_island
from colossax.planner.counting.traffic import link_of
from colossax.planner.deciding.settling import Settled
from colossax.planner.task_step import settle_task, task_step
from colossax.sharding import activation_axes, batch_axes
from colossax.sharding.matmul import Widths, sent_items
from colossax.tasks import TrainConfig, task_of

_FLAT = (MeshAxis.FSDP, MeshAxis.RING, MeshAxis.ULYSSES, MeshAxis.TENSOR)
_SPREAD = (MeshAxis.FSDP, MeshAxis.DEPTH, MeshAxis.ROW, MeshAxis.COL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """One layout on one target; bytes are of one layer, per device and step.

    Attributes:
        label: Mesh, tensor layout and scheme.
        plan: The plan.
        predicted_bytes: Sent, by formula.
        compiled_bytes: Sent by the compiled program; None where it was not compiled.
        layer_bytes: Device memory that one more layer takes, likewise.
        device_bytes: Device memory of the whole model, likewise.
        seconds: Of the bytes sent at the rate of the links they cross, likewise.
        fits: Whether the device has the memory, likewise.
        refused: Why it could not be compiled, or empty.
    """

    label: str
    plan: Plan
    predicted_bytes: float
    compiled_bytes: float | None = None
    layer_bytes: float | None = None
    device_bytes: int | None = None
    seconds: float | None = None
    fits: bool | None = None
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        """The facts as plain JSON types."""
        facts = dataclasses.asdict(self)
        return {**{k: v for k, v in facts.items() if k != "plan"}, "plan": self.plan.hash}


def compare_layouts(
    config: TrainConfig,
    target: Target,
    *,
    compiled: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[LayoutCost]:
    """Layouts that the model and the target allow, the cheapest first.

    All take the same tokens in one pass: the rows of a microbatch of the recipe on as many devices
    as the target has. Two compilations of each, with all layers and with half, tell a layer from
    the rest of the step.

    Args:
        config: The run; mesh, rules, tensor layout and scheme are replaced.
        target: Where.
        compiled: How many to compile, those that send least by formula; None: all.
        tell: Called with a line before each.

    Raises:
        InputError: The rows do not make a pass of the whole target, or no layout is legal; the
            target is made of islands, the model of two stacks, or the run on images or sound.
    """
    check_one_island(target, "--compare-layouts")
    if config.data.spans is not None:
        raise InputError(
            f"--compare-layouts: {config.recipe} has an encoder and a decoder, and what layouts"
            " send is predicted of one stack; count single plans, with --plan.mesh"
        )
    if config.data.images is not None or config.data.audio is not None:
        read = "images" if config.data.audio is None else "sound"
        raise InputError(
            f"--compare-layouts: {config.recipe} reads {read}, and what layouts send is predicted"
            " of rows of text; count single plans, with --plan.mesh"
        )
    config = _one_pass(config, target)
    layouts = sorted(legal_layouts(config, target), key=lambda one: one.predicted_bytes)
    if not layouts:
        raise InputError(
            f"--compare-layouts: no layout of {target.size} devices divides the rows, heads and"
            f" widths of {config.recipe}; give another --target or --data.global_batch"
        )
    count = len(layouts) if compiled is None else compiled
    measured = []
    for at, one in enumerate(layouts[:count]):
        tell(f"{at + 1} of {min(count, len(layouts))}: {one.label}")
        measured.append(_measured(config, target, one))
    ranked = sorted(measured, key=lambda one: (one.fits is not True, one.compiled_bytes or 0.0))
    return [*ranked, *layouts[count:]]


def _one_pass(config: TrainConfig, target: Target) -> TrainConfig:
    rows = config.plan.batch.microbatch
    if rows is None:
        rows, rest = divmod(config.data.global_batch, config.plan.batch.accumulation * target.size)
        if rest:
            raise InputError(
                f"--compare-layouts: {config.data.global_batch} rows are no multiple of the"
                f" {target.size} devices of '{target.name}'; give another --data.global_batch"
            )
    plan = config.plan.replace(
        batch=BatchConfig(),
        segments=(Segment(remat=config.plan.segments[-1].remat),),
        offload=config.plan.offload.settled,
    )
    data = dataclasses.replace(config.data, global_batch=rows * target.size)
    return config.replace(plan=plan, data=data)


def legal_layouts(config: TrainConfig, target: Target) -> Iterator[LayoutCost]:
    """Every layout over `fsdp` and either `ring ulysses tensor` or `depth row col`."""
    task, devices = task_of(config), target_devices(target)
    with pallas_target("gpu", compute_capability=target.gpu.compute_capability):
        for label, plan in _plans(config.plan, target.size):
            try:
                settled = Settled(plan=plan)
                if not plan.offload.auto:  # shares are not searched for every layout
                    settled = settle_task(task, plan, devices, target=target)
                step = task_step(task, settled, devices)
                step.order(config.data.seq_len)
            except PlanError:
                continue
            sent = predicted_bytes(config, step.bound)
            yield LayoutCost(label=label, plan=plan, predicted_bytes=sent)


def _plans(plan: Plan, devices: int) -> Iterator[tuple[str, Plan]]:
    for mesh in _meshes(devices, _FLAT):
        name = "zero3+megatron_sp" if mesh[MeshAxis.TENSOR] > 1 else "zero3"
        schemes = ("zigzag", "all_gather") if mesh[MeshAxis.RING] > 1 else ("",)
        for scheme in schemes:
            attention = dataclasses.replace(plan.attention, scheme=scheme or "auto")
            yield (
                " ".join(filter(None, (_label(mesh), scheme))),
                plan.replace(
                    mesh=mesh, rules=preset(name).rules, tensor_layout="1d", attention=attention
                ),
            )
    for mesh in _meshes(devices, _SPREAD):
        if mesh[MeshAxis.ROW] == 1 or mesh[MeshAxis.COL] == 1:
            continue
        for layout in ("2.5d", "3d") if mesh[MeshAxis.DEPTH] > 1 else ("2d",):
            yield (
                f"{layout} {_label(mesh)}",
                plan.replace(
                    mesh=mesh,
                    rules=preset("zero3").rules,
                    tensor_layout=layout,
                    tensor_matmul="auto",
                ),
            )


def _meshes(devices: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(axes)):
        if math.prod(sizes) == devices:
            yield dict(zip(axes, sizes, strict=True))


def _label(mesh: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1) or "one device"


def predicted_bytes(config: TrainConfig, bound: BoundPlan) -> float:
    """What a device sends for one layer in a step, by formula; norms and biases are not counted.

    Matmuls: `sharding.matmul.cost`. A ring of R sends `(R - 1) KV` forward and again backward,
    and `(R - 1) KV` of float32 gradients backward; Ulysses over u sends `(u - 1) / u` of queries,
    keys, values and output each way. A layer that is recomputed sends its forward part once more.
    """
    decoder: DecoderConfig = config.model.decoder()
    compute = 4 if bound.plan.precision.compute == "float32" else 2
    again = config.plan.segments[0].remat == "full"
    tokens = config.data.global_batch * config.data.seq_len
    items = sent_items(bound, tokens, _widths(decoder)) + again * _sent_again(
        bound, tokens, decoder
    )
    return items * compute + _attention_bytes(bound, tokens, decoder, compute, again)


def _widths(decoder: DecoderConfig) -> Widths:
    queries = decoder.heads * decoder.head_dim
    keys = decoder.kv_heads * decoder.head_dim
    hidden = decoder.mlp * (2 if decoder.gated else 1)
    return Widths(
        into_in=2 * decoder.embed,
        into_out=queries + 2 * keys + hidden,
        out_in=queries + decoder.mlp,
        out_out=2 * decoder.embed,
        weights=decoder.embed * (2 * queries + 2 * keys + hidden + decoder.mlp),
    )


def _sent_again(bound: BoundPlan, tokens: int, decoder: DecoderConfig) -> float:
    """Items of the forward pass that recomputation sends beside the gathers counted already.

    The output of attention's last map is summed again; what the layer ends in is not needed.
    """
    size, held = bound.mesh.shape, tokens / bound.mesh.size
    if bound.plan.tensor_layout == "1d":
        sums = 1 if "tensor" in activation_axes(bound, "seq:residual") else 2
        return sums * (size["tensor"] - 1) * decoder.embed * held
    if bound.plan.tensor_layout == "3d":
        into = _widths(decoder).into_out
        return ((size["row"] - 1) * decoder.embed + (size["col"] - 1) * into) * held
    return 0.0


def _attention_bytes(
    bound: BoundPlan, tokens: int, decoder: DecoderConfig, compute: int, again: bool
) -> float:
    size = bound.mesh.shape
    ring, ulysses = size["ring"], size["ulysses"]
    ways = bound.size(sorted(batch_axes(bound)))
    split = {"1d": "tensor", "3d": "row"}.get(bound.plan.tensor_layout, "col")
    heads = decoder.heads // size[split]
    kv_heads = max(1, decoder.kv_heads // size[split])
    repeated = math.lcm(kv_heads, ulysses)
    travelling = 2 * tokens / (ways * ring) * repeated / ulysses * decoder.head_dim
    # Recomputed, forward and backward are one program, which sends once what both begin with: the
    # first hop of a ring, all of a gather.
    shared = (ring - 1 if bound.plan.attention.scheme == "all_gather" else min(1, ring - 1)) * again
    sent = travelling * ((ring - 1) * ((2 + again) * compute + 4) - shared * compute)
    local_tokens = tokens / (ways * ring * ulysses)
    exchanged = (ulysses - 1) / ulysses * local_tokens * decoder.head_dim * 2 * (heads + repeated)
    return sent + exchanged * (2 + again) * compute


def _measured(config: TrainConfig, target: Target, one: LayoutCost) -> LayoutCost:
    layers = max(4, config.model.layers)
    sizes = (layers, layers // 2)
    counted = []
    for count in sizes:
        model = dataclasses.replace(config.model, layers=count)
        try:
            step, program, _ = compiled_step(config.replace(plan=one.plan, model=model), target)
        except PlanError as problem:
            return dataclasses.replace(one, refused=str(problem))
        links = [
            link_of(sums, target, step.bound.mesh)
            for sums in totals(collectives(program.hlo, step.bound.mesh))
        ]
        sent = sum(link.totals.ring_bytes for link in links)
        counted.append((sent, program.device_bytes, sum(link.seconds for link in links)))
    (sent, held, seconds), half = counted
    between = sizes[0] - sizes[1]
    return dataclasses.replace(
        one,
        compiled_bytes=(sent - half[0]) / between,
        layer_bytes=(held - half[1]) / between,
        seconds=(seconds - half[2]) / between,
        device_bytes=held,
        fits=held <= usable_bytes(target),
    )
