"""What a task's sandbox is made from, in the terms of base.py."""

import os

from sandbox.base import Environment, Limits, Network
from sandbox.task import Task, expand
from sandbox.task_config import LocalConfig


def environment_of(task: Task, backend: str) -> Environment:
    """The sandbox that a task describes; back ends say themselves what they cannot run.

    What stands in for an image is only for the local back end: an image has it already.
    """
    config = task.config.environment
    local = config.local if backend == "local" else None
    dockerfile = (task.environment / "Dockerfile").is_file()
    return Environment(
        name=task.name,
        image=config.docker_image or "",
        context=task.environment if dockerfile else None,
        local=local is not None,
        files=None if local is None else task.environment / local.files,
        setup="" if local is None else _setup(task, local),
        workdir=config.workdir or "",
        env=expand(config.env, os.environ, f"{task.root}/task.toml: environment.env"),
        user=_user(task.config.agent.user),
        network=Network(config.network_mode),
        limits=limits_of(task),
        build_timeout_s=config.build_timeout_sec,
    )


def _setup(task: Task, local: LocalConfig) -> str:
    if not local.setup:
        return ""
    return (task.environment / local.setup).read_text(encoding="utf-8")


def limits_of(task: Task) -> Limits:
    """What task.toml allows, and our defaults for what it does not say."""
    config, usual = task.config.environment, Limits()
    return Limits(
        memory_mb=usual.memory_mb if config.memory_mb is None else config.memory_mb,
        cpus=usual.cpus if config.cpus is None else config.cpus,
        storage_mb=usual.storage_mb if config.storage_mb is None else config.storage_mb,
    )


def _user(user: str | int | None) -> str:
    return "" if user is None else str(user)
