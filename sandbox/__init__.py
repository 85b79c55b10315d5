"""Sandboxes, tasks, verifiers and audit: the environment side of t1jax, with no JAX in it."""
