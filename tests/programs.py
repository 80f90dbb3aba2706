"""Equations of traced programs."""


def equations(jaxpr, depth=0):
    """(How many loops it stands in, equation) of all, but those inside of kernels."""
    for one in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield depth, one
        if _is_kernel(one.primitive.name):
            continue
        inner = depth + (one.primitive.name in ("scan", "while"))
        for value in one.params.values():
            for part in value if isinstance(value, list | tuple) else [value]:
                if hasattr(part, "jaxpr") or hasattr(part, "eqns"):
                    yield from equations(part, inner)


def _is_kernel(name):
    return any(part in name for part in ("mosaic", "pallas", "core_map", "mpmd_map", "run_state"))
