"""Command R."""

from .config import CohereConfig as CohereConfig
