"""SmolLM3."""

from .config import SmolLM3Config as SmolLM3Config
