"""What measured rates decide: the CPU's share of an update, the share of the tokens whose hidden
states go to host memory, and the tokens that hide the traffic.

The states lie in host memory. Per parameter that the device updates, `s` bytes go to it and `s`
come back; per parameter that the CPU updates, the gradient comes to it and the new parameter goes
to the device, in bfloat16. With x of the parameters on the CPU, N in all, an update takes

    T(x) = N max(x / U_c, ((1 - x) s + 2 x) / B, (1 - x) / U_g)

seconds: U_c and U_g parameters a second on CPU and device, B bytes a second each way.
"""

import itertools
import math

from colossax.offload.rates import Rates

GRADIENT_BYTES = 2
"""Per parameter and direction, for what the CPU updates."""

LEAST_CPU = 0.2
"""The CPU takes part only if in the time that a parameter travels it updates more than this."""

LEAST_GAIN = 0.1
"""And only if that saves more than this share of an update: it costs a thread, and cores that
whatever prepares batches could use."""


def cpu_share(rates: Rates, bytes_per_direction: int | float) -> float:
    """Share of the parameters that the CPU should update; 0 where that does not pay.

    Where the device is a CPU it never does: both would be the same cores.

    Args:
        rates: Measured where the share will be used.
        bytes_per_direction: Per parameter that the device updates: 12 for Adam in float32.

    Reference: Maurya et al. 2024, Deep Optimizer States: Towards Scalable Training of Transformer
    Models using Interleaved Offloading; there, the share is the device's.
    """
    update = rates.update(bytes_per_direction)
    at_once = update.cpu_parameters_per_s * bytes_per_direction / rates.both_ways_bytes_per_s
    if rates.platform == "cpu" or at_once <= LEAST_CPU:
        return 0.0
    share = balanced_share(rates, bytes_per_direction)
    alone = update_seconds(0.0, rates, bytes_per_direction)
    gain = 1 - update_seconds(share, rates, bytes_per_direction) / alone
    return share if gain > LEAST_GAIN else 0.0


def balanced_share(rates: Rates, bytes_per_direction: int | float) -> float:
    """The x of least T(x), whatever it gains: the smallest where several are.

    T is the highest of three straight lines, so that its least is where two of them cross, or at
    an end. Most often the CPU is as long as the traffic: x = (s / B) / (1 / U_c + (s - 2) / B).
    """
    lines = _lines(rates, bytes_per_direction)
    crossings = [
        (a0 - b0) / (b1 - a1) for (a0, a1), (b0, b1) in itertools.combinations(lines, 2) if a1 != b1
    ]
    candidates = sorted({0.0, 1.0, *(x for x in crossings if 0 < x < 1)})
    return min(candidates, key=lambda x: update_seconds(x, rates, bytes_per_direction))


def update_seconds(
    share: float, rates: Rates, bytes_per_direction: int | float, parameters: int | float = 1
) -> float:
    """T(share), the three at once, each at its measured rate."""
    lines = _lines(rates, bytes_per_direction)
    return parameters * max(at_zero + slope * share for at_zero, slope in lines)


def _lines(rates: Rates, bytes_per_direction: int | float) -> list[tuple[float, float]]:
    """Seconds a parameter of CPU, traffic and device: at x = 0, and what x = 1 adds."""
    update = rates.update(bytes_per_direction)
    cpu_s, device_s = 1 / update.cpu_parameters_per_s, 1 / update.device_parameters_per_s
    byte_s = 1 / rates.both_ways_bytes_per_s
    return [
        (0.0, cpu_s),
        (bytes_per_direction * byte_s, (GRADIENT_BYTES - bytes_per_direction) * byte_s),
        (device_s, -device_s),
    ]


def kept_token_share(
    *,
    bytes_per_s: int | float,
    layer_s: int | float,
    fixed_bytes: int | float,
    mlp_bytes: int | float,
    host_bytes: int | float = math.inf,
) -> float:
    """Share of the tokens whose MLP's hidden states host memory should keep, 0 to 1.

    `min(1, (B t - s_fixed) / s_mlp, (M - s_fixed) / s_mlp)`, never below 0: as many as travel while
    a layer is computed, and as many as fit.

    Args:
        bytes_per_s: B, from the device to host memory.
        layer_s: t, seconds of a layer's forward pass.
        fixed_bytes: s_fixed, what else of a layer goes to host memory in that time.
        mlp_bytes: s_mlp, of the hidden states of all tokens, above 0.
        host_bytes: M, host memory for what a layer keeps.

    Reference: Zhao et al. 2025, MEMO: Fine-grained Tensor Management For Ultra-long Context LLM
    Training (SIGMOD); there, M is the host's memory over the number of layers.
    """
    room = min(bytes_per_s * layer_s, host_bytes) - fixed_bytes
    return min(1.0, max(0.0, room / mlp_bytes))


def hiding_tokens(
    rates: Rates,
    bytes_per_direction: int | float,
    *,
    host_share: float = 1.0,
    flops_per_parameter: int | float = 8,
) -> float:
    """Tokens per device and step from which computing takes longer than the traffic.

    `host_share bytes_per_direction F / (flops_per_parameter B)`, with F the flop/s of a matmul
    alone: a step that reaches less of it hides its traffic with fewer tokens.

    Args:
        rates: Measured.
        bytes_per_direction: Per parameter of the host.
        host_share: Of the parameters, how many lie on the host.
        flops_per_parameter: And token: 2 forward, 4 backward, 2 for a forward pass run again.
    """
    traffic_s = host_share * bytes_per_direction / rates.both_ways_bytes_per_s
    return traffic_s * rates.matmul_flops_per_s / flops_per_parameter
