"""SigLIP."""

from .config import SigLIPConfig as SigLIPConfig
