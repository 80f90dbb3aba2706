"""What `colossax bench` measures beside kernels."""
