"""OPT (the pre-norm sizes)."""

from .config import OPTConfig as OPTConfig
from .model import OPT as OPT
