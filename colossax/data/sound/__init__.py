"""Sound as rows: frames of the logarithms of its energies, and tones to hear."""
