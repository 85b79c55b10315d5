"""Two processes of four devices train what one device does; one process takes up their state."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from t1jax.config import to_yaml
from t1jax.pipeline.learning import (
    abstract_policy,
    load_policy,
    make_optimizer,
    open_setup,
    open_states,
)
from t1jax.pipeline.metrics import read_metrics
from t1jax.pipeline.sft import sft

from . import bandit

pytestmark = pytest.mark.slow
STEPS = 2


def configured(run, source, trajectories, mesh=""):
    # A large epsilon: Adam divides a gradient that is nothing but rounding by its own size.
    section = {
        "trajectories": str(trajectories), "epochs": STEPS, "batch_trajectories": 32,
        "optimizer": {"learning_rate": 0.01, "epsilon": 1e-3}, "batch": {"tokens": 32, "rows": 8},
    }  # fmt: skip
    model = {"checkpoint": source, "mesh": mesh, "dtype": "float32"}
    return bandit.config(run, source, sft=section, model=model)


def start(port: int, process: int, config: Path) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.pipeline.hosts", str(port), str(process), str(config)],
        cwd=root, env=os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": flags},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def train_in_two_processes(config, file: Path) -> None:
    file.write_text(to_yaml(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(port, i, file) for i in range(2)]
    try:
        shown = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, shown, strict=True):
        assert process.returncode == 0, errors[-3000:]


def restored(config):
    """The last saved learner, on the config's mesh."""
    setup = open_setup(config)
    optimizer = make_optimizer(config.sft.optimizer, STEPS)
    with open_states(config, "sft") as states:
        found = states.restore({"actor": abstract_policy(setup, optimizer)})
    assert found.step == STEPS
    return found.trees["actor"]


def test_two_processes_train_what_one_does_and_one_restores_it_on_other_meshes(
    tmp_path, bandit_checkpoint, bandit_trajectories
):
    arguments = bandit_checkpoint, bandit_trajectories
    together = configured(tmp_path / "two", *arguments, mesh="data=2,expert=4")
    train_in_two_processes(together, tmp_path / "config.yaml")
    alone = configured(tmp_path / "one", *arguments)
    sft(alone)
    ours, theirs = (read_metrics(Path(config.run), "sft") for config in (together, alone))
    for name in ("loss", "gradient_norm", "update_norm", "tokens"):
        told = [[row[name] for row in rows] for rows in (ours, theirs)]
        np.testing.assert_allclose(*told, rtol=1e-5, err_msg=name)

    states = [
        restored(configured(tmp_path / "two", *arguments, mesh=mesh))
        for mesh in ("", "fsdp=4,expert=2", "data=2,expert=4")
    ]
    assert [len(state.params["embed"].devices()) for state in states] == [1, 8, 8]
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, state, states[0])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # noqa: E731
    jax.tree.map(close, states[0], restored(alone))
    # Each process wrote its own part of the state, and the weights of the end are whole.
    saved = tmp_path / "two" / "checkpoints" / "sft" / str(STEPS) / "actor"
    assert {f"ocdbt.process_{i}" for i in range(2)} <= {path.name for path in saved.iterdir()}
    weights = load_policy(open_setup(alone), str(tmp_path / "two" / "weights" / "sft"))
    jax.tree.map(np.testing.assert_array_equal, weights, states[0].params)
