"""What `quantization_config` may say of how a folder's matrices are stored."""

from collections.abc import Mapping
from typing import Any

from colossax.errors import InputError

CONFIG = "quantization_config"


def one_of(
    said: Mapping[str, Any], name: str, allowed: tuple | type, *, needed: bool = False
) -> Any:
    """A setting, which is the first of those allowed where it is not said.

    Args:
        said: The settings.
        name: Which.
        allowed: Values that are read; or a type, and then it must be said.
        needed: Whether it must be said.

    Raises:
        InputError: It is another value, or missing.
    """
    if name not in said and isinstance(allowed, tuple) and not needed:
        return allowed[0]
    value = said.get(name)
    if isinstance(allowed, type):
        if type(value) is not allowed:
            raise InputError(
                f"config.json: {CONFIG} with {name} = {value!r} is not supported; it must be"
                f" {'a whole number' if allowed is int else f'a {allowed.__name__}'}"
            )
        return value
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise InputError(
            f"config.json: {CONFIG} with {name} = {value!r} is not supported; only"
            f" {' or '.join(map(repr, allowed))} is: give the model in floats, or so quantised"
        )
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """What is said in an object; of anything else nothing is."""
    return value if isinstance(value, dict) else {}
