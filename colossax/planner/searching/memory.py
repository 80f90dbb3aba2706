"""Bytes of a device by formula.

States, gradients and what is kept for backward follow from shapes and rules. What a step works with
beside them depends on how the compiler orders it, so its terms have coefficients, fitted to
compiled programs by bench/planner.py, which tells how far off they are.
"""

import dataclasses
import math

import numpy as np

from colossax.config import MeshAxis
from colossax.planner.profiling import KeptArray, LayerKind, ModelProfile
from colossax.planner.searching.experts import meeting_of
from colossax.planner.searching.parts import Parts
from colossax.planner.searching.sends import Tokens
from colossax.planner.searching.stages import ONE_STAGE, Stages
from colossax.sharding.rules import TABLE_WIDTH
from colossax.typing import ParamInfo

GATHERED, EXPERTS, HIDDEN, STREAM = 1.0, 2.6, 4.4, 6.5
"""Of what a layer works with in its backward pass: its gathered weights, those of experts (which
are there all at once, with their gradients), the widest that it makes of a token, and what goes
from layer to layer."""

MET = 2.0
"""Of tokens that are gathered for their experts, how often they are there."""

ROWS_OF_TILES = 16
"""Of float32 matmuls: what is no multiple of it is copied and filled up first."""

HEAD, STREAM_OF_LOSS = 1.5, 6.0
"""Of what the loss works with: the head in float32 with its gradient, and what goes into it."""

