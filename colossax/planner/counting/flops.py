"""How much of the devices' arithmetic a run uses."""

import dataclasses
from collections.abc import Sequence

from colossax.aot import Target

_PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "B200": (2250.0, 1125.0),
    "GH200": (989.0, 494.7),
    "H200": (989.0, 494.7),
    "H100 PCIe": (756.0, 378.0),
    "H100 NVL": (835.0, 417.5),
    "H100": (989.0, 494.7),
    "H800": (989.0, 494.7),
    "H20": (148.0, 74.0),
    "A100": (312.0, 156.0),
    "A800": (312.0, 156.0),
    "L40S": (362.0, 183.0),
    "L40": (181.0, 90.5),
    "L4": (121.0, 60.0),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 62.5),
}
"""Dense peaks by the makers' data sheets: 16-bit, and float32 inputs (which JAX multiplies in
TF32 by default). The first name found in the device's kind counts, so longer names stand first."""

_WITHOUT_FLOAT8 = ("A100", "A800", "A10G", "A10")
"""Of compute capability below 8.9; all others multiply float8 at twice their 16-bit peak."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """FLOP/s of one device at its best, None where it is not known (CPUs among them).

    Args:
        device_kind: As JAX says it.
        dtype: What is multiplied, see `Precision.multiplies_in`; of `float8` devices that have
            none have no peak.
    """
    for name, (narrow, wide) in _PEAK_TFLOPS.items():
        if name in device_kind:
            if dtype == "float8":
                return None if name in _WITHOUT_FLOAT8 else 2e12 * narrow
            return 1e12 * (wide if dtype == "float32" else narrow)
    return None


def all_peak_flops(target: Target, dtype: str) -> float | None:
    """FLOP/s of all of a target's devices at their best; None where it is not known of some."""
    peaks = [peak_flops(island.gpu.name, dtype) for island in target.islands]
    pairs = zip(peaks, target.islands, strict=True)
    return None if None in peaks else sum((peak or 0.0) * one.size for peak, one in pairs)


def matmul_seconds(flops: int | float, float8_flops: int | float, peaks: Sequence[float]) -> float:
    """What FLOPs take, each at the peak of what it multiplies in.

    Args:
        flops: All.
        float8_flops: Of those, what is multiplied in float8.
        peaks: FLOP/s in the compute dtype, and in float8 where anything is.
    """
    return (flops - float8_flops) / peaks[0] + float8_flops / peaks[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What turns tokens per second into a share of the peak.

    Attributes:
        flops_per_token: Of the model, forward and backward.
        peak: FLOP/s of all devices together; None when unknown.
    """

    flops_per_token: int
    peak: float | None

    def mfu(self, tokens_per_s: float) -> float | None:
        """Share of the peak, 0 to 1; None when the peak is unknown."""
        return None if self.peak is None else tokens_per_s * self.flops_per_token / self.peak
