"""Groups of rows, each times a matrix of its own."""

from .api import grouped_matmul as grouped_matmul
