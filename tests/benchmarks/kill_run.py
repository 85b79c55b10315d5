"""Kills `t1jax run CONFIG` (SIGKILL) in every stage, and compares the end with a whole run's.

    JAX_COMPILATION_CACHE_DIR=DIR python tests/benchmarks/kill_run.py CONFIG [--set a.b=c]

The run is started twice: once left alone, and once killed at a random moment of each stage (drawn
over the time that the stage took in the run left alone) and started again each time. Weights, every
trial's outcome, the selection, the log-prob gap and the metrics have to be equal; only what a clock
says may differ. ppo.launch above ppo.batch_trajectories keeps the first to finish, which is the
clock's choice too: use equal numbers. The last line is one JSON document.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

TIMED = ("time", "seconds", "tokens_per_s", "rollout/seconds", "rollout/tokens_per_s")
POLL_S = 0.02


def start(config: str, changes: list[str], run: Path) -> subprocess.Popen:
    sets = [f"--set={change}" for change in (*changes, f"run={run}")]
    command = [sys.executable, "-c", "from t1jax.cli import main; main()", "run", config, *sets]
    log = run.with_suffix(".log").open("a")
    return subprocess.Popen(command, stdout=log, stderr=log)


def finish(config: str, changes: list[str], run: Path) -> None:
    if start(config, changes, run).wait():
        raise RuntimeError(run.with_suffix(".log").read_text()[-3000:])


def stage_seconds(run: Path) -> dict[str, float]:
    lines = map(json.loads, (run / "stages.jsonl").read_text().splitlines())
    return {line["stage"]: line["seconds"] for line in lines}


def kill_in(stage: str, after_s: float, process: subprocess.Popen, run: Path) -> bool:
    """Whether the process was there to be killed."""
    begun = run / "stages" / f"{stage.replace(' ', '-')}.begun"
    while not begun.exists() and process.poll() is None:
        time.sleep(POLL_S)
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


# ---- what has to be equal ------------------------------------------------------------------------


def weights(run: Path) -> dict[str, bytes]:
    found = {}
    for params in sorted((run / "weights").glob("*/params")):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            tree = checkpointer.restore(params)
        for name, leaf in _flat(tree):
            found[f"{params.parent.name}{name}"] = np.asarray(leaf).tobytes()
    return found


def _flat(tree, above=""):
    if not isinstance(tree, dict):
        return [(above, tree)]
    return [pair for name in sorted(tree) for pair in _flat(tree[name], f"{above}.{name}")]


def trials(run: Path) -> dict[str, dict]:
    """Of every evaluation."""
    return {
        f"{file.parent.name}/{number}": json.loads(line) | {"seconds": None}
        for file in sorted((run / "evaluation").glob("*/results.jsonl"))
        for number, line in enumerate(file.read_text().splitlines())
    }


def rows(run: Path) -> dict[str, dict]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        f"{row['stage']} {row['step']}": {k: v for k, v in row.items() if not k.startswith(TIMED)}
        for row in lines
    }


def gap(run: Path) -> dict[str, object]:
    told = json.loads((run / "mismatch.json").read_text())
    return {name: cell for name, cell in told.items() if name != "setting"}


def selection(run: Path) -> dict[str, object]:
    return {"steps": json.loads((run / "selection.json").read_text())["steps"]}


PARTS = {"weights": weights, "trials": trials, "metrics": rows, "gap": gap, "selection": selection}


def differences(one: Path, other: Path) -> dict[str, list[str]]:
    """Of each part, the names of what is not equal."""
    found = {}
    for name, read in PARTS.items():
        a, b = read(one), read(other)
        found[name] = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
    return found


def main(config: str, changes: list[str], seed: int) -> dict:
    draw, kills = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        finish(config, changes, whole)
        for stage, seconds in stage_seconds(whole).items():
            process = start(config, changes, broken)
            after_s = draw.uniform(0, seconds)
            if kill_in(stage, after_s, process, broken):
                kills.append({"stage": stage, "after_s": round(after_s, 2)})
                print(f"killed in stage {stage} after {after_s:.2f} s", flush=True)
        finish(config, changes, broken)
        differing = differences(whole, broken)
    return {"kills": kills, "differences": differing, "equal": not any(differing.values())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", dest="changes", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    told = main(chosen.config, chosen.changes, chosen.seed)
    print(json.dumps({"benchmark": "kill_run", **told}))
