"""`t1jax run`: order, skipping, refusals before work, a kill in the middle, and no network."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from t1jax.config import load_config
from t1jax.errors import UserError
from t1jax.evaluation import run_folder
from t1jax.pipeline.run_checks import check, check_disk
from t1jax.pipeline.run_plan import plan_of
from t1jax.pipeline.run_records import Records, Stage, alone_in
from t1jax.pipeline.run_stages import stages_of

RATE = {"learning_rate": 1e-3}
BATCH = {"tokens": 512, "rows": 1}
SMALL = {
    "run": "{where}",
    "init": {"size": "demo"},
    "model": {"checkpoint": "{run}/base", "dtype": "float32"},
    "tasks": {"folder": "{run}/tasks", "make": {"count": 40, "levels": [1]}},
    "sandbox": {"jobs": 4},
    "agent": {"turns": 2, "context_tokens": 256, "turn_tokens": 80, "thinking": False,
              "list_tools": False},
    "sampler": {"slots": 4, "context": 256, "prefill_chunk": 64, "cache_mb": 16},
    "rollout": {"name": "solutions", "policy": "solution", "limit": 8},
    "sft": {"epochs": 3, "batch_trajectories": 4, "optimizer": RATE, "batch": BATCH},
    "rejection": {"limit": 2, "attempts": 1, "optimizer": RATE},
    "critic": {"rollouts": 1, "batch_trajectories": 4, "optimizer": RATE, "batch": BATCH},
    "ppo": {"steps": 2, "launch": 4, "batch_trajectories": 4, "staleness": 0, "actor": RATE,
            "critic": RATE, "batch": BATCH},
    "selection": {"candidates": 1, "limit": 2},
    "test": {"attempts": 1, "limit": 2},
    "mismatch": {"limit": 4, "batch_tokens": 512},
    "checkpoints": {"every_steps": 2, "min_free_mb": 1},
}  # fmt: skip
ORDER = [
    *("tasks", "init", "convert", "demonstrations", "sft", "rejection-1", "sft-1", "critic", "ppo"),
    *("selection", "eval base", "eval sft", "eval ppo", "mismatch", "report"),
]


def written(folder: Path, *changes: dict) -> Path:
    """The small config with changes to its sections; None takes a section away."""
    tree = json.loads(json.dumps(SMALL)) | {"run": str(folder / "run")}
    for change in changes:
        for name, value in change.items():
            both = isinstance(value, dict) and isinstance(tree.get(name), dict)
            tree[name] = tree[name] | value if both else value
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


# ---- which stages, in which order ----------------------------------------------------------------


def test_a_whole_run_has_every_stage_in_order(tmp_path):
    stages = stages_of(load_config(written(tmp_path)))
    assert [stage.name for stage in stages] == ORDER
    for stage in stages:
        assert set(stage.after) <= set(ORDER[: ORDER.index(stage.name)])


@pytest.mark.parametrize(
    ("section", "gone"),
    [
        ("rejection", {"rejection-1", "sft-1"}),
        ("critic", {"critic"}),
        ("ppo", {"ppo", "selection", "eval ppo", "mismatch"}),
        ("init", {"init", "convert"}),
    ],
)
def test_a_section_that_is_left_out_takes_its_stages_away(tmp_path, section, gone):
    stages = stages_of(load_config(written(tmp_path, {section: None})))
    assert [stage.name for stage in stages] == [name for name in ORDER if name not in gone]


# ---- records -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Made:
    """Three stages that write a file each, and what they were asked to do."""

    folder: Path
    worked: list[str] = dataclasses.field(default_factory=list)
    fails: str = ""

    def stages(self) -> list[Stage]:
        names, keys = ("one", "two", "three"), ("sft.epochs", "ppo.clip", "ppo.steps")
        return [
            Stage(
                name=name, command="", after=names[:i], reads=(keys[i],),
                writes=(self.folder / name,), work=lambda name=name: self.work(name),
            )
            for i, name in enumerate(names)
        ]  # fmt: skip

    def work(self, name: str) -> None:
        self.worked.append(name)
        if name == self.fails:
            raise RuntimeError("broke")
        (self.folder / name).write_text("")

    def run(self, config) -> Records:
        records = Records(config, self.stages())
        records.check()
        for stage in self.stages():
            if not records.finished(stage):
                with records.doing(stage):
                    stage.work()
        return records


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return Made(folder)


def test_finished_stages_are_skipped_and_a_failed_one_is_done_again(made, tmp_path):
    config = load_config(written(tmp_path))
    made.fails = "two"
    with pytest.raises(RuntimeError):
        made.run(config)
    made.fails = ""
    made.run(config)
    made.run(config)
    assert made.worked == ["one", "two", "two", "three"]
    lines = (made.folder / "stages.jsonl").read_text().splitlines()
    times = [json.loads(line) for line in lines]
    assert [each["stage"] for each in times] == made.worked
    assert all(each["seconds"] >= 0 for each in times)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("sft.epochs=4", r"stage one .* sft\.epochs=3, and now it is 4.*--redo one"),
        ("ppo.clip=0.1", r"stage two .* ppo\.clip=0\.2, and now it is 0\.1.*--redo two"),
    ],
)
def test_a_changed_config_is_refused_and_names_the_key(made, tmp_path, change, told):
    file = written(tmp_path)
    made.run(load_config(file))
    with pytest.raises(UserError, match=told):
        made.run(load_config(file, [change]))
    assert len(made.worked) == 3


def test_an_output_that_is_gone_is_refused(made, tmp_path):
    config = load_config(written(tmp_path))
    made.run(config)
    (made.folder / "two").unlink()
    with pytest.raises(UserError, match=r"stage two is finished and .*two is gone.*--redo two"):
        made.run(config)


def test_redo_removes_what_a_stage_and_those_after_it_made(made, tmp_path):
    config = load_config(written(tmp_path))
    assert made.run(config).forget("two") == ["two", "three"]
    assert sorted(path.name for path in made.folder.iterdir() if path.is_file()) == [
        "one", "stages.jsonl",
    ]  # fmt: skip
    made.run(load_config(tmp_path / "config.yaml", ["ppo.clip=0.1"]))
    assert made.worked == ["one", "two", "three", "two", "three"]
    with pytest.raises(UserError, match="--redo 'four': this run's stages are one, two, three"):
        made.run(load_config(tmp_path / "config.yaml", ["ppo.clip=0.1"])).forget("four")


def test_two_processes_do_not_work_in_one_run(tmp_path):
    refused = pytest.raises(UserError, match="another `t1jax run` works")
    with alone_in(tmp_path / "run"), refused, alone_in(tmp_path / "run"):
        pass


# ---- what is refused before any work -------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pppo": {}}, r"unknown key pppo; did you mean 'ppo'"),
        ({"ppo": {"stalness": 0}}, r"unknown key ppo\.stalness; did you mean 'staleness'"),
        ({"ppo": {"staleness": 2}}, r"ppo\.staleness=2: input should be 0 or 1"),
        ({"ppo": {"steps": "2"}}, r"ppo\.steps='2': input should be a valid integer"),
        ({"ppo": {"minibatches": 3}}, r"batch_trajectories=4 does not split .* ppo\.minibatches=3"),
        ({"ppo": {"group": 3}}, r"ppo\.launch=4 is no multiple of ppo\.group=3"),
        ({"sampler": {"capture_routes": False}}, r"ppo\.replay=True needs the routes"),
        ({"agent": {"context_tokens": 512}}, r"agent\.context_tokens=512 is above sampler\.cont"),
        ({"sft": None}, r"rejection samples from the policy that `sft` fine-tuned"),
        ({"tasks": None}, r"no `tasks:` section"),
        ({"tasks": {"make": None}}, r"neither .*tasks/train nor train exists"),
        ({"tasks": {"make": {"families": ["csw"]}}}, r"tasks\.make\.families holds 'csw'"),
        ({"tasks": {"make": {"levels": [6]}}}, r"tasks\.make\.levels\.0=6: input should be less"),
        ({"init": None}, r"model\.checkpoint='.*/run/base' holds no config\.json.*`init:`"),
        ({"sft": {"trajectories": "/nowhere"}}, r"sft\.trajectories='/nowhere' is no directory"),
        ({"evaluation": {"endpoint": "http://x"}}, r"evaluation\.endpoint='http://x': a whole run"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(tmp_path, change, told):
    file = written(tmp_path, change)
    with pytest.raises(UserError, match=told):
        check(load_config(file))
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_too_small_is_refused(tmp_path):
    free_mb = int(shutil.disk_usage(tmp_path).free / 1e6)
    config = load_config(written(tmp_path, {"checkpoints": {"min_free_mb": free_mb + 1000}}))
    with pytest.raises(UserError, match=r"MB free; the run may need \d+ MB"):
        check_disk(config, plan_of(config))


def test_the_plan_counts_every_trial(tmp_path):
    plan = plan_of(load_config(written(tmp_path)))
    assert plan.trials == {
        "demonstrations": 8, "rejection-1": 2, "critic": 4, "ppo": 8, "selection": 2,
        "eval base": 2, "eval sft": 2, "eval ppo": 2,
    }  # fmt: skip


# ---- the real thing ------------------------------------------------------------------------------


def command(file: Path, *more: str) -> list[str]:
    """`t1jax run`, in a namespace without any network."""
    alone = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    return [*alone, str(Path(sys.executable).with_name("t1jax")), "run", str(file), *more]


def test_a_run_without_network_that_was_killed_goes_on_to_its_report(tmp_path):
    file, run = written(tmp_path), tmp_path / "run"
    environment = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=1")}
    killed = subprocess.Popen(
        command(file), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while not (run / "stages" / "sft.begun").exists() and killed.poll() is None:
            time.sleep(0.05)
        assert killed.poll() is None, killed.communicate()[0]
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    demonstrations = (run / "stages" / "demonstrations.json").stat().st_mtime_ns
    ended = subprocess.run(command(file), env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert (run / "stages" / "demonstrations.json").stat().st_mtime_ns == demonstrations
    assert "stage demonstrations: done earlier" in ended.stderr
    for name in ("base", "SFT", "PPO"):
        assert re.search(rf"│ {name} +│ +\d+\.\d%", ended.stdout), ended.stdout
    assert (run / "report" / "index.html").is_file()
    summary = json.loads((run / "report" / "summary.json").read_text())
    assert set(summary["seconds"]) >= set(ORDER[:-1])
    found = run_folder.read_run(run)
    assert set(found.evaluations) >= {"base", "sft", "ppo"}
    gap = summary["mismatch"]["tito_replay"]["abs_diff"]
    assert gap < 1e-4, "float32, the sampled tokens and replay: only rounding is left"
