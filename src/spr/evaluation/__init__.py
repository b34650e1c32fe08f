"""Owns playing with trained agents: evaluation games, the processes they are played in, films."""
