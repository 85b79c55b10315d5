"""Ablations: what an overlay may change, where runs begin, and the table over seeds."""

import json
from pathlib import Path

import pytest
import yaml

from t1jax.config import load_config
from t1jax.errors import UserError
from t1jax.evaluation.ablate import read_variants, run_of
from t1jax.evaluation.ablation_table import Trained, interval, markdown, numbers_of, tabulate
from t1jax.evaluation.results import SUMMARY
from t1jax.evaluation.run_folder import read_run
from t1jax.pipeline.metrics import Metrics

RATE = {"learning_rate": 1e-3}
TREE = {
    "run": "{where}",
    "model": {"checkpoint": "model"},
    "tasks": {"folder": "tasks", "make": {"count": 10}},
    "sft": {"optimizer": RATE},
    "critic": {"optimizer": RATE},
    "ppo": {"steps": 2, "launch": 4, "batch_trajectories": 4, "actor": RATE, "critic": RATE},
}


@pytest.fixture
def config(tmp_path):
    """A config whose run has been fine-tuned."""
    run = tmp_path / "run"
    (run / "weights" / "sft").mkdir(parents=True)
    (run / "weights" / "sft" / "manifest.json").write_text("{}")
    return written(tmp_path / "config.yaml", TREE | {"run": str(run)})


def written(file, tree):
    file.write_text(yaml.safe_dump(tree))
    return str(file)


def overlay(config, **changes):
    folder = config.rpartition("/")[0]
    return written_in(folder, "other", changes)


def written_in(folder, name, changes):
    file = f"{folder}/{name}.yaml"
    with open(file, "w") as stream:
        yaml.safe_dump({"base": "config.yaml", **changes}, stream)
    return file


def test_every_variant_begins_at_the_fine_tuned_weights_with_its_own_change(config):
    files = [
        overlay(config, ppo={"replay": False}),
        written_in(config.rpartition("/")[0], "cold", {"critic": None}),
    ]
    base, other, cold = read_variants(config, files, ["ppo.clip=0.3"])
    assert (base.name, other.name, cold.name) == ("full", "other", "cold")
    assert other.changes == {"ppo.replay": (True, False)} and base.changes == {}
    assert cold.changes == {"critic": ("warmed", None)}
    run = base.config.run
    made = run_of(base.config, other, 7)
    assert (made.run, made.seed) == (f"{run}/ablations/other/seed-7", 7)
    assert made.model.checkpoint == f"{run}/weights/sft" and made.sft is None
    assert (made.ppo.replay, made.ppo.clip, made.ppo.warm_critic) == (False, 0.3, run)
    assert run_of(base.config, base, 7).ppo.replay
    assert run_of(base.config, cold, 7).ppo.warm_critic == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"agent": {"turns": 3}}, r"agent\.turns=3, and .* has 200: an ablation shares all"),
        ({"ppo": {"clip": 0.2}}, "changes nothing of"),
        ({"ppo": {"clipp": 0.2}}, r"unknown key ppo\.clipp; did you mean 'clip'"),
    ],
)
def test_an_overlay_that_is_no_ablation_is_refused(config, changes, told):
    with pytest.raises(UserError, match=told):
        read_variants(config, [overlay(config, **changes)], [])


def test_a_run_without_fine_tuned_weights_is_refused(tmp_path):
    file = written(tmp_path / "config.yaml", TREE | {"run": str(tmp_path / "empty")})
    (base,) = read_variants(file, [], [])
    with pytest.raises(UserError, match=r"empty holds no fine-tuned weights .*empty/weights/sft"):
        run_of(base.config, base, 0)


def test_fine_tuning_that_has_not_come_to_its_last_round_is_refused(config):
    tree = yaml.safe_load(Path(config).read_text()) | {"rejection": {"optimizer": RATE}}
    (base,) = read_variants(written(Path(config), tree), [], [])
    with pytest.raises(UserError, match=r"no fine-tuned weights \(.*weights/sft-1\)"):
        run_of(base.config, base, 0)


