"""Sampling: tokens with exact log-probs and the experts that every layer chose for them."""
