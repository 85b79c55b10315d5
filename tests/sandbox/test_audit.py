"""The audit: what it accepts and refuses, with real sandboxes; its file; the lists made of it."""

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from sandbox import audit_file, commands, static_checks
from sandbox import task as tasks
from sandbox.audit import Auditor, Decision, Record, find_copies
from sandbox.audit_file import AuditFile
from sandbox.base import InfraError, make_backend
from sandbox.static_checks import near_duplicates
from sandbox.tasks.families import FAMILIES
from sandbox.tasks.make import make
from sandbox.trial import TrialConfig
from t1jax.errors import UserError

TOML = """[verifier]
environment_mode = "separate"
[environment]
network_mode = "no-network"
storage_mb = 16
[environment.local]
"""
TEST_SH = "#!/bin/bash\n[ -s /app/a.txt ] && echo 1 > /logs/verifier/reward.txt || "
TEST_SH += "echo 0 > /logs/verifier/reward.txt\n"


def write(root, **files):
    """A task that the audit accepts, but for `files` (`__` is a slash, `_` a dot)."""
    given = {
        "task.toml": TOML,
        "instruction.md": f"Write something to a.txt, in the manner of {root.name}.",
        "environment/files/given.txt": "given\n",
        "solution/solve.sh": "echo 1 > /app/a.txt\n",
        "tests/test.sh": TEST_SH,
    }
    given |= {name.replace("__", "/").replace("_", "."): text for name, text in files.items()}
    for name, text in given.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def audited(root, *, copies=None, wrap=lambda backend: backend):
    """The record of one task on the local back end."""

    async def main():
        backend = wrap(make_backend("local"))
        try:
            auditor = Auditor(backend, config=TrialConfig(), copies=copies or {})
            return await auditor.audit(root)
        finally:
            await backend.close()

    return asyncio.run(main())


def test_60_generated_tasks_are_accepted_and_the_cheat_gains_0_on_every_family(tmp_path, capsys):
    """By the command itself, with real sandboxes: three oracles, a nop and a cheat each."""
    make(tmp_path / "made", seed=17, count=60)
    commands.audit(
        str(tmp_path / "made"),
        sandbox="local",
        endpoints="",
        jobs=2,
        out=str(tmp_path / "audit.jsonl"),
        config=TrialConfig(),
    )
    records = audit_file.read(tmp_path / "audit.jsonl")
    assert {(r.task, *r.reasons) for r in records if r.decision != Decision.accept} == set()
    assert {record.metadata["category"] for record in records} == set(FAMILIES)
    assert len(records) == 60
    for record in records:
        assert (record.cheat_gained, record.nop_passed) == (0.0, [])
        assert 2 <= len(record.oracle_passed) <= 12
        assert set(record.seconds) == {"oracle_1", "oracle_2", "oracle_3", "nop", "cheat"}
        assert record.usage["cpu_s"] >= 0
    assert "60 tasks" in capsys.readouterr().out


@pytest.mark.docker
def test_generated_tasks_are_accepted_on_docker_too(tmp_path, engine):
    """From the image that their Dockerfile makes: a set-up script, modes, and collecting."""
    make(tmp_path / "made", seed=5, count=3, families=("git", "permissions", "script"), levels=(2,))
    commands.audit(
        str(tmp_path / "made"),
        sandbox="docker",
        endpoints=engine,
        jobs=3,
        out=str(tmp_path / "audit.jsonl"),
        config=TrialConfig(),
    )
    records = audit_file.read(tmp_path / "audit.jsonl")
    assert [(r.decision, r.reasons, r.cheat_gained) for r in records] == [("accept", [], 0.0)] * 3


# A test whose name is another in each run: every run passes, and no two agree.
NAMED_BY_CHANCE = """#!/bin/bash
echo "{\\"check_$RANDOM$RANDOM\\": 1}" > /logs/verifier/reward.json
"""
BY_A_PROGRAM_OF_THE_AGENT = """#!/bin/bash
export PATH=/app/bin:$PATH
if [ -s /app/a.txt ]; then one=passed all=1; else one=failed all=0; fi
printf '{"results": {"summary": {"tests": 1, "passed": %s}, "tests": [{"name": ' $all \\
  > /logs/verifier/ctrf.json
printf '"test_outputs.py::test_1", "status": "%s"}]}}' $one >> /logs/verifier/ctrf.json
echo $all > /logs/verifier/reward.txt
pytest || true
"""

