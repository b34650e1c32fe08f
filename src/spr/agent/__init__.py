"""Owns one agent's mathematics, as the paper writes it: networks, views, replay, losses, random numbers."""
