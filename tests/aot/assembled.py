"""What is asked of every kernel that the assembler has seen."""

import dataclasses

import jax
import jax.numpy as jnp

from colossax.compat import linked_by_nvjitlink


def stacked(visits):
    """Those of three steps of a ring, of which the kernel takes the second."""
    stacks = jax.tree.map(lambda x: jnp.stack([x, x + 1, x]), visits)
    return dataclasses.replace(stacks, step=jnp.ones((1,), jnp.int32))


def assert_fast(report, name="", *, known=(), spill_bytes=0):
    """No spills and no lost register limits; these are lost just where `auto` knows it.

    Args:
        report: Of `aot.kernel_reports`.
        name: For people.
        known: Warnings that are no loss.
        spill_bytes: Known too.
    """
    assert report.architecture == "sm_90a"
    assert ("C7504" in report.warnings) == linked_by_nvjitlink(), name
    if not linked_by_nvjitlink():
        assert set(report.warnings) <= set(known), name
        assert report.spill_bytes == spill_bytes, name
