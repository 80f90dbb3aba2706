"""Rates that were measured, as text for people."""

from collections.abc import Iterator, Sequence

from colossax.pipeline.measured import CollectiveRate, DeviceRates


def rate_lines(collectives: Sequence[CollectiveRate], device: DeviceRates | None) -> Iterator[str]:
    """A line for each kind of collective, and one for what a device does alone."""
    if collectives:
        yield f"collectives among all {collectives[0].devices}, as if around a ring:"
    for one in collectives:
        yield (
            f"  {one.kind}: {one.latency_s * 1e6:.3g} us a hop,"
            f" {one.bytes_per_s / 1e9:.3g} GB/s that a device sends"
        )
    if device is not None:
        yield (
            f"a device alone: matmul {device.flops_per_s / 1e12:.3g} TFLOP/s in {device.dtype},"
            f" copy {device.bytes_per_s / 1e9:.3g} GB/s read and written"
        )
