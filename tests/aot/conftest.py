"""Programs are kept with the names of the files and lines that wrote them."""

import jax
import pytest


@pytest.fixture(autouse=True)
def lines_of_this_tree():
    """Tests here read a program's lines: one kept from another checkout has that one's."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
