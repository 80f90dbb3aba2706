"""The only place that knows framework versions or private parts of JAX."""

import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colossax.quiet import cuda_plugin, import_jax
from colossax.versions import require_supported_jax, version_tuple

import_jax()
require_supported_jax()

# ruff: noqa: E402, I001 (what JAX's plugin writes when it is imported is kept back above)
import jax
import numpy as np
from jax._src import clusters, compilation_cache, core, distributed, xla_bridge
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core as extend_core
from jax.interpreters import partial_eval

_JAX = version_tuple(jax.__version__)


def inputs_used(fn: Callable[..., Any], *args: Any) -> tuple[bool, ...]:
    """Which flattened inputs of `fn` its outputs depend on, after dead code is removed.

    Traces `fn` once; nothing is computed.
    """
    closed = jax.make_jaxpr(fn)(*args)
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return tuple(used)


def without_unused(traced: Any) -> Any:
    """The jaxpr of a traced program, without equations that none of its results needs."""
    return partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))[0]


class Equations:
    """A traced program, equation by equation: run as a whole, or in two parts.

    Attributes:
        inputs: Its variables.
        outputs: Variables and literals.
    """

    def __init__(self, traced: Any):
        """Take what `jax.make_jaxpr` gave."""
        self.jaxpr = traced.jaxpr
        self.constants = dict(zip(self.jaxpr.constvars, traced.consts, strict=True))
        self.inputs: list[Any] = self.jaxpr.invars
        self.outputs: list[Any] = self.jaxpr.outvars

    def __call__(self, *inputs: Any) -> list[Any]:
        """Its outputs."""
        return jax.core.eval_jaxpr(self.jaxpr, list(self.constants.values()), *inputs)

    def value(self, atom: Any) -> Any:
        """Of a literal, or of a constant that is known while tracing; else None."""
        if isinstance(atom, extend_core.Literal):
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype)
        constant = self.constants.get(atom)
        return None if isinstance(constant, jax.core.Tracer) else constant

    @staticmethod
    def on_host(atom: Any) -> bool:
        """Whether it is an array in host memory."""
        return atom.aval.memory_space == jax.memory.Space.Host

    def needed(self, atoms: Iterable[Any], known: Sequence[Any] = ()) -> list[Any]:
        """Equations that these depend on, in order, and nothing that `known` ones alone need."""
        wanted, eqns = set(_variables(atoms)), []
        given = {id(eqn) for eqn in known}
        for eqn in reversed(self.jaxpr.eqns):
            if id(eqn) not in given and wanted.intersection(eqn.outvars):
                eqns.append(eqn)
                wanted.update(_variables(eqn.invars))
        return eqns[::-1]

    def part(
        self, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Callable[..., list[Any]]:
        """A program of some equations; constants need not be given."""
        jaxpr = self.jaxpr.replace(eqns=list(eqns), invars=list(inputs), outvars=list(outputs))
        constants = list(self.constants.values())
        return lambda *values: jax.core.eval_jaxpr(jaxpr, constants, *values)

    def split(
        self, first: Sequence[Any], second: Sequence[Any], again: Iterable[Any] = ()
    ) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]], list[Any]]:
        """Two programs: from the inputs to `first` and what crosses, from that to `second`.

        Nothing is done twice. What only `second` needs is done by the first program where that
        makes what crosses no larger, unless it multiplies matrices or has a program of its own.

        Args:
            first: Outputs that are wanted first.
            second: Others.
            again: Inputs that the second program may have again at no cost.

        Returns:
            Both, and the variables that cross.
        """
        wanted = {id(eqn) for eqn in self.needed(first)}
        here = {*self.inputs, *self.constants, *self._made(wanted)}
        costly = here - set(again) - set(self.constants)
        late = [eqn for eqn in self.needed(second) if id(eqn) not in wanted]
        for eqn in late:
            read = set(_variables(eqn.invars))
            if read <= here and not _heavy(eqn) and _nbytes(eqn.outvars) <= _nbytes(read & costly):
                wanted.add(id(eqn))
                here.update(eqn.outvars)
                costly.update(eqn.outvars)
        late = [eqn for eqn in late if id(eqn) not in wanted]
        early = [eqn for eqn in self.jaxpr.eqns if id(eqn) in wanted]
        crossing = self.crossing(late, second)
        return (
            self.part(early, self.inputs, [*first, *crossing]),
            self.part(late, crossing, second),
            crossing,
        )

    def _made(self, eqns: set[int]) -> Iterable[Any]:
        return (v for eqn in self.jaxpr.eqns if id(eqn) in eqns for v in eqn.outvars)

    @staticmethod
    def made(eqns: Iterable[Any]) -> list[Any]:
        """Variables that these give, but for what nobody reads."""
        return [v for eqn in eqns for v in eqn.outvars if not isinstance(v, core.DropVar)]

    @staticmethod
    def variables(atoms: Iterable[Any]) -> list[Any]:
        """Without literals."""
        return _variables(atoms)

    def crossing(self, eqns: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Variables that these equations and outputs read and do not make; no constants."""
        made = {variable for eqn in eqns for variable in eqn.outvars}
        read = [*(v for eqn in eqns for v in _variables(eqn.invars)), *_variables(outputs)]
        return [v for v in dict.fromkeys(read) if v not in made and v not in self.constants]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Of a scan's inputs, how many all turns share, and how many are carried behind them."""
    if "num_carry" in params:  # before JAX 0.12.0.1
        return params["num_consts"], params["num_carry"]
    shared, carried, _ = params["ft_in"].unpack()
    return len(shared), len(carried)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, extend_core.Literal)]


