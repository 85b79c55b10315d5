"""The families of shipped tasks: each a tuple of functions that draw one step."""

from sandbox.tasks.families import code, data, repository, system, text, tree
from sandbox.tasks.step import MakeStep

FAMILIES: dict[str, tuple[MakeStep, ...]] = {
    "files": tree.FILES,
    "links": tree.LINKS,
    "find": tree.FIND,
    "permissions": tree.PERMISSIONS,
    "archives": tree.ARCHIVES,
    "search": text.SEARCH,
    "edit": text.EDIT,
    "count": text.COUNT,
    "transform": text.TRANSFORM,
    "logs": data.LOGS,
    "csv": data.CSV,
    "json": data.JSON,
    "checksums": system.CHECKSUMS,
    "environment": system.ENVIRONMENT,
    "processes": system.PROCESSES,
    "git": repository.GIT,
    "python": code.PYTHON,
    "script": code.SCRIPT,
}
