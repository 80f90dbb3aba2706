"""Falcon."""

from .config import FalconConfig as FalconConfig
