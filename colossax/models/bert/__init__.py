"""BERT."""

from .config import BERTConfig as BERTConfig
