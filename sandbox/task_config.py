"""The fields of Harbor's task.toml, with their types and defaults, as pydantic models.

Strict: a number in quotes is no number. Older spellings (`version`, `memory = "2G"`, `storage`,
`allow_internet`) become the newer fields while reading. Unknown fields are kept (`model_extra`).
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
UNIT_MB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


def size_mb(text: str) -> int:
    """Megabytes of "512M", "2G", "2GB"; a number alone is bytes, as in Docker."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is no size; write for example '512M' or '2G'")
    unit_mb = UNIT_MB[match[2]] if match[2] else 1 / 1024**2
    return max(1, round(float(match[1]) * unit_mb))


def _rename_size(fields: dict[str, Any], older: str, newer: str) -> None:
    if older not in fields:
        return
    value = fields.pop(older)
    if not isinstance(value, str):
        raise ValueError(f"{older} = {value!r}: expected text such as '2G', or {newer} = 2048")
    megabytes = size_mb(value)
    if fields.setdefault(newer, megabytes) != megabytes:
        raise ValueError(f"{older} = {value!r} and {newer} = {fields[newer]} disagree; keep one")


def _rename_internet(fields: dict[str, Any]) -> None:
    if "allow_internet" not in fields:
        return
    allowed = fields.pop("allow_internet")
    if not isinstance(allowed, bool):
        raise ValueError(f"allow_internet = {allowed!r}: expected true or false")
    mode = "public" if allowed else "no-network"
    if fields.setdefault("network_mode", mode) != mode and not allowed:
        raise ValueError(f"allow_internet = false and network_mode = {fields['network_mode']!r}")


class Table(BaseModel):
    """A table of task.toml: strict about types, lenient about fields it does not know."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class ArtifactConfig(Table):
    """A path of the agent's sandbox that is kept, and that a separate verifier sees."""

    source: str
    destination: str = ""
    exclude: list[str] = []
    service: str = "main"

    @field_validator("source")
    @classmethod
    def _absolute(cls, source: str) -> str:
        if not source.startswith("/") or ".." in source.split("/"):
            raise ValueError(f"{source!r} is no absolute path without '..'")
        return source


class Author(Table):
    name: str
    email: str = ""


class Identity(Table):
    """`[task]`: who it is in a registry."""

    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _org_and_name(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise ValueError(f"{name!r} is no 'org/name'")
        return name


class AgentConfig(Table):
    timeout_sec: Seconds | None = None  # no limit of the task's own
    user: str | int | None = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = None


class CollectConfig(Table):
    """A command run in the agent's sandbox after the agent has ended, before its state is kept."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class VerifierConfig(Table):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[CollectConfig] = []


class HealthcheckConfig(Table):
    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: Seconds = 5.0
    retries: Annotated[int, Field(ge=1)] = 3

    @model_validator(mode="before")
    @classmethod
    def _short_names(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        short = ("interval", "timeout", "start_period", "start_interval")
        return {f"{name}_sec" if name in short else name: fields[name] for name in fields}


class LocalConfig(Table):
    """`[environment.local]`: the same environment without an image; Harbor ignores this table."""

    files: str = "files"  # directory below environment/ whose content becomes the workdir's
    setup: str = ""  # script below environment/, run once in the workdir before the agent


class EnvironmentConfig(Table):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: HealthcheckConfig | None = None
    workdir: str | None = None
    network_mode: Literal["public", "no-network", "allowlist"] = "public"
    allowed_hosts: list[str] = []
    local: LocalConfig | None = None

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, workdir: str | None) -> str | None:
        if workdir is not None and not workdir.startswith("/"):
            raise ValueError(f"{workdir!r} is no absolute path")
        return workdir

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        fields = dict(fields)
        _rename_size(fields, "memory", "memory_mb")
        _rename_size(fields, "storage", "storage_mb")
        _rename_internet(fields)
        return fields


class SolutionConfig(Table):
    env: dict[str, str] = {}


class TaskConfig(Table):
    """The whole of task.toml."""

    schema_version: str = "1.4"
    source: str | None = None
    artifacts: tuple[ArtifactConfig, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    task: Identity | None = None  # files from before the registry have none
    metadata: dict[str, Any] = {}
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    solution: SolutionConfig = SolutionConfig()
    steps: list[Any] = []

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        fields = dict(fields)
        if "version" in fields:
            fields.setdefault("schema_version", fields.pop("version"))
        return fields

    @field_validator("artifacts", mode="before")
    @classmethod
    def _plain_paths(cls, items: Any) -> Any:
        if not isinstance(items, list):
            return items
        return tuple({"source": item} if isinstance(item, str) else item for item in items)


def unknown_fields(table: BaseModel, prefix: str = "") -> list[str]:
    """Paths of the fields that the format does not have."""
    found = [f"{prefix}{name}" for name in table.model_extra or ()]
    for name in type(table).model_fields:
        for path, below in _tables(getattr(table, name), f"{prefix}{name}"):
            found += unknown_fields(below, f"{path}.")
    return found


def _tables(value: Any, path: str) -> Iterator[tuple[str, BaseModel]]:
    if isinstance(value, BaseModel):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if isinstance(item, BaseModel):
                yield f"{path}.{index}", item
