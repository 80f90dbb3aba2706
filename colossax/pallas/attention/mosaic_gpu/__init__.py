"""Flash attention as Mosaic GPU kernels, for compute capability 9.0 or the interpreter."""
