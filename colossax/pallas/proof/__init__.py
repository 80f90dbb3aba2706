"""Kernels earn their trust: `auto` takes one once it has proved itself on this machine."""

from .prover import PROVER as PROVER
from .prover import Prover as Prover
from .verdict import Outcome as Outcome
from .verdict import Variant as Variant
from .verdict import Verdict as Verdict
