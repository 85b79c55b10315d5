"""What a run's config asks for that cannot work, refused before any work.

The config itself refuses what is wrong whatever is run (t1jax/config.py); here is what depends on
the machine, on files, or on all stages being run.
"""

from collections.abc import Sequence

from t1jax.config import Config
from t1jax.pipeline.run_records import Stage


def check(config: Config, stages: Sequence[Stage]) -> None:
    """Raises UserError."""