def test_an_overlay_lies_over_its_base_and_never_over_itself(config, tmp_path):
    file = overlay(config, ppo={"replay": False})
    second = written(tmp_path / "second.yaml", {"base": "other.yaml", "ppo": {"clip": 0.1}})
    ppo = load_config(second).ppo
    assert (ppo.replay, ppo.clip, ppo.launch) == (False, 0.1, 4)
    written(tmp_path / "config.yaml", {"base": "second.yaml"})
    with pytest.raises(UserError, match="leads back to"):
        load_config(file)


def test_an_interval_over_seeds_is_student_s():
    """Three values 1, 2, 3: the mean's standard error is 1 / sqrt(3), and t is 4.303."""
    told = interval([1.0, 2.0, 3.0])
    assert told["mean"] == 2 and told["seeds"] == 3
    assert told["ci95"] == pytest.approx([2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5])
    assert interval([1.0]) == {"mean": 1.0, "ci95": None, "seeds": 1}
    assert interval([])["mean"] is None


def test_numbers_of_a_run_are_of_its_last_quarter(tmp_path):
    with Metrics(tmp_path, "ppo", start=0, steps=8, shown=()) as metrics:
        for step in range(8):
            row = {"reward/mean": step / 8, "mismatch/train_rollout_logprob_abs_diff": 2.0 * step}
            if step > 0:  # where all returns are equal there is none
                row["explained_variance"] = step / 10
            metrics.write(step, row)
    folder = tmp_path / "evaluation" / "validation"
    folder.mkdir(parents=True)
    told = {"pass_at_1": 0.5, "refused": "", "tasks": 2, "attempts": 1}
    (folder / SUMMARY).write_text(json.dumps(told))
    (folder / "results.jsonl").write_text("")
    assert numbers_of(read_run(tmp_path), "validation") == {
        "reward": 6.5 / 8, "success": 0.5, "gap": 7.0, "explained_variance": pytest.approx(0.65),
        "explained_variance_first": pytest.approx(0.15),
    }  # fmt: skip


def test_differences_are_of_the_same_seeds(tmp_path, capsys):
    def trained(name, changes, success, **explained):
        explained = {int(seed.removeprefix("seed")): value for seed, value in explained.items()}
        numbers = {
            seed: {"reward": s, "success": s, "gap": 1e-6,
                   "explained_variance": explained.get(seed), "explained_variance_first": None}
            for seed, s in enumerate(success)
        }  # fmt: skip
        return Trained(name=name, changes=changes, by_seed=numbers)

    full = trained("full", {}, [0.2, 0.5, 0.8], seed0=0.5, seed1=0.7, seed2=0.6)
    cold = trained("cold_critic", {"critic": ("warmed", None)}, [0.1, 0.4, 0.7], seed1=0.3)
    tabulate(tmp_path, [full, cold])
    rows = json.loads((tmp_path / "ablations.json").read_text())["variants"]
    less = rows[1]["less_full"]["success"]
    assert less["mean"] == pytest.approx(-0.1)
    assert less["ci95"] == pytest.approx([-0.1, -0.1]), "seeds differ much, their differences not"
    told = rows[1]["less_full"]["explained_variance"]
    assert told["mean"] == pytest.approx(-0.4), "of the one seed that both have"
    assert told["seeds"] == 1
    assert rows[0]["less_full"] == {} and rows[1]["by_seed"]["2"]["success"] == 0.7
    table = (tmp_path / "ablations.md").read_text()
    assert table == markdown(rows) and table.strip() in capsys.readouterr().out
    assert "| cold_critic | critic: none | 0.400 (" in table and "| -10.0% (-10.0% to" in table
    assert "| 0.30, 1 of 3 seeds |" in table and "3 seeds each" in table
