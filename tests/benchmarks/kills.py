"""Kills a PPO process (SIGKILL) at random moments until it has finished, and compares its bits.

    JAX_COMPILATION_CACHE_DIR=DIR python tests/benchmarks/kills.py [--kills 20] [--steps 40]

The process trains on the tests' token task (tests/pipeline/bandit.py: no sandbox, outcomes fixed by
seed, step and version) with every step saved. The same command is started again after each kill.
A moment is drawn over the time that a start and a few steps take, so that kills fall into loading,
rollouts, updates and saves. At the end the parameters and every row of metrics have to equal those
of a run that nobody killed. The last line is one JSON document.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMED = ("time", "tokens_per_s", "seconds")


def train(run: str, source: str, steps: str) -> None:
    """The process that is killed."""
    import jax
    import numpy as np

    from t1jax.pipeline import ppo, update
    from t1jax.pipeline.learning import load_policy, open_setup
    from t1jax.pipeline.session import session
    from tests.pipeline import bandit

    changes = {"steps": int(steps)}
    config = bandit.config(Path(run), source, ppo=changes, checkpoints={"every_steps": 1})
    setup = open_setup(config)
    programs = update.make_programs(setup, config.ppo)
    player = bandit.Bandit(setup, bandit.make_sampler(setup))
    with session(setup, "ppo", total=config.ppo.steps, shown=("reward/mean",)) as stage:
        params = asyncio.run(
            ppo.train(
                setup, programs, stage, load_policy(setup, source), player.collect,
                player.publish, lambda step: (None,) * config.ppo.launch,
            )
        )  # fmt: skip
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    np.savez(Path(run) / "params.npz", *leaves)


def start(run: Path, source: str, steps: int) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--train", str(run), source, str(steps)]
    log = (run.parent / f"{run.name}.log").open("a")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def rows(run: Path) -> list[dict]:
    """Of the metrics, without what depends on the clock."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{n: x for n, x in row.items() if not n.startswith(TIMED)} for row in lines]


def equal(one: Path, other: Path) -> bool:
    import numpy as np

    a, b = (np.load(run / "params.npz") for run in (one, other))
    same = all(a[name].tobytes() == b[name].tobytes() for name in a.files)
    return same and rows(one) == rows(other)


def torture(kills: int, steps: int, seed: int) -> dict:
    sys.path.insert(0, str(ROOT))
    from tests.pipeline import bandit

    draw, reached = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        source = bandit.checkpoint(Path(folder) / "checkpoint")
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        if start(whole, source, steps).wait():
            raise RuntimeError((Path(folder) / "whole.log").read_text()[-3000:])
        begin = time.monotonic()
        if start(Path(folder) / "warm", source, 1).wait():  # how long a start takes
            raise RuntimeError((Path(folder) / "warm.log").read_text()[-3000:])
        start_s = time.monotonic() - begin
        for number in range(kills):
            process = start(broken, source, steps)
            try:
                process.wait(draw.uniform(0.5, 1.4) * start_s)
            except subprocess.TimeoutExpired:
                process.kill()
            status = process.wait()
            saved = broken / "checkpoints" / "ppo"
            names = [p.name for p in saved.iterdir()] if saved.is_dir() else []
            reached.append(max((int(name) for name in names if name.isdigit()), default=0))
            print(
                f"kill {number + 1}: status {status}, saved steps up to {reached[-1]}", flush=True
            )
            if status == 0:
                break
        if start(broken, source, steps).wait():
            raise RuntimeError((Path(folder) / "broken.log").read_text()[-3000:])
        return {"kills": len(reached), "reached": reached, "equal": equal(whole, broken)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        sys.path.insert(0, str(ROOT))
        train(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--kills", type=int, default=20)
        parser.add_argument("--steps", type=int, default=40)
        parser.add_argument("--seed", type=int, default=0)
        chosen = parser.parse_args()
        told = torture(chosen.kills, chosen.steps, chosen.seed)
        print(json.dumps({"benchmark": "kills", **told}))
        sys.exit(not told["equal"])
