"""States to disk and back, onto any mesh."""
