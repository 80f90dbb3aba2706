"""RoBERTa."""

from .config import RoBERTaConfig as RoBERTaConfig
