"""Which weights play, and that other weights in the same place are never taken for them."""

import json

import pytest

from t1jax.config import parse_config
from t1jax.errors import UserError
from t1jax.pipeline.policy import identity, player
from t1jax.pipeline.trials import keep_settings
from t1jax.pipeline.update import over_minibatches


def write_manifest(folder, **trained):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(trained))
    return str(folder)


def test_the_run_s_last_weights_play_unless_others_are_named(tmp_path):
    config = parse_config({"run": str(tmp_path), "model": {"checkpoint": "base"}}, "test")
    assert player(config, "") == "base"
    sft = write_manifest(tmp_path / "weights" / "sft")
    assert player(config, "") == sft
    ppo = write_manifest(tmp_path / "weights" / "ppo")
    assert player(config, "") == ppo
    (tmp_path / "weights" / "ppo" / "manifest.json").unlink()  # not whole: it does not count
    assert player(config, "") == sft
    assert player(config, "base") == "base"


def test_trials_of_weights_that_were_trained_on_are_refused(tmp_path):
    weights = write_manifest(tmp_path / "weights", stage="ppo", steps=3)
    keep_settings(tmp_path / "trials", identity(weights))
    keep_settings(tmp_path / "trials", identity(weights))  # the same: goes on
    write_manifest(tmp_path / "weights", stage="ppo", steps=4)
    with pytest.raises(UserError, match="holds trials with manifest_sha256"):
        keep_settings(tmp_path / "trials", identity(weights))


def test_a_directory_without_a_manifest_is_known_by_its_path(tmp_path):
    assert identity(str(tmp_path)) == {"checkpoint": str(tmp_path), "manifest_sha256": ""}


def test_one_skipped_minibatch_counts_counts_add_up_and_the_rest_is_averaged():
    rows = [
        {"skipped": 1, "tokens": 10, "chunks_too_long": 2.0, "loss": 1.0},
        {"skipped": 0, "tokens": 30, "chunks_too_long": 0.0, "loss": 3.0},
    ]
    joined = {"skipped": 1, "tokens": 40, "chunks_too_long": 2, "loss": 2}
    assert over_minibatches(rows) == joined
