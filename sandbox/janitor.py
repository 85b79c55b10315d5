"""Removes what killed runs left: containers of processes that are gone, empty control groups.

Nothing of a run that still lives is touched: each container names its owner, host and process.
Local sandboxes end with their runner; only their control groups can remain.
"""

import asyncio
import dataclasses
import os
import socket
import time

from sandbox import cgroups
from sandbox.base import InfraError
from sandbox.docker import OWNER_LABEL, RUN_LABEL, process_identity, remove_container
from sandbox.engine import Engine, parse_endpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cleaned:
    """How many were removed, and how many belong to live runs or to another host."""

    containers: int
    groups: int
    kept: int
    no_engine: str = ""  # why none was looked at, where none was named and none answers


async def clean(*, endpoints: str = "", run_id: str = "", older_than_s: float = 0.0) -> Cleaned:
    """Removes leftovers on every engine; with `run_id` all of that run, whoever owns it.

    What another host made goes only once it is older than `older_than_s`, where that is not 0.
    Raises InfraError for a named engine that does not answer, when all else is done.
    """
    engines = [Engine(config) for config in parse_endpoints(endpoints)]
    try:
        counts = await asyncio.gather(
            *(_clean_engine(engine, run_id, older_than_s) for engine in engines),
            return_exceptions=True,
        )
    finally:
        for engine in engines:
            engine.close()
    groups = _clean_groups()
    problems = [count for count in counts if isinstance(count, BaseException)]
    no_engine = ""
    if problems:
        if endpoints or os.environ.get("DOCKER_HOST") or not isinstance(problems[0], InfraError):
            raise problems[0]
        no_engine = str(problems[0])
    done = [count for count in counts if not isinstance(count, BaseException)]
    return Cleaned(
        containers=sum(removed for removed, _ in done),
        kept=sum(kept for _, kept in done),
        groups=groups,
        no_engine=no_engine,
    )


async def _clean_engine(engine: Engine, run_id: str, older_than_s: float) -> tuple[int, int]:
    label = f"{RUN_LABEL}={run_id}" if run_id else RUN_LABEL
    found = await engine.call(
        "list", lambda: engine.client.api.containers(all=True, filters={"label": label})
    )
    removed = 0
    for container in found:
        age_s = time.time() - container["Created"]
        if run_id or _left_behind(container["Labels"].get(OWNER_LABEL, ""), age_s, older_than_s):
            await engine.call("remove", remove_container, engine, container["Id"])
            removed += 1
    return removed, len(found) - removed


def _left_behind(owner: str, age_s: float, older_than_s: float) -> bool:
    """True where the owner was a process of this host and is gone, or too old to be anyone's."""
    if older_than_s > 0 and age_s > older_than_s:
        return True
    host, _, rest = owner.partition("/")
    boot_pid = rest.split("/")
    if host != socket.gethostname() or len(boot_pid) != 3:
        return False
    return process_identity(int(boot_pid[1])) != owner


def _clean_groups() -> int:
    groups = cgroups.leftovers()
    for group in groups:
        group.remove()
    return len(groups)