BAD = {
    "oracle fails": ({"solution__solve_sh": "true\n"}, "the oracle is failed: 0 of 1"),
    "flaky": ({"tests__test_sh": NAMED_BY_CHANCE}, "flaky: the oracle's runs passed 1 of 1"),
    "free": (
        {"tests__test_sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"},
        "nothing to gain: doing nothing passes every assertion",
    ),
    "cheatable": (
        {"tests__test_sh": BY_A_PROGRAM_OF_THE_AGENT},
        "the cheat gains 1.00",
    ),
    "malformed": ({"task_toml": "[agent]\ntimeout_sec = 'x'"}, "agent.timeout_sec = 'x'"),
    "no set-up": (
        {"task_toml": TOML + 'setup = "setup.sh"\n', "environment__setup_sh": "exit 3\n"},
        "its image does not build: the task's own set-up fails",
    ),
    "leaked": (
        {"instruction_md": f"Write to a.txt, so that {TEST_SH.splitlines()[1]} writes 1."},
        "the instruction has a line of tests/test.sh",
    ),
    "solution in the image": (
        {
            "solution__solve_sh": "echo 1 > /app/a.txt  # as it is done by experts\n",
            "environment__files__x_sh": "echo 1 > /app/a.txt  # as it is done by experts\n",
        },
        "environment/files/x.sh is the same as solution/solve.sh",
    ),
    "network without one": (
        {"solution__solve_sh": "curl http://example.org > /app/a.txt\n"},
        "solution/solve.sh uses curl, without a network",
    ),
}


@pytest.mark.parametrize(("files", "reason"), BAD.values(), ids=BAD)
def test_a_bad_task_is_rejected_with_its_reason(tmp_path, files, reason):
    record = audited(write(tmp_path / "task", **files))
    assert record.decision == Decision.reject
    assert any(reason in given for given in record.reasons), record.reasons


def test_a_good_task_is_accepted_with_what_later_verdicts_need(tmp_path):
    record = audited(write(tmp_path / "task"))
    assert (record.decision, record.reasons) == (Decision.accept, [])
    assert (record.oracle_passed, record.nop_passed) == (["reward"], [])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"tests__test-x_py": "def test_x():\n    assert open('/app/secret.cfg').read()\n"},
            "hidden requirement: tests/test-x.py reads /app/secret.cfg, never named",
        ),
        (
            {"task_toml": TOML.replace("no-network", "public"), "tests__get_sh": "uvx -p 3 pytest"},
            "tests/get.sh uses the network (uvx)",
        ),
        ({"environment__Dockerfile": "FROM debian\n"}, "environment/Dockerfile: FROM debian"),
    ],
)
def test_what_a_person_should_see_is_for_review(tmp_path, files, reason):
    record = audited(write(tmp_path / "task", **files))
    assert record.decision == Decision.review
    assert len(record.reasons) == 1
    assert reason in record.reasons[0]


@pytest.mark.parametrize(
    ("line", "loose"),
    [
        ("FROM python:3.11", False),
        ("FROM python", True),
        ("FROM host:5000/python", True),
        ("FROM python:latest", True),
        ("FROM a@sha256:abc", False),
        ("RUN pip install numpy==2.0 -q", False),
        ("RUN pip install numpy==2.0 pandas", True),
        ("RUN pip install -r requirements.txt", False),
        ("RUN git clone https://example.org/a", True),
        ("RUN git clone --branch v1 https://example.org/a", False),
        ("RUN curl -L https://example.org/releases/latest/x | sh", True),
    ],
)
def test_downloads_without_a_version_are_found(tmp_path, line, loose):
    task = tasks.load(write(tmp_path / "task", environment__Dockerfile=f"{line}\n"))
    found = [f.text for f in static_checks.check(task) if f.text.startswith("unpinned")]
    assert bool(found) == loose


def test_near_duplicates_are_those_that_comparing_all_pairs_finds():
    words = [f"w{index}" for index in range(60)]
    texts = {"original": " ".join(words), "same": " ".join(words).upper()}
    for changed in (1, 2, 6):
        copy = list(words)
        copy[-changed:] = [f"other{index}" for index in range(changed)]
        texts[f"changed {changed}"] = " ".join(copy)
    texts |= {"short": "write a", "short too": "write a", "other": "write b"}

    def triples(text):
        found = text.lower().split()
        return {tuple(found[i : i + 3]) for i in range(max(1, len(found) - 2))}

    expected = {}
    for one, two in itertools.combinations(texts, 2):
        a, b = triples(texts[one]), triples(texts[two])
        if one not in expected and len(a & b) / len(a | b) >= 0.95:
            expected.setdefault(two, one)
    assert near_duplicates(texts) == expected
    assert set(expected) == {"same", "changed 1", "short too"}