MORE_HEAD, EXPERTS_APART = 1.1, 1.2
"""Of the head in float32, what stages that share the vocabulary have beside; of experts' weights
what stages have, and layers that are updated one by one, as their gradients do not wait."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """Of one device.

    Attributes:
        states: Parameters and optimizer state.
        gradients: Of layers while backward goes on, and of microbatches that are added up.
        kept: Of a forward pass for its backward.
        working: While a layer or the loss is computed.
    """

    states: float
    gradients: float
    kept: float
    working: float

    @property
    def terms(self) -> dict[str, float]:
        """By name, for people."""
        return {
            "parameters and optimizer": self.states,
            "gradients": self.gradients,
            "saved": self.kept,
            "working set": self.working,
        }

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.gradients + self.kept + self.working


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """What does not depend on the batch.

    Attributes:
        states: See `Bytes`.
        layer_gradients: Of all layers.
        gradients: Of all parameters, as they are added up.
        behind: Of matrices outside of layers, as they are reduced.
        gathered: The largest layer's weights as they are multiplied, those of experts weighted.
        gathered_apart: Likewise where layers are updated one by one.
        head: Likewise of the largest matrix outside of layers, in float32.
        widest: Bytes of the most numbers that a layer makes of a token at once, with what buffers
            of experts have room for.
        widest_apart: Likewise without that room, of which layers that are updated one by one were
            not seen to need any.
        attending: Bytes of a token that attention in plain XLA works with in its backward pass.
        met: Of a token of a device's own, what is gathered of others for their experts.
        stream: Of what goes from layer to layer, of a token.
        logits: Of a token, in float32.
        slopes: Of a token, copies of their gradient that a chunk's matmuls read.
        layers: Numbers of all layers' weights as they are multiplied, in the compute dtype.
    """

    states: float
    layer_gradients: float
    gradients: float
    behind: float
    gathered: float
    gathered_apart: float
    head: float
    widest: float
    widest_apart: float
    attending: float
    met: float
    stream: float
    logits: float
    slopes: float
    layers: float


def stored(profile: ModelProfile, parts: Parts) -> Stored:
    """What a mesh holds of a model whatever the batch is."""
    precision = parts.bound.plan.precision
    compute = np.dtype(precision.compute).itemsize
    adds = np.dtype(precision.accumulation).itemsize
    once = parts.bound.plan.batch.reduce_once
    states = gradients = layers = head = behind = whole = 0.0
    reduction = np.dtype(precision.reduction or precision.compute).itemsize
    for info, moment, learns in zip(profile.infos, profile.moments, profile.learns, strict=True):
        numbers = math.prod(info.shape)
        at_rest = info.at_rest(precision.params).itemsize
        states += numbers * at_rest / _part(parts, "params", info)
        states += numbers * moment / _part(parts, "optimizer", info)
        own = learns * adds * numbers / _part(parts, "gradients", info)
        # Summed once a step, they are whole until then on each of the devices that split tokens.
        gradients += own * (parts.size(_split(parts, info)) if once else 1)
        layers += own * (info.total_layers is not None)
        if info.total_layers is None and len(info.shape) > 1 and info.dims[-1] != TABLE_WIDTH:
            head = max(head, 4 * numbers / parts.size(parts.whole(info.dims, info.shape)))
            behind += own * reduction / adds
        if info.total_layers is not None:
            split = parts.axes("weights", info.dims, info.shape)
            whole += compute * numbers / parts.size(split)

    def gathered(experts: float) -> float:
        each = (_gathered(profile, parts, kind, experts) for kind in profile.kinds)
        return compute * max(each, default=0.0)

    widest = widest_apart = met = 0.0
    for kind in profile.kinds:
        meeting, asked = meeting_of(profile, parts, kind), parts.bound.plan.experts
        rows = 1.0 if meeting is None else meeting.rows(asked)
        own = compute * _widest(profile, kind)
        widest, widest_apart = max(widest, rows * own), max(widest_apart, own)
        if meeting is not None:
            met = max(met, MET * meeting.copies(asked) * meeting.width * meeting.wide)
    experts = EXPERTS if parts.size((MeshAxis.STAGE.value,)) == 1 else EXPERTS_APART
    return Stored(
        states=states,
        layer_gradients=layers,
        gradients=gradients,
        behind=behind,
        gathered=gathered(experts),
        gathered_apart=gathered(EXPERTS_APART),
        head=head,
        widest=widest,
        widest_apart=widest_apart,
        attending=max((_attending(kind, compute) for kind in profile.kinds), default=0.0),
        met=met,
        stream=float(compute * profile.width),
        logits=4.0 * profile.vocab,
        slopes=_slopes(profile.vocab, compute),
        layers=whole,
    )


def kept_bytes(
    kind: LayerKind, names: frozenset[str], tensor: int, tokens: Tokens, of: int
) -> float:
    """Of one call of a layer, what backward gets.

    Args:
        kind: Of layer.
        names: That its policy keeps.
        tensor: Devices along that axis.
        tokens: Of a microbatch.
        of: Tokens that were traced.
    """
    total = 0.0
    for array in kind.traced.kept:
        if array.name == "input":
            total += array.bytes / of * tokens.held
        elif array.name in names:
            total += array.bytes / of * tokens.inside / _tensor_part(array, tensor)
    return total


def bytes_of(
    one: Stored,
    tensor: int,
    tokens: Tokens,
    kept: float,
    vocab_chunks: int,
    *,
    several: bool,
    stages: Stages = ONE_STAGE,
) -> Bytes:
    """Of a step, at whichever moment needs more: the loss, or the layers' backward pass.

    Stacks of gradients are allocated once that begins, when all is still kept.

    Args:
        one: What does not depend on the batch.
        tensor: Devices along that axis.
        tokens: Of a microbatch.
        kept: Of all layers.
        vocab_chunks: Of the loss.
        several: Whether gradients of several microbatches are added up.
        stages: Of the plan. Their backward passes add gradients up as they go, beside all that is
            kept, and the loss stands in the same program.
    """
    layer, loss = working(one, tensor, tokens, vocab_chunks, stages)
    if stages.count > 1:
        loss += MORE_HEAD * one.head
        return Bytes(
            states=one.states,
            gradients=one.gradients,
            kept=kept + stages.whole * one.layers,
            working=max(layer, loss),
        )
    sums = several * one.gradients
    layers = one.layer_gradients + one.behind
    backward = layers + layer >= loss
    return Bytes(
        states=one.states,
        gradients=sums + backward * layers,
        kept=kept,
        working=layer if backward else loss,
    )


def working(
    one: Stored, tensor: int, tokens: Tokens, vocab_chunks: int, stages: Stages = ONE_STAGE
) -> tuple[float, float]:
    """What a layer's backward pass and the loss work with; see `bytes_of`."""
    stream = tokens.inside * one.stream
    within = max(HIDDEN * one.widest, one.attending)
    layer = one.gathered + tokens.inside * within / tensor + STREAM * stream
    layer += one.met * tokens.held
    logits = one.logits + one.slopes * (vocab_chunks > 1)
    logits *= tokens.inside / tensor / stages.count / vocab_chunks
    return layer, HEAD * one.head + logits + STREAM_OF_LOSS * stream


