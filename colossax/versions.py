"""Which JAX is supported; says so without importing JAX where it can."""

import re
import sys
from importlib import metadata

LOWEST_JAX = (0, 10, 2)


def version_tuple(text: str) -> tuple[int, ...]:
    """`"0.12.0.1rc1"` as (0, 12, 0, 1)."""
    return tuple(int(re.match(r"\d*", part).group() or 0) for part in text.split(".")[:4])  # type: ignore[union-attr]


def require_supported_jax() -> None:
    """Refuse a JAX older than the oldest one the tests run on.

    Raises:
        ImportError: JAX is older than `LOWEST_JAX`.
    """
    found = _jax_version()
    if version_tuple(found) < LOWEST_JAX:
        wanted = ".".join(map(str, LOWEST_JAX))
        raise ImportError(f"colossax needs jax >= {wanted}, found {found}; upgrade jax")


def _jax_version() -> str:
    """Of the JAX that is imported, else of the one that is installed."""
    if "jax" not in sys.modules:
        try:
            return metadata.version("jax")
        except metadata.PackageNotFoundError:
            pass  # on the path without having been installed
    import jax

    return jax.__version__