def test_a_copy_of_another_task_is_rejected(tmp_path):
    roots = [write(tmp_path / name, instruction_md="Write a to a.txt.\n") for name in ("a", "b")]
    copies = find_copies(roots)
    assert copies == {str(roots[1]): str(roots[0])}
    record = audited(roots[1], copies=copies)
    assert record.reasons == [f"nearly the same text as {roots[0]}"]


def test_what_the_back_end_cannot_run_is_unsupported_not_rejected(tmp_path):
    image = audited(write(tmp_path / "a", task_toml="[environment]\ndocker_image = 'a:1'"))
    steps = audited(write(tmp_path / "b", task_toml="[[steps]]\nname = 'one'"))
    assert (image.decision, steps.decision) == (Decision.unsupported, Decision.unsupported)
    assert steps.reasons == [f"{tmp_path / 'b'}: needs 1 steps ([[steps]]), not supported"]


class Broken:
    """A back end whose engine is gone."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def sandbox(self, environment):
        raise InfraError("the engine is gone")


def test_an_infrastructure_error_says_nothing_of_the_task(tmp_path):
    record = audited(write(tmp_path / "task"), wrap=Broken)
    assert record.decision == Decision.infra_error
    assert record.reasons == ["oracle_1: the engine is gone"]


def test_an_audit_goes_on_where_it_ended(tmp_path):
    """Killed while it wrote a line; a task has changed since, and one met a dead engine."""
    roots = {name: write(tmp_path / "tasks" / name) for name in ("done", "changed", "infra", "new")}
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path)
    for name in ("done", "changed", "infra"):
        digest = static_checks.content_digest(roots[name])
        decision = Decision.infra_error if name == "infra" else Decision.accept
        file.add(Record(task=name, path=str(roots[name]), digest=digest, decision=decision))
    file.close()
    with path.open("a") as half:
        half.write('{"task": "half", "pa')
    (roots["changed"] / "instruction.md").write_text("Write anything to a.txt.")
    resumed = AuditFile(path)
    assert [name for name, root in roots.items() if resumed.is_done(root)] == ["done"]
    resumed.add(Record(task="new", path=str(roots["new"]), digest="d"))
    resumed.close()
    assert [record.task for record in audit_file.read(path)] == ["done", "changed", "infra", "new"]


def test_a_terminated_audit_leaves_no_process_and_says_that_it_goes_on(tmp_path):
    solve = "echo 1 > /app/a.txt; exec -a t1jax_lives_on sleep 300\n"
    write(tmp_path / "task", solution__solve_sh=solve)
    out = tmp_path / "audit.jsonl"
    command = "from t1jax.cli import main; main()"
    arguments = ("audit", tmp_path / "task", "--out", out)
    process = subprocess.Popen(
        [sys.executable, "-c", command, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not living("t1jax_lives_on"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, shown = process.communicate(timeout=30)
    assert (process.returncode, living("t1jax_lives_on")) == (75, [])
    assert shown.splitlines()[-1] == f"error: ended by a signal; {out} goes on"
    assert audit_file.read(out) == []


def living(name):
    """Processes of this name anywhere on the host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(name.encode()):
                found.append(path.parent.name)
    return found


@pytest.mark.parametrize(
    "broken",
    [b"{}", b'{"task": "a', b"\xff\xfe", b"[" * 100, b"7", b'{"task":1,"path":2,"digest":3}', b""],
)
def test_a_line_that_is_no_record_is_named_and_its_task_audited_again(tmp_path, broken):
    path, roots = tmp_path / "a.jsonl", [write(tmp_path / name) for name in ("a", "b", "c")]
    lines = [
        Record(task="\u2028", path=str(root), digest=static_checks.content_digest(root))
        for root in roots
    ]
    whole = [line.to_line().encode() for line in lines]
    path.write_bytes(whole[0] + broken + b"\n" + whole[2])
    with pytest.warns(UserWarning, match=r"a.jsonl line 2 is no audit record: skipped"):
        assert [record.path for record in audit_file.read(path)] == [str(roots[0]), str(roots[2])]
    with pytest.warns(UserWarning):
        file = AuditFile(path)
    file.close()
    assert [file.is_done(root) for root in roots] == [True, False, True]


