"""Random ragged inputs: sampled tokens with holes, and poison wherever the mask is 0."""

import numpy as np

POISON = (np.nan, -np.inf, np.inf, 1e30)


def batch(seed, rows=5, columns=23):
    """Mask, episode ids, and float64 arrays that are harmless only under the mask."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, columns)) < 0.6
    mask[1] = False  # nothing sampled
    mask[2] = np.arange(columns) == 7  # a single token
    segments = np.sort(rng.integers(0, 4, (rows, columns)), axis=1)
    old = -rng.exponential(1.5, mask.shape)
    arrays = {
        "old": old,
        "new": old + rng.normal(0, 0.3, mask.shape),
        "advantages": rng.normal(0, 1, mask.shape),
        "old_values": rng.normal(0, 0.5, mask.shape),
        "values": rng.normal(0, 0.5, mask.shape),
        "returns": rng.normal(0, 1, mask.shape),
        "rewards": rng.normal(0, 1, mask.shape),
    }
    return mask, segments, arrays


def poisoned(x, mask, seed=0):
    """A float32 copy with NaN, infinities and huge numbers off the mask."""
    poison = np.random.default_rng(seed).choice(POISON, x.shape)
    return np.where(mask, x, poison).astype(np.float32)
