"""GLM-4-0414."""

from .config import GLM4Config as GLM4Config
