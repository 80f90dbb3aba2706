"""Programs compiled for GPUs that are not there, and what the compiler says about them."""

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from colossax.aot.kept_kernels import forget_kernels, kept_kernels
from colossax.aot.targets import Gpu, Island, Target
from colossax.compat import PluginMissing, topology_devices
from colossax.errors import InputError
from colossax.quiet import captured_stderr

_LIMITS = {
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}
_CUDA, _CUDNN = "12.8.0", (9, 10, 0)
"""Versions the compiler is told the machine has."""

_ROOM = 8
"""The compiler is told of this times the memory: near the limit it would recompute values to fit,
and the bytes would be those of another program."""

_DUMPS = {
    "hlo": "gpu_after_optimizations.txt",
    "assignment": "gpu_after_optimizations-buffer-assignment.txt",
    "live_ranges": "gpu_after_optimizations-live-range.txt",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program as text and numbers.

    Attributes:
        hlo: Scheduled instructions.
        assignment: Where the compiler placed each value.
        live_ranges: When it needs them.
        stats: Sizes of arguments, outputs, aliases and temporaries, on the device and the host.
        messages: What the compiler wrote to standard error.
        compile_s: Seconds it took.
        out_shardings: Of the results, by their tree.
    """

    hlo: str
    assignment: str
    live_ranges: str
    stats: Any
    messages: str
    compile_s: float
    out_shardings: Any = None

    @property
    def device_bytes(self) -> int:
        """Device memory the program needs; see `device_bytes`."""
        return device_bytes(self.stats)

    @property
    def host_bytes(self) -> int:
        """Host memory it needs, counted in the same way."""
        return host_bytes(self.stats)


def device_bytes(stats: Any) -> int:
    """Device memory by `memory_analysis()`: arguments, outputs that are no aliases, temporaries.

    The compiler's own `peak_memory_in_bytes` counts host memory as well.
    """
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def host_bytes(stats: Any) -> int:
    """Host memory, counted in the same way."""
    return (
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes
    )


def target_devices(target: Target) -> list[jax.Device]:
    """Devices of a target, for a mesh; programs can be compiled for them and not run.

    Those of each island belong to a client of their own: a mesh may have devices of several, a
    program may not.

    Raises:
        InputError: The extra `aot` is not installed.
    """
    with captured_stderr():
        try:
            return [device for island in target.islands for device in _devices(island)]
        except PluginMissing as problem:
            raise InputError(
                f"compiling for '{target.name}' needs the CUDA compiler plugin ({problem});"
                f" run: pip install 'colossax[aot]'"
            ) from problem


def compile_program(
    lowered: Any, *, options: Mapping[str, Any] | None = None, target: Target | None = None
) -> Program:
    """Compile what was lowered for `target_devices`.

    Args:
        lowered: Result of `jax.jit(...).lower(...)`.
        options: Compiler options besides.
        target: What it was lowered for. Of one island kernels are kept, and those of earlier
            programs taken (`kept_kernels`); else all is compiled.

    Raises:
        ValueError: The compiler left out a text that the counters read.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
        with captured_stderr() as messages:
            started = time.perf_counter()
            compiled = _compiled(lowered, {**(options or {}), **dump}, target, Path(folder))
            seconds = time.perf_counter() - started
        texts = {name: _dumped(Path(folder), ending) for name, ending in _DUMPS.items()}
    return Program(
        **texts,
        stats=compiled.memory_analysis(),
        messages=messages.text,
        compile_s=seconds,
        out_shardings=compiled.output_shardings,
    )


def _compiled(lowered: Any, options: Mapping[str, Any], target: Target | None, folder: Path) -> Any:
    """By kept kernels where there may be some; without where the compiler cannot read them."""
    if target is None or target.mixed:
        return lowered.compile(compiler_options=options)
    try:
        with kept_kernels(target.gpu, folder) as kept:
            return lowered.compile(compiler_options={**options, **kept})
    except jax.errors.JaxRuntimeError:
        compiled = lowered.compile(compiler_options=options)  # raises again where kernels are right
        forget_kernels(target.gpu)
        return compiled


def _devices(island: Island) -> list[jax.Device]:
    return topology_devices(_description(island.gpu), f"1x{island.nodes}x{island.gpus}")


def _description(gpu: Gpu) -> str:
    """The GPU in the text form of XLA's target configuration."""
    major, minor = gpu.compute_capability
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    numbers = {
        **gpu.device,
        **_LIMITS,
        "memory_bandwidth": int(gpu.memory_bytes_per_s),
        "device_memory_size": gpu.memory_bytes * _ROOM,
        "pcie_bandwidth": int(gpu.pcie_bytes_per_s),
    }
    dnn = ".".join(map(str, _CUDNN))
    dnn_fields = zip(("major", "minor", "patch"), _CUDNN, strict=True)
    lines = [
        "gpu_device_info {",
        *(f"  {name}: {value}" for name, value in numbers.items()),
        "  cuda_compute_capability {",
        f"    major: {major} minor: {minor} feature_extension: {feature}",
        "  }",
        f'  runtime_version: "{_CUDA}" compile_time_toolkit_version: "{_CUDA}"',
        f'  driver_version: "13.0.0" dnn_version: "{dnn}"',
        "}",
        'platform_name: "CUDA"',
        f"dnn_version_info {{ {' '.join(f'{name}: {n}' for name, n in dnn_fields)} }}",
        f'device_description_str: "{gpu.name}"',
    ]
    return "\n".join(lines)


def _dumped(folder: Path, ending: str) -> str:
    """The largest file of this ending: a program may bring small helpers along."""
    paths = sorted(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    if not paths:
        raise ValueError(f"the compiler dumped no file that ends in '{ending}'")
    return paths[-1].read_text(encoding="utf-8")
