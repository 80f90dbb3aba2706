"""Attention to pages as a kernel for Hopper GPUs."""
