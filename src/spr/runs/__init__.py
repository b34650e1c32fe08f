"""Owns the files of one run: its folder, weights, metrics, and what is exported."""
