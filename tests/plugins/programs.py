"""Programs that tests compile are kept from one run to the next, outside of the tree.

Half of what a run takes is compiling, and most programs are those of the run before. The folder
may be deleted at any time; `COLOSSAX_TEST_PROGRAMS` names another, `none` does without. Children
of tests keep nothing.
"""

import os
from pathlib import Path

import jax

from colossax.cli.machine.programs import keep_programs
from colossax.config import cache_folder

LARGEST_BYTES = 2 * 2**30


def keep():
    """Have this process keep what it compiles, as the command line does."""
    # For children, which the command line would have keep theirs; workers of pytest read it too.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    jax.config.update("jax_enable_compilation_cache", True)
    folder = os.environ.get("COLOSSAX_TEST_PROGRAMS")
    if folder != "none":
        place = Path(folder) if folder else cache_folder() / "programs_of_tests"
        keep_programs(place, largest_bytes=LARGEST_BYTES)
