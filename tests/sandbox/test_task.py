"""Harbor's task format: what loads, what is refused, and what the messages say."""

import os
import warnings

import pytest

from sandbox import task as tasks
from sandbox.task import TaskError, UnsupportedTask
from sandbox.task_config import size_mb

# The form of every file of Terminal-Bench 2.1.
TB21 = """\
schema_version = "1.1"
artifacts = []

[task]
name = "terminal-bench/mend-repository"
description = "Find a lost commit."
keywords = ["coding", "version-control"]
[[task.authors]]
name = "A. Author"
email = "author@example.org"

[metadata]
author_name = "A. Author"
author_email = "author@example.org"
difficulty = "easy"
category = "software-engineering"
tags = ["coding"]
expert_time_estimate_min = 5.0
junior_time_estimate_min = 20.0
canary = "of another version"

[verifier]
timeout_sec = 900.0

[agent]
timeout_sec = 900.0

[environment]
build_timeout_sec = 600.0
docker_image = "author/mend-repository:20260403"
cpus = 1
memory_mb = 2048
storage_mb = 10240
gpus = 0
allow_internet = true
mcp_servers = []

[verifier.env]

[environment.env]

[solution.env]
"""

TB20 = """\
version = "1.0"
[metadata]
difficulty = "hard"
[verifier]
timeout_sec = 600
[agent]
timeout_sec = 600
[environment]
docker_image = "author/other:1"
cpus = 2
memory = "2G"
storage = "10G"
"""


def write(root, toml, **files):
    """A task directory; `files` are further files, `__` standing for a slash, `_` for a dot."""
    given = {"instruction.md": "Do it.\n", "tests/test.sh": "true\n", "task.toml": toml}
    for name, text in files.items():
        given[name.replace("__", "/").replace("_", ".")] = text
    for name, text in given.items():
        if text is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root


def test_terminal_bench_2_1_loads_unchanged_and_without_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = tasks.load(write(tmp_path, TB21))
    assert task.name == "terminal-bench/mend-repository"
    assert task.config.schema_version == "1.1"
    environment = task.config.environment
    assert (environment.docker_image, environment.cpus) == ("author/mend-repository:20260403", 1)
    assert (environment.memory_mb, environment.storage_mb) == (2048, 10240)
    assert environment.network_mode == "public"
    assert (task.config.verifier.timeout_sec, task.config.agent.timeout_sec) == (900, 900)
    assert task.config.metadata["canary"] == "of another version"
    assert (task.instruction, task.workdir, task.fresh) == ("Do it.", "/app", False)


def test_the_older_form_becomes_the_newer_one(tmp_path):
    task = tasks.load(write(tmp_path / "mend", TB20))
    assert task.name == "mend"
    assert task.config.schema_version == "1.0"
    assert (task.config.environment.memory_mb, task.config.environment.storage_mb) == (2048, 10240)


def test_defaults_are_harbors(tmp_path):
    config = tasks.load(write(tmp_path, "")).config
    assert (config.schema_version, config.agent.timeout_sec) == ("1.4", None)
    assert (config.verifier.timeout_sec, config.environment.build_timeout_sec) == (600, 600)
    assert config.environment.network_mode == "public"


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [("2G", 2048), ("2GB", 2048), ("1.5g", 1536), ("512M", 512), ("4096K", 4), ("1048576", 1)],
)
def test_sizes(text, megabytes):
    assert size_mb(text) == megabytes


def test_no_internet_is_no_network(tmp_path):
    toml = "[environment]\nallow_internet = false"
    assert tasks.load(write(tmp_path, toml)).config.environment.network_mode == "no-network"


def test_unknown_fields_are_kept_and_warned_of_once_a_file(tmp_path):
    toml = (
        'colour = 1\n[agent]\ncontinue_until_timeout = true\n[[verifier.collect]]\ncommand="a"\nx=1'
    )
    with pytest.warns(UserWarning) as caught:
        task = tasks.load(write(tmp_path, toml))
    assert [str(warning.message) for warning in caught] == [
        f"{tmp_path}/task.toml: ignored unknown fields colour, agent.continue_until_timeout, "
        "verifier.collect.0.x"
    ]
    assert task.config.agent.model_extra == {"continue_until_timeout": True}


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[verifier]\ntimeout_sec = "900"', "verifier.timeout_sec = '900': "),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec = 0: "),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec = nan: "),
        ("[environment]\ncpus = true", "environment.cpus = True: "),
        ("[environment]\nmemory_mb = 2.5", "environment.memory_mb = 2.5: "),
        ('[environment]\nmemory = "2 gallons"', "environment: '2 gallons' is no size"),
        ("[environment]\nmemory = 2", "environment: memory = 2: expected text such as '2G'"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 4', "memory = '2G' and memory_mb = 4 disagree"),
        ("[environment]\nallow_internet = 1", "environment: allow_internet = 1: expected true or"),
        ('[environment]\nnetwork_mode = "open"', "environment.network_mode = 'open': "),
        ('[environment]\nworkdir = "app"', "environment.workdir: 'app' is no absolute path"),
        ("[environment.env]\nA = 1", "environment.env.A = 1: "),
        ("[task]\nversion = '1'", "task.name: "),
        ("[task]\nname = 'no-org'", "task.name: 'no-org' is no 'org/name'"),
        ('artifacts = ["../x"]', "artifacts.0.source: '../x' is no absolute path"),
        ("agent = 3", "agent = 3: "),
        ("[agent", "task.toml is no TOML: "),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, toml, message):
    with pytest.raises(TaskError) as caught:
        tasks.load(write(tmp_path, toml))
    assert str(caught.value).startswith(f"{tmp_path}/task.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", ["task_toml", "instruction_md", "tests__test_sh"])
