"""Owns a fleet's training: the learner, acting, the loop, resets, checkpoints."""
