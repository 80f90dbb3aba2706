"""What a plan leaves open, decided."""
