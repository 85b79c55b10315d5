"""What an episode leaves behind, as plain numpy records. Never imports jax."""
