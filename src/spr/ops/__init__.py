"""Owns tensor operations that know no configuration: plain ones, their kernels for a GPU, and graph capture."""