def test_a_missing_file_is_named(tmp_path, missing):
    with pytest.raises(TaskError, match=r"is missing; every task needs it") as caught:
        tasks.load(write(tmp_path, **({"toml": ""} | {missing: None})))
    assert missing.replace("__", "/").replace("_", ".") in str(caught.value)


TWO_SERVICES = "services: {main: {build: .}, database: {image: postgres}}"


@pytest.mark.parametrize(
    ("toml", "files", "needs"),
    [
        ('[[steps]]\nname = "one"\n[[steps]]\nname = "two"', {}, "2 steps ([[steps]])"),
        ('[environment]\nos = "windows"', {}, "windows (environment.os)"),
        ("[environment]\ngpus = 2", {}, "2 GPUs (environment.gpus)"),
        ('[environment.tpu]\ntype = "v5e"', {}, "a TPU (environment.tpu)"),
        ("", {"environment__docker-compose_yaml": TWO_SERVICES}, "main, database)"),
        ("", {"environment__compose_yml": "services: {a: {privileged: true}}"}, "privileged)"),
        ('[environment]\nnetwork_mode = "allowlist"', {}, "a network allowlist"),
        ("[verifier.environment]\ncpus = 1", {}, "a verifier's own image"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path, toml, files, needs):
    with pytest.raises(UnsupportedTask) as caught:
        tasks.load(write(tmp_path, toml, **files))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: needs ")
    assert message.endswith(", not supported")
    assert needs in message


def test_a_compose_file_of_one_built_service_is_no_obstacle(tmp_path):
    tasks.load(
        write(tmp_path, "", **{"environment__docker-compose_yaml": "services: {a: {build: .}}"})
    )


def test_the_workdir_is_the_files_then_the_images_then_app(tmp_path):
    dockerfile = "FROM a\nWORKDIR /first\nRUN true\nworkdir /second\n"
    plain = write(tmp_path / "a", "", environment__Dockerfile=dockerfile)
    given = write(
        tmp_path / "b", '[environment]\nworkdir = "/w"', environment__Dockerfile=dockerfile
    )
    assert tasks.load(plain).workdir == "/second"
    assert tasks.load(given).workdir == "/w"


def test_artifacts_are_the_state_that_a_fresh_verifier_sees(tmp_path):
    toml = 'artifacts = ["/out", {source = "/etc/motd", exclude = ["x"]}]\n'
    toml += '[verifier]\nenvironment_mode = "separate"'
    task = tasks.load(write(tmp_path, toml))
    assert ([item.source for item in task.artifacts], task.fresh) == (["/out", "/etc/motd"], True)


def test_variables_of_the_host_are_filled_in_by_name():
    env = {"A": "x${HOME}y", "B": "${NONE:-d}", "C": "${EMPTY:-}", "D": "$HOME"}
    assert tasks.expand(env, {"HOME": "/h"}, "t") == {"A": "x/hy", "B": "d", "C": "", "D": "$HOME"}
    with pytest.raises(TaskError, match=r"t uses \$\{NONE\}, which is not set here; set NONE"):
        tasks.expand({"A": "${NONE}"}, {}, "t")


def test_tasks_are_found_below_a_folder(tmp_path):
    for name in ("b/two", "one"):
        write(tmp_path / name, "")
    assert list(tasks.find(tmp_path)) == [tmp_path / "b/two", tmp_path / "one"]
    assert list(tasks.find(tmp_path / "one")) == [tmp_path / "one"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"no task.toml in or below .*/empty"):
        list(tasks.find(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("local", "link", "field"),
    [
        ("files = '../../secret'", "", "files = '../../secret'"),
        ("files = '/etc'", "", "files = '/etc'"),
        ("setup = '../../secret/s.sh'", "", "setup = '../../secret/s.sh'"),
        ("files = 'files'", "files", "files = 'files'"),
        ("files = 'files'", "files/deep/key", "files = 'files'"),
        ("setup = 's.sh'", "s.sh", "setup = 's.sh'"),
    ],
)
@pytest.mark.parametrize("absolute", [True, False])
def test_what_local_copies_never_leads_out_of_the_task(tmp_path, local, link, field, absolute):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/s.sh").write_text("true\n")
    root = write(tmp_path / "task", f"[environment.local]\n{local}\n")
    if link:
        path = root / "environment" / link
        path.parent.mkdir(parents=True, exist_ok=True)
        target = tmp_path / "secret/s.sh"
        path.symlink_to(target if absolute else os.path.relpath(target, path.parent))
    with pytest.raises(TaskError) as caught:
        tasks.load(root)
    assert f"{root}/task.toml: environment.local.{field}: " in str(caught.value)


def test_links_that_stay_among_the_files_are_no_obstacle(tmp_path):
    root = write(tmp_path, "[environment.local]\n", environment__files__a="x")
    (root / "environment/files/b").symlink_to("a")
    (root / "environment/files/gone").symlink_to("nothing")
    tasks.load(root)


@pytest.mark.parametrize("field", ["files", "setup"])
def test_what_local_copies_is_there_when_the_task_is_read(tmp_path, field):
    local = f'[environment.local]\n{field} = "gone"\n'
    with pytest.raises(TaskError) as caught:
        tasks.load(write(tmp_path, local, environment__files__a="x"))
    assert f"environment.local.{field} = 'gone': no such f" in str(caught.value)
