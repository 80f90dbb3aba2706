"""OPT."""

from .config import OPTConfig as OPTConfig
