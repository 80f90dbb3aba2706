"""The recipes there are, told."""

import json
import sys

from colossax.recipes import described


def list_recipes(*, as_json: bool) -> int:
    """Tell the recipes of the library and return the exit code."""
    for name, line in described().items():
        one = json.dumps({"recipe": name, "summary": line}) if as_json else f"{name:14}{line}"
        sys.stdout.write(f"{one}\n")
    return 0
