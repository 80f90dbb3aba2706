"""This machine: what it has, which devices are taken, which kernels and programs it keeps."""
