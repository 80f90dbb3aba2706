"""OLMoE: Llama's parts, norms over all heads of queries and keys, experts in place of MLPs."""

from .config import OLMoEConfig as OLMoEConfig
