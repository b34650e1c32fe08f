"""Owns what knows nothing of reinforcement learning: errors, files, locks, devices, plug-ins, signals."""