def working_of(profile: ModelProfile, wide: int) -> float:
    """Bytes that a layer works with in its backward pass, of a row, its weights left out.

    Args:
        profile: The model.
        wide: Bytes of a number that is multiplied.
    """
    widest = max((_widest(profile, kind) for kind in profile.kinds), default=0.0)
    attending = max((_attending(kind, wide) for kind in profile.kinds), default=0.0)
    within = max(HIDDEN * wide * widest, attending)
    return profile.tokens * (within + STREAM * wide * profile.width)


def _attending(kind: LayerKind, wide: int) -> float:
    """Of a token: scores and their gradient in float32, both once more where products are narrower,
    and queries, keys and values with their gradients in float32."""
    if not kind.traced.scores:
        return 0.0
    scores = kind.traced.scores * (2 + (wide < 4) * wide / 2)
    qkv = sum(array.bytes for array in kind.traced.kept if array.name == "qkv")
    return (scores + (1 + 4 / wide) * qkv / kind.group) / kind.tokens


def _slopes(vocab: int, wide: int) -> float:
    """Narrower than in float32; or in float32 again, where tiles do not divide them."""
    return float(vocab * (wide if wide < 4 else 4 * (vocab % ROWS_OF_TILES > 0)))


def _widest(profile: ModelProfile, kind: LayerKind) -> float:
    """Of a layer's maps the most numbers that one makes of a token."""
    widest = 0.0
    for one in kind.traced.maps:
        info = profile.infos[kind.leaves[one.leaf]]
        shape = info.shape[info.total_layers is not None :]
        read = math.prod(shape[: one.contracted] if one.first else shape[-one.contracted :])
        experts = shape[0] if "experts" in info.dims else 1
        widest = max(widest, one.flops / (2 * kind.tokens) / (read / experts))
    return widest


def _gathered(profile: ModelProfile, parts: Parts, kind: LayerKind, experts: float) -> float:
    """Numbers of a call's parameters as matmuls want them, those of experts weighted."""
    total = 0.0
    for info in (profile.infos[at] for at in kind.leaves):
        numbers = math.prod(info.shape) / info.shape[0]
        share = experts if "experts" in info.dims else GATHERED
        total += share * numbers / parts.size(parts.whole(info.dims, info.shape))
    return total


def _split(parts: Parts, info: ParamInfo) -> list[str]:
    """Axes over which a gradient is split that split tokens too."""
    return [axis for axis in parts.axes("gradients", info.dims, info.shape) if axis in parts.split]


def _part(parts: Parts, role: str, info: ParamInfo) -> int:
    return parts.size(parts.axes(role, info.dims, info.shape))


def _tensor_part(array: KeptArray, tensor: int) -> int:
    """By how much `tensor` divides what has heads or hidden units as its third dim, or its second:

    it is the last but one of keys, and the last of hidden states."""
    divided = array.shape[2] if len(array.shape) > 3 else max(array.shape[1:])
    return tensor if divided % tensor == 0 else 1
