"""GLM-4-9B."""

from .config import GLMConfig as GLMConfig
