"""From trajectories to the arrays of a step: which ones, in what order, in which rows."""
