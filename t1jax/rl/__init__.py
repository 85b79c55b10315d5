"""Learning as pure functions of arrays: losses, advantages, mismatch, and the jitted steps."""
