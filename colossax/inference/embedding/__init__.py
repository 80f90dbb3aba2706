"""Texts of many people in, a vector of each out."""

from .embedder import Embedded as Embedded
from .embedder import Embedder as Embedder
from .embedder import EmbedderStats as EmbedderStats
from .heads import tells_embeddings as tells_embeddings
from .heads import with_embedding as with_embedding
