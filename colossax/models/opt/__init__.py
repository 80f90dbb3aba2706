"""OPT (the pre-norm sizes)."""

from .config import OPTConfig as OPTConfig
