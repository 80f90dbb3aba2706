"""Names of the adapters that an engine has."""

from collections.abc import Sequence

from colossax.errors import InputError
from colossax.inference.engine.program import EngineProgram


def named(names: Sequence[str], program: EngineProgram) -> tuple[str, ...]:
    """Names of the adapters of a program's model, in their order.

    Raises:
        InputError: There are more or fewer, or one comes twice.
    """
    found = tuple(names)
    if len(set(found)) != len(found) or len(found) != program.adapters:
        raise InputError(
            f"adapters: found the names {', '.join(found) or '(none)'}, and the model has"
            f" {program.adapters} side by side; give as many, each once"
        )
    return found


def check_adapter(name: str | None, names: Sequence[str]) -> None:
    """Refuse a request for an adapter that there is none of.

    Raises:
        InputError: With those that there are.
    """
    if name is not None and name not in names:
        raise InputError(
            f"adapter: found '{name}'; give one of {', '.join(names)}, or leave it out"
            if names
            else f"adapter: found '{name}', and the engine has none; leave it out"
        )
