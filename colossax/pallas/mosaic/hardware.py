"""Which hardware and which assembler Mosaic kernels are for."""

from colossax.compat import cuda_runtime_version, linked_by_nvjitlink
from colossax.pallas.target import Target, current_target

MULTIPROCESSORS = 132
"""Of an H100 SXM and an H200: taken where a target does not say how many it has."""

_WRONG_FROM, _WRONG_BEFORE = (12, 8, 0), (12, 9, 1)


def why_not_hardware(target: Target) -> str | None:
    """Why a kernel with `wgmma` cannot run on a target, or None.

    Nothing may be tried there instead: without `wgmma` the assembler refuses the kernel, and below
    compute capability 9.0 the compiler ends the process. JAX's own kernels refuse the assemblers of
    CUDA 12.8.0 up to 12.9.1, which miscompile masks, so ours do too.
    """
    if target.platform != "gpu":
        return f"Mosaic kernels need an NVIDIA GPU, the target is '{target.platform}'"
    if target.compute_capability is None:
        return "Mosaic kernels need compute capability 9.0, and the target's is not known"
    if target.compute_capability != (9, 0):
        capability = ".".join(map(str, target.compute_capability))
        return f"Mosaic kernels need compute capability 9.0, found {capability}"
    version = cuda_runtime_version()
    if version is not None and _WRONG_FROM <= version < _WRONG_BEFORE:
        cuda = ".".join(map(str, version))
        return f"CUDA {cuda} miscompiles masks of Mosaic kernels; install 12.9.1 or later"
    return None


def why_slow(target: Target) -> str | None:
    """Why a kernel that is right on a target would be slow there, or None.

    Relocatable code ignores `setmaxnreg` (the assembler's C7504): warpgroups that compute get no
    more registers than the one that copies, and where those are too few they spill, and matmuls
    wait for one another (C7512). No directive of PTX changes that.
    """
    if target.platform == "gpu" and linked_by_nvjitlink():
        return (
            "this JAX links kernels with nvJitLink, which ignores their register limits; install"
            " a JAX before 0.12, or name the kernels, to run them as slow as they are"
        )
    return None


def multiprocessors() -> int:
    """How many the target in force has, as its device says."""
    return current_target().multiprocessors or MULTIPROCESSORS
