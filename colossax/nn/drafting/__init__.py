"""A drafter: a small decoder that reads the keys and values of a large one's last layer."""
