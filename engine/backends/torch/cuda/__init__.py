"""Kernels and modules for NVIDIA GPUs."""