def _heavy(eqn: Any) -> bool:
    """Whether it multiplies matrices, or holds a program of its own, which may."""
    name = eqn.primitive.name
    return "dot" in name or "conv_" in name or any("jaxpr" in key for key in eqn.params)


def _nbytes(variables: Iterable[Any]) -> int:
    avals = [variable.aval for variable in variables]
    return sum(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval, "dtype"))


_INLINED = ("jit", "pjit", "remat2", "remat", "checkpoint", "closed_call", "core_call")


def inlined(traced: Any, instead: Mapping[int, Callable[..., list[Any]]] | None = None) -> Any:
    """The same program with what stands in `jax.jit` and `jax.checkpoint` among its equations.

    What a policy recomputes is then equations like all others.

    Args:
        traced: What `jax.make_jaxpr` gave.
        instead: By `id` of an equation of its own, what is done in its place.
    """

    def run(*inputs: Any) -> list[Any]:
        return _evaluated(traced.jaxpr, traced.consts, inputs, instead or {})

    return jax.make_jaxpr(run)(*traced.in_avals)


def _evaluated(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], instead: Mapping[int, Callable]
) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, extend_core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in _INLINED else None
        if id(eqn) in instead:
            outvars, found = eqn.outvars, instead[id(eqn)](*map(read, eqn.invars))
        elif inner is None:
            invars = list(dict.fromkeys(_variables(eqn.invars)))
            outvars = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
            one = jaxpr.replace(eqns=[eqn], constvars=[], invars=invars, outvars=outvars)
            found = jax.core.eval_jaxpr(one, [], *map(read, invars))
        else:
            outvars = eqn.outvars
            parts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
            found = _evaluated(*parts, [read(atom) for atom in eqn.invars], instead)
        known.update(zip(outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def trace_state() -> Any:
    """The trace in force: equal to another one where no transformation begins between them."""
    return extend_core.get_opaque_trace_state(convention="nnx")


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes along which a value inside `shard_map` may differ between devices."""
    kind = jax.typeof(x)
    older = getattr(kind, "vma", None)
    return frozenset(older) if older is not None else kind.manual_axis_type.varying


class ClusterUnavailable(RuntimeError):
    """A launcher's environment was found but does not tell where the processes are."""


def detect_cluster(timeout_s: float) -> tuple[str, int, int, Sequence[int] | None] | None:
    """Coordinator, process count, process id and own device ids, as Slurm, Open MPI or an indexed
    Kubernetes job tell them; None outside of those. Found as `jax.distributed` finds them.

    Raises:
        ClusterUnavailable: The environment is there but incomplete.
    """
    kinds: list[Any] = [clusters.SlurmCluster, clusters.OmpiCluster]
    # JAX takes every pod for a part of a job; only indexed jobs have this variable.
    if "JOB_COMPLETION_INDEX" in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
        if importlib.util.find_spec("kubernetes") is None:
            raise ClusterUnavailable("an indexed Kubernetes job needs the package 'kubernetes'")
        kinds.append(clusters.K8sCluster)
    cluster = next((kind for kind in kinds if kind.is_env_present()), None)
    if cluster is None:
        return None
    try:
        port = os.environ.get("JAX_COORDINATOR_PORT")
        count, index = cluster.get_process_count(), cluster.get_process_id()
        chosen = os.environ.get("JAX_LOCAL_DEVICE_IDS")
        local_id = None if chosen else cluster.get_local_process_id()
        address = cluster.get_coordinator_address(int(timeout_s), port) if count > 1 else ""
    except (RuntimeError, ValueError, KeyError) as problem:
        raise ClusterUnavailable(f"{cluster.__name__}: {problem}") from problem
    return address, count, index, None if local_id is None else [local_id]


class PluginMissing(RuntimeError):
    """The CUDA compiler plugin of JAX is not installed, or another version than JAX."""


def topology_devices(target_config: str, topology: str) -> list[jax.Device]:
    """Devices of a CUDA topology that is not there.

    Args:
        target_config: The GPU, in the text form of XLA's target configuration.
        topology: `slices x hosts x devices`, such as `1x2x8`.

    Raises:
        PluginMissing: There is no plugin.
    """
    if cuda_plugin() is None:
        raise PluginMissing("none is installed")
    # The plugin checks for a driver and for CUDA libraries of which compiling needs none.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        description = topologies.get_topology_desc(
            platform="cuda", target_config=target_config, topology=topology
        )
    except (RuntimeError, NotImplementedError) as problem:
        raise PluginMissing(str(problem).splitlines()[0]) from problem
    return list(description.devices)


def through(call: Callable[..., Any], *args: Any) -> Any:
    """`call(*args)`."""
    return call(*args)


def wrap_cache(
    read: Callable[..., Any] = through, write: Callable[..., Any] = through
) -> Callable[[], None]:
    """Have JAX's persistent cache begin anew, its entries read and written through these.

    Args:
        read: `(read, key, ...) -> (executable or None, seconds or None)`.
        write: `(write, key, name, executable, ...)`.

    Returns:
        What undoes it.
    """
    before = compilation_cache.get_executable_and_time, compilation_cache.put_executable_and_time

    def put_in(get: Callable[..., Any], put: Callable[..., Any]) -> None:
        compilation_cache.get_executable_and_time = get
        compilation_cache.put_executable_and_time = put
        compilation_cache.reset_cache()

    put_in(functools.partial(read, before[0]), functools.partial(write, before[1]))
    return functools.partial(put_in, *before)


def cudnn_installed() -> bool:
    """Whether JAX's CUDA plugin finds cuDNN, which plans attention kernels when lowering."""
    try:
        from jax._src.lib import cuda_versions

        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except (ImportError, RuntimeError):
        return False


def cuda_runtime_version() -> tuple[int, int, int] | None:
    """Version of the CUDA runtime that JAX's plugin has loaded, None where there is none."""
    try:
        from jax._src.lib import cuda_versions

        number = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    except (ImportError, RuntimeError):
        return None
    return (number // 1000, number % 1000 // 10, number % 10) if number else None


def ptxas_path() -> Path | None:
    """The assembler in NVIDIA's package, which XLA takes before any other; None without it."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:
        return None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    # By the extras cuda12 and cuda13.
    places = ("cuda_nvcc/bin/ptxas", "cu13/bin/ptxas")
    paths = (Path(folder) / place for folder in folders for place in places)
    return next((path for path in paths if path.is_file()), None)


def devices_are_fixed() -> bool:
    """Whether JAX has started its backends, after which no CPU devices can be added."""
    return xla_bridge.backends_are_initialized()


def is_attached(device: Any) -> bool:
    """Whether programs can run on a device, of this process or another; not on a topology's."""
    client = getattr(device, "client", None)
    return client is not None and any(client is one for one in xla_bridge.backends().values())


def place_in_job() -> tuple[int, int]:
    """Number of this process and how many there are, as `jax.distributed` was told; else 0, 1."""
    state = distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def tell_job(key: str, value: str) -> str:
    """Give a key of the job's store a value, where it has none; the value that it has then."""
    client: Any = distributed.global_state.client
    try:
        client.key_value_set(key, value, allow_overwrite=False)
    except jax.errors.JaxRuntimeError as problem:
        if "ALREADY_EXISTS" not in str(problem):
            raise
        return client.blocking_key_value_get(key, 10_000)
    return value


def hear_job(key: str, timeout_s: float) -> str | None:
    """The value of a key of the job's store, waited for; None where it comes too late."""
    client: Any = distributed.global_state.client
    try:
        return client.blocking_key_value_get(key, round(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as problem:
        if "DEADLINE_EXCEEDED" not in str(problem):
            raise
        return None


@functools.cache
def linked_by_nvjitlink() -> bool:
    """Whether JAX assembles Mosaic kernels with nvJitLink: as relocatable code.

    JAX 0.12 does, without a setting, wherever its plugin finds nvJitLink 12.5 or newer.
    """
    plugin = cuda_plugin()
    if _JAX < (0, 12) or plugin is None:
        return False
    newest = "13" in plugin.parent.name
    name = f"libnvJitLink.so.{13 if newest else 12}"
    package = plugin.parents[2] / "nvidia" / ("cu13" if newest else "nvjitlink") / "lib"
    for place in (str(package / name), name):
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        try:
            failed = ctypes.CDLL(place).nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError):
            continue
        return not failed and (major.value, minor.value) >= (12, 5)
    return False


def interpreter() -> Any:
    """Parameters that make Mosaic GPU kernels run on the CPU and races be looked for."""
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret import params as interpret_params

    if _JAX < (0, 11):
        thread_map._run_jaxpr = _run_compiled
        gpu_callbacks.is_gmem_memory_space = _is_global_memory
    return interpret_params.InterpretGPUParams(detect_races=True)


def _is_global_memory(space: Any) -> bool:
    """Also of references that name no memory: those of `pl.run_state`, as hardware takes them."""
    return space is None or space == plgpu.GMEM


@functools.lru_cache(maxsize=8)
def _thread_program(jaxpr: Any) -> tuple[threading.Lock, list[Any]]:
    return threading.Lock(), []


def _run_compiled(jaxpr: Any, consts: Any, *args: Any) -> None:
    """One thread of an interpreted kernel, compiled once.

    JAX 0.10 compiles the same program for each thread of each block: 11 s in place of 2 for an
    attention of four blocks.
    """

    def run(consts: Any, *args: Any) -> None:
        jax.core.eval_jaxpr(jaxpr, consts, *args)

    lock, compiled = _thread_program(jaxpr)
    with lock:
        if not compiled:
            compiled.append(jax.jit(run).lower(consts, *args).compile())
    compiled[0](consts, *args)


def races_found() -> bool:
    """Whether the kernel interpreted last had a race; a newer JAX raises in its place."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


def transposed_ref(ref: Any) -> Any:
    """A view of a matrix in shared memory, rows and columns exchanged."""
    return ref.T if _JAX >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))


def tile_of(ref: Any) -> tuple[int, ...] | None:
    """The tile that shared memory is laid out in, None where it is plain."""
    return next((x.tiling for x in getattr(ref, "transforms", ()) if hasattr(x, "tiling")), None)


def window(ref: Any) -> list[tuple[int, Any]]:
    """Of each dim of a view of global memory: the size of the array there, and where it starts."""
    views = getattr(ref, "transforms", ())
    dims: list[tuple[int, Any]] = [(size, 0) for size in (ref.ref if views else ref).shape]
    for view in views:
        dims = [
            (size, start + index.start)
            for (size, start), index in zip(dims, view.indices, strict=True)
            if isinstance(index, pl.Slice)
        ]
    return dims


def load_laid_out(ref: Any, layout: Any) -> jax.Array:
    """All of a vector or matrix, in registers laid out as told."""
    load: Any = plgpu.load
    # "Optimized" loads read shared memory only.
    where: Any = () if _JAX >= (0, 11) else ((),)
    return load(ref, *where, layout=layout, optimized=False)


def store_plain(ref: Any, value: jax.Array) -> None:
    """A matrix from registers to plain shared memory, however slow its layout makes that."""
    store: Any = getattr(plgpu, "store", None)  # since 0.12, where `=` refuses bank conflicts
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)
