"""Files of benchmarks as people have them, read where they lie: nothing is downloaded."""
