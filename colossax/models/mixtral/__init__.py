"""Mixtral: Mistral's parts, experts in place of MLPs."""

from .config import MixtralConfig as MixtralConfig
