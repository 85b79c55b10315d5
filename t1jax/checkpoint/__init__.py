"""Every movement of a weight tree: Hugging Face files, t1jax checkpoints, and back."""
