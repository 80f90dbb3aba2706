"""Speeds of devices and rates of links, as they were measured and kept, or as they are given."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from colossax.config import Natural, NotNegative, Positive, above, check_types
from colossax.config.cache import measured_path, read_measured, write_measured
from colossax.errors import InputError
from colossax.pipeline.cuts import Link


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Seconds of one device, by its number where it was measured."""

    number: Natural
    seconds: Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairTime:
    """Seconds from one device to another, by their numbers where they were measured."""

    source: Natural
    target: Natural
    seconds: Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """What a layer of a recipe takes on devices of one kind.

    Attributes:
        recipe: Whose layer it is.
        layer: What was run of it; only times of equal layers are compared.
        device_kind: As JAX names it.
        platform: Of the devices: `cpu`, `gpu`.
        jax: Version it was measured with.
        colossax: Likewise.
        devices: Forward and backward of a microbatch, of each of this kind.
        flops: What that multiplies, recomputation included; 0 where it was not counted.
    """

    recipe: str
    layer: str
    device_kind: str
    platform: str
    jax: str
    colossax: str
    devices: tuple[DeviceTime, ...]
    flops: NotNegative = 0.0

    def __post_init__(self):
        _check(self, self.devices, "stages", "devices")

    def seconds(self, number: int | None = None) -> float:
        """Of the device of this number; of one that was not measured, the median."""
        own = [device.seconds for device in self.devices if device.number == number]
        return own[0] if own else median(device.seconds for device in self.devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRate:
    """A kind of collective among all devices: as many times the latency as messages follow one
    another (`aot.hops`), and what a device sends at the rate.

    Attributes:
        kind: As XLA calls it.
        devices: Of the ring.
        latency_s: Of a hop.
        bytes_per_s: That a device sends.
    """

    kind: str
    devices: Natural
    latency_s: NotNegative
    bytes_per_s: Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device does by itself.

    Attributes:
        dtype: Of both factors of the matmul: a microbatch's activations, and four times as wide.
        flops_per_s: Of that.
        bytes_per_s: Read and written by a copy.
    """

    dtype: str
    flops_per_s: Positive
    bytes_per_s: Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """What it takes to hand a microbatch's activations from a device to its neighbour.

    Attributes:
        recipe: Whose activations they are.
        sent_bytes: Of one transfer.
        device_kind: As JAX names it, of one end.
        other_kind: Of the other; the two are sorted.
        platform: Of the devices.
        jax: Version it was measured with.
        colossax: Likewise.
        pairs: Of one transfer, of each pair of neighbours of these kinds.
        collectives: Among all devices, where they are of one kind.
        device: What one of them does by itself; None where it was not measured.
    """

    recipe: str
    sent_bytes: Positive
    device_kind: str
    other_kind: str
    platform: str
    jax: str
    colossax: str
    pairs: tuple[PairTime, ...]
    collectives: tuple[CollectiveRate, ...] = ()
    device: DeviceRates | None = None

    def __post_init__(self):
        _check(self, self.pairs, "links", "pairs")
        for number, one in enumerate(self.collectives):
            check_types(one, f"links.collectives[{number}]")
        if self.device is not None:
            check_types(self.device, "links.device")

    @property
    def link(self) -> Link:
        """At the median of what was measured; latency counts as part of the rate."""
        seconds = median(pair.seconds for pair in self.pairs)
        return Link(bytes_per_s=self.sent_bytes / seconds)


def layer_times_path(device_kind: str, recipe: str) -> Path:
    """The file that holds what a recipe's layer takes on a kind of device, in the cache folder."""
    return measured_path("stages", device_kind, recipe)


def link_times_path(kind: str, other: str, recipe: str) -> Path:
    """The file of links between two kinds of devices, whichever comes first."""
    return measured_path("links", " ".join(sorted((kind, other))), recipe)


def save_layer_times(times: LayerTimes, path: Path | None = None) -> Path:
    """Write where `stage_speeds` finds it, or at `path`; whole or not at all.

    Raises:
        InputError: The folder cannot be written.
    """
    path = layer_times_path(times.device_kind, times.recipe) if path is None else path
    write_measured(times, path, "stages")
    return path


def save_link_times(times: LinkTimes, path: Path | None = None) -> Path:
    """Write where `stage_link` finds it, or at `path`; see `save_layer_times`."""
    if path is None:
        path = link_times_path(times.device_kind, times.other_kind, times.recipe)
    write_measured(times, path, "links")
    return path


def load_layer_times(device_kind: str, recipe: str) -> LayerTimes | None:
    """What was last measured, None where nothing was.

    Raises:
        InputError: The file is damaged, or of a form that this version does not read.
    """
    path = layer_times_path(device_kind, recipe)
    return read_measured(LayerTimes, path, "stages", f"colossax bench stages {recipe}")


def read_link_times(path: Path) -> LinkTimes | None:
    """What a file of `bench links` holds, None where there is none; see `load_layer_times`."""
    return read_measured(LinkTimes, path, "links", "colossax bench links RECIPE")


def load_link_times(kind: str, other: str, recipe: str) -> LinkTimes | None:
    """What was last measured, None where nothing was; see `load_layer_times`."""
    path = link_times_path(kind, other, recipe)
    return read_measured(LinkTimes, path, "links", f"colossax bench links {recipe}")


def stage_seconds(
    device_kinds: Sequence[str], recipe: str, *, numbers: Sequence[int] | None = None
) -> tuple[float, ...]:
    """Seconds of a layer of the recipe on each device, as `bench stages` measured it.

    Args:
        device_kinds: As JAX names them, of each device.
        recipe: Whose layer was measured.
        numbers: Of each device where it was measured; None: the median of its kind counts for each.

    Raises:
        InputError: Nothing was measured on one of these kinds, or another layer than on the first;
            a file is damaged.
    """
    kinds = list(dict.fromkeys(device_kinds))
    found = {kind: _found(load_layer_times(kind, recipe), kind, recipe) for kind in kinds}
    for kind, times in found.items():
        if times.layer != found[kinds[0]].layer:
            raise InputError(
                f"stages of {recipe}: '{kind}' was measured with {times.layer} and '{kinds[0]}'"
                f" with {found[kinds[0]].layer}; measure both alike with colossax bench stages"
                f" {recipe}, or give speeds"
            )
    places = itertools.repeat(None, len(device_kinds)) if numbers is None else numbers
    pairs = zip(device_kinds, places, strict=True)
    return tuple(found[kind].seconds(number) for kind, number in pairs)


def stage_speeds(
    device_kinds: Sequence[str],
    recipe: str,
    *,
    given: Sequence[float] | None = None,
    numbers: Sequence[int] | None = None,
) -> tuple[float, ...]:
    """Speed of each device, relative to the fastest: as given, or as `bench stages` measured.

    Args:
        device_kinds: See `stage_seconds`.
        recipe: See `stage_seconds`.
        given: In place of what was measured.
        numbers: See `stage_seconds`.

    Raises:
        InputError: See `stage_seconds`; or other numbers of speeds are given.
    """
    if given is not None:
        speeds = _checked(given, len(device_kinds))
    else:
        speeds = [1 / s for s in stage_seconds(device_kinds, recipe, numbers=numbers)]
    return tuple(speed / max(speeds) for speed in speeds)


def stage_link(kind: str, other: str, recipe: str, *, given: Link | None = None) -> Link:
    """The link between devices of two kinds: as given, or as `bench links` measured.

    Raises:
        InputError: Nothing was measured between such devices, or the file is damaged.
    """
    if given is not None:
        return given
    times = load_link_times(kind, other, recipe)
    if times is None:
        raise InputError(
            f"links of {recipe}: nothing was measured between '{kind}' and '{other}'; run colossax"
            f" bench links {recipe} where both are, or give rates"
        )
    return times.link


def _found(times: LayerTimes | None, kind: str, recipe: str) -> LayerTimes:
    if times is None:
        raise InputError(
            f"stages of {recipe}: nothing was measured on '{kind}'; run colossax bench stages"
            f" {recipe} there, or give speeds"
        )
    return times


def _checked(speeds: Sequence[float], count: int) -> Sequence[float]:
    if len(speeds) != count:
        raise InputError(f"speeds: found {len(speeds)} for {count} devices; give one for each")
    for number, speed in enumerate(speeds):
        above(0).check(float(speed), f"speeds[{number}]")
    return speeds


def _check(times: Any, measured: Sequence[Any], where: str, field: str) -> None:
    check_types(times, where)
    if not measured:
        raise InputError(f"{where}.{field}: found none; give one or more")
    for number, one in enumerate(measured):
        check_types(one, f"{where}.{field}[{number}]")
