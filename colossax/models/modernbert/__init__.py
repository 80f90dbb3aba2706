"""ModernBERT."""

from .config import ModernBERTConfig as ModernBERTConfig
