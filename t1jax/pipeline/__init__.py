"""The stages, each a story read top to bottom: rollout, fine-tuning, critic warm-up, PPO."""
