"""Operations with several implementations; each works in any JAX program, one device at a time."""

from .target import Target as Target
from .target import current_target as current_target
from .target import target as target
