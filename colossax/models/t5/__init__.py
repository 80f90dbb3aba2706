"""T5, T5 1.1 and Flan-T5."""

from .config import T5Config as T5Config
