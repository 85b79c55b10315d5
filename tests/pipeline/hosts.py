"""A program: one of two processes that fine-tune together, four devices each.

python -m tests.pipeline.hosts PORT PROCESS CONFIG
"""

import sys

import jax

PORT, PROCESS, CONFIG = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, int(PROCESS), initialization_timeout=120)

from t1jax.config import load_config  # noqa: E402
from t1jax.pipeline.sft import sft  # noqa: E402

sft(load_config(CONFIG))
