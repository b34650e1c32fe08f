"""Owns jobs and sweeps: from what the user asks for to results, with progress, logs and clusters."""
