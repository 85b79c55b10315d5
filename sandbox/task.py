"""Tasks in Harbor's format, read strictly: a directory becomes a `Task` or an error that explains.

Owns task.toml, instruction.md and where a task keeps its files. Knows nothing of sandboxes. What is
malformed raises `TaskError` (file and field named); what is well-formed but cannot be run here
raises `UnsupportedTask` ("needs …, not supported"). Fields that the format does not have are kept
and warned of once a file.
"""

import dataclasses
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from pydantic import ValidationError

from sandbox.task_config import ArtifactConfig, TaskConfig, unknown_fields
from t1jax.errors import UserError

COMPOSE_NAMES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
DEFAULT_WORKDIR = "/app"
TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class TaskError(UserError):
    """A task directory that is malformed."""


class UnsupportedTask(TaskError):  # noqa: N818 - nothing is wrong with the task
    """A task that is well-formed and needs something that t1jax does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One task: its settings, its instruction, and where its files are."""

    root: Path
    config: TaskConfig
    instruction: str

    @property
    def name(self) -> str:
        """`org/name` where task.toml says so, else the directory's name."""
        return self.root.name if self.config.task is None else self.config.task.name

    @property
    def tests(self) -> Path:
        return self.root / "tests"

    @property
    def solution(self) -> Path:
        return self.root / "solution"

    @property
    def environment(self) -> Path:
        return self.root / "environment"

    @property
    def workdir(self) -> str:
        """Where commands start: task.toml, else the Dockerfile's last WORKDIR, else /app."""
        if self.config.environment.workdir:
            return self.config.environment.workdir
        return dockerfile_workdir(self.environment / "Dockerfile") or DEFAULT_WORKDIR

    @property
    def knows_workdir(self) -> bool:
        """False where only the image knows where commands start."""
        named = self.config.environment.workdir or self.config.environment.local is not None
        return bool(named or dockerfile_workdir(self.environment / "Dockerfile"))

    @property
    def artifacts(self) -> tuple[ArtifactConfig, ...]:
        return self.config.artifacts

    @property
    def fresh(self) -> bool:
        """True where the task asks for a verifier apart from the agent's sandbox."""
        return self.config.verifier.environment_mode == "separate"


def load(root: str | Path) -> Task:
    """Reads one task directory.

    Raises:
      TaskError: something is missing or of the wrong type; the message names file and field.
      UnsupportedTask: it needs what cannot be run here.
    """
    root = Path(root)
    if not root.is_dir():
        raise TaskError(f"{root} is no directory; expected a task (task.toml, instruction.md, …)")
    config = _read_config(root / "task.toml")
    _refuse_unsupported(root, config)
    for path in (root / "instruction.md", root / "tests" / "test.sh"):
        if not path.is_file():
            raise TaskError(f"{path} is missing; every task needs it")
    _check_local(root, config)
    instruction = _read_text(root / "instruction.md").strip()
    if not instruction:
        raise TaskError(f"{root / 'instruction.md'} is empty; expected what the agent is to do")
    return Task(root=root, config=config, instruction=instruction)


def find(root: str | Path) -> Iterator[Path]:
    """Directories of tasks: the root itself, or every directory below it that has a task.toml."""
    root = Path(root)
    if not root.exists():
        raise TaskError(f"{root} does not exist; expected a task, or a folder of tasks")
    if (root / "task.toml").is_file():
        yield root
        return
    found = False
    for path in sorted(root.rglob("task.toml")):
        found = True
        yield path.parent
    if not found:
        raise TaskError(f"no task.toml in or below {root}; expected a task, or a folder of tasks")