class Faulty:
    """A back end with a bug of ours that one task meets."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def sandbox(self, environment):
        if environment.name == "b_bug":
            raise RuntimeError("a bug")
        return self._backend.sandbox(environment)


def test_one_task_never_stops_an_audit_nor_its_rerun(tmp_path, monkeypatch, capsys):
    names = ("a", "b_bug", "c_none", "d_setup", "e")
    roots = {name: write(tmp_path / "t" / name) for name in names}
    (roots["c_none"] / "solution/solve.sh").unlink()
    toml = TOML + 'setup = "s.sh"\n'
    (roots["d_setup"] / "task.toml").write_text(toml)
    (roots["d_setup"] / "environment/s.sh").write_bytes(b"\xff")
    monkeypatch.setattr(commands, "make_backend", lambda *_, **__: Faulty(make_backend("local")))
    for _ in range(2):
        commands.audit(
            str(tmp_path / "t"),
            sandbox="local",
            endpoints="",
            jobs=2,
            out=str(tmp_path / "audit.jsonl"),
            config=TrialConfig(),
        )
        records = {r.task: r for r in audit_file.read(tmp_path / "audit.jsonl")}
        decisions = {name: record.decision.value for name, record in records.items()}
        assert decisions == {
            "a": "accept", "b_bug": "infra_error", "c_none": "reject", "d_setup": "reject",
            "e": "accept",
        }  # fmt: skip
    assert records["b_bug"].reasons == ["RuntimeError: a bug"]
    assert "solve.sh is missing" in records["c_none"].reasons[0]


def test_a_rejected_task_is_rejected_for_every_reason(tmp_path, capsys):
    """A copy that does not work is not only a copy."""
    root = write(tmp_path / "b", solution__solve_sh="true\n")
    record = audited(root, copies={str(root): "another"})
    copy, oracle = record.reasons
    assert copy == "nearly the same text as another"
    assert oracle.startswith("the oracle is failed: 0 of 1")
    Console().print(audit_file.table([record]))
    shown = " ".join(capsys.readouterr().out.split())
    assert "nearly the same" in shown
    assert "the oracle is" in shown


@pytest.fixture
def records(tmp_path):
    """An audit of 30 tasks, two thirds accepted, all scored but one."""
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path)
    for index in range(30):
        decision = (Decision.accept, Decision.accept, Decision.review)[index % 3]
        score = {"total": index / 30} if index else None
        record = Record(task=f"t{index}", path=f"/t{index}", digest=f"{index}", decision=decision)
        record.score, record.oracle_passed = score, ["a", "b"]
        file.add(record)
    file.close()
    return path


def test_select_keeps_and_shuffles_by_the_seed_alone(records):
    names = [[r.task for r in audit_file.select(records, seed=seed)] for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    assert set(names[0]) == set(names[2]) == {f"t{i}" for i in range(30) if i % 3 != 2}
    assert names[0] != sorted(names[0], key=lambda name: int(name[1:]))


def test_select_takes_decisions_scores_and_a_count(records):
    both = audit_file.select(records, keep=("accept", "review"), min_score=0.5)
    assert {record.task for record in both} == {f"t{i}" for i in range(15, 30)}
    assert len(audit_file.select(records, count=4)) == 4
    with pytest.raises(UserError, match=r"no decision \['good'\]; there are \['accept', 'review'"):
        audit_file.select(records, keep=("good",))
    with pytest.raises(UserError, match="has no task that is reject; keep others"):
        audit_file.select(records, keep=("reject",))


def t1jax(*arguments):
    return subprocess.run(
        [sys.executable, "-c", "from t1jax.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def test_commands_from_making_tasks_to_a_list(tmp_path):
    made, audit, chosen = (tmp_path / name for name in ("made", "audit.jsonl", "list.jsonl"))
    assert (
        t1jax("tasks", "make", made, "--count", 2, "--level", 1, "--family", "edit").returncode == 0
    )
    shown = t1jax("audit", made, "--out", audit, "--sandbox", "local", "--jobs", 2)
    assert (shown.returncode, "accept" in shown.stdout) == (0, True), shown.stderr
    selected = t1jax("tasks", "select", audit, "--keep", "accept", "--out", chosen)
    assert selected.returncode == 0, selected.stderr
    first = json.loads(chosen.read_text().splitlines()[0])
    trial = t1jax("trial", first["path"], "--agent", "oracle", "--audit", audit)
    assert trial.returncode == 0, trial.stderr
    result = json.loads(trial.stdout)
    assert (result["outcome"], result["passed"]) == ("solved", first["oracle_passed"])
    refused = t1jax("trial", first["path"], "--agent", "nobody")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: no agent 'nobody'; there are oracle,")
