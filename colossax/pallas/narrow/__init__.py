"""What matmuls of few rows with packed weights have in common."""