def expand(env: Mapping[str, str], host: Mapping[str, str], where: str) -> dict[str, str]:
    """Fills `${NAME}` and `${NAME:-default}` in a task's env from the host's variables."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in host:
            return host[name]
        if default is None:
            raise TaskError(f"{where} uses ${{{name}}}, which is not set here; set {name}")
        return default

    return {key: TEMPLATE.sub(value, text) for key, text in env.items()}


def dockerfile_workdir(dockerfile: Path) -> str | None:
    """The last absolute WORKDIR of a Dockerfile; None where there is none."""
    if not dockerfile.is_file():
        return None
    found = re.findall(r"(?im)^\s*WORKDIR\s+\"?(/[^\s\"]*)", _read_text(dockerfile))
    return found[-1] if found else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"{path} is not UTF-8 text (byte {error.start})"
        raise TaskError(f"{where}; save it as UTF-8") from None


def _read_config(path: Path) -> TaskConfig:
    if not path.is_file():
        raise TaskError(f"{path} is missing; every task needs it")
    try:
        fields = tomllib.loads(_read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path} is no TOML: {error}") from None
    try:
        config = TaskConfig.model_validate(fields)
    except ValidationError as error:
        raise TaskError(f"{path}: {_explained(error)}") from None
    unknown = unknown_fields(config)
    if unknown:
        warnings.warn(f"{path}: ignored unknown fields {', '.join(unknown)}", stacklevel=3)
    return config


def _explained(error: ValidationError) -> str:
    """Each wrong field by its path, with the value it had and what was expected."""
    parts = []
    for detail in error.errors(include_url=False):
        field = ".".join(str(part) for part in detail["loc"]) or "task.toml"
        message = detail["msg"].removeprefix("Value error, ")
        shown = "" if detail["type"] in ("missing", "value_error") else f" = {detail['input']!r}"
        parts.append(f"{field}{shown}: {message}")
    return "; ".join(parts)


def _check_local(root: Path, config: TaskConfig) -> None:
    """What the local back end copies is there, below environment/; no link in it leads out."""
    local, environment = config.environment.local, root.resolve() / "environment"
    if local is None:
        return
    for field, given in (("files", local.files), ("setup", local.setup)):
        path = environment / given
        for inside in (path, *(sorted(path.rglob("*")) if field == "files" else ())):
            if not _stays(inside, environment):
                raise TaskError(
                    f"{root}/task.toml: environment.local.{field} = {given!r}: {inside} leads out "
                    f"of {environment}; expected files below it, and links that stay there"
                )
    for field, given, exists, kind in (
        ("files", local.files, Path.is_dir, "folder"),
        ("setup", local.setup, Path.is_file, "file"),
    ):
        if given and not exists(environment / given):
            raise TaskError(
                f"{root}/task.toml: environment.local.{field} = {given!r}: no such {kind} below "
                f"{environment}"
            )


def _stays(path: Path, folder: Path) -> bool:
    """False where a path or what it links to, also to nothing, lies elsewhere."""
    if path.is_symlink() and path.readlink().is_absolute():
        return False
    try:
        return path.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):  # a link to itself
        return False


def _refuse_unsupported(root: Path, config: TaskConfig) -> None:
    environment, verifier = config.environment, config.verifier
    needs = [
        (bool(config.steps), f"{len(config.steps)} steps ([[steps]])"),
        (environment.os != "linux", f"{environment.os} (environment.os)"),
        (environment.gpus > 0, f"{environment.gpus} GPUs (environment.gpus)"),
        (environment.tpu is not None, "a TPU (environment.tpu)"),
        (environment.network_mode == "allowlist", "a network allowlist (environment.network_mode)"),
        (bool(environment.mcp_servers), "MCP servers (environment.mcp_servers)"),
        (verifier.environment is not None, "a verifier's own image ([verifier.environment])"),
        (any(item.service != "main" for item in verifier.collect), "collecting from a service"),
        (any(item.service != "main" for item in config.artifacts), "artifacts of a service"),
    ]
    reasons = [what for needed, what in needs if needed] + _compose_needs(root / "environment")
    if reasons:
        raise UnsupportedTask(f"{root}: needs {', '.join(reasons)}, not supported")


def _compose_needs(environment: Path) -> list[str]:
    """Why a compose file cannot be run; one service with a plain build is only a Dockerfile."""
    for name in COMPOSE_NAMES:
        path = environment / name
        if not path.is_file():
            continue
        try:
            fields = yaml.safe_load(_read_text(path))
        except yaml.YAMLError as error:
            raise TaskError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
        services = fields.get("services") if isinstance(fields, dict) else None
        if not isinstance(services, dict) or not services:
            raise TaskError(f"{path}: services: expected a table of at least one service")
        if len(services) > 1:
            return [f"several services ({name}: {', '.join(map(str, services))})"]
        settings = next(iter(services.values()))
        extra = sorted(set(settings or ()) - {"build"})
        if extra:
            return [f"compose settings ({name}: {', '.join(extra)})"]
    return []
