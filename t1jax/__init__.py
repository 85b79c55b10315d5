"""t1jax: agentic reinforcement learning of Qwen3.5-MoE in JAX.

Importing this package imports nothing else; each part is imported by its own name.
"""

__version__ = "0.1.0"
