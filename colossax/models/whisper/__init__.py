"""Whisper."""

from .config import WhisperConfig as WhisperConfig
