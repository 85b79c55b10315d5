"""The config: what is refused names its key, its value and the way out; what is read comes back."""

from pathlib import Path

import pytest

from t1jax.config import Config, load_config, parse_config, require, to_yaml
from t1jax.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"
MINIMAL = {"run": "runs/a", "model": {"checkpoint": "model"}}
PPO = {"steps": 3, "actor": {"learning_rate": 1e-6}, "critic": {"learning_rate": 1.5e-5}}


def test_what_is_written_reads_back_equal(tmp_path):
    config = parse_config(MINIMAL | {"ppo": PPO}, "here")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config


def test_defaults_are_the_recipe_s():
    ppo = parse_config(MINIMAL | {"ppo": PPO}, "here").ppo
    assert (ppo.launch, ppo.batch_trajectories, ppo.staleness) == (560, 512, 1)
    assert (ppo.clip, ppo.value_clip, ppo.gamma, ppo.lam) == (0.2, 0.2, 1.0, 1.0)
    assert (ppo.actor.b1, ppo.actor.b2, ppo.actor.weight_decay) == (0.9, 0.98, 0.1)
    assert (ppo.kl, ppo.entropy, ppo.importance) == (0.0, 0.0, "none")


def test_changes_reach_their_key(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(parse_config(MINIMAL | {"ppo": PPO}, "here")))
    config = load_config(path, ["ppo.clip=0.1", "model.mesh=data=2,expert=4", "ppo.kl=0.0"])
    assert (config.ppo.clip, config.model.mesh, config.ppo.kl) == (0.1, "data=2,expert=4", 0.0)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"ppo": PPO | {"clipp": 0.1}}, "unknown key ppo.clipp; did you mean 'clip'"),
        ({"ppo": PPO | {"actor": {"learning_rat": 1}}}, "ppo.actor.learning_rat; did you mean"),
        ({"ppo": PPO | {"staleness": 2}}, "ppo.staleness=2: input should be 0 or 1"),
        ({"ppo": PPO | {"clip": "0.1"}}, "ppo.clip='0.1': input should be a valid number"),
        ({"ppo": {"steps": 1}}, "ppo.actor is missing"),
        ({"zebra": 1}, "unknown key zebra; expected one of run, seed, model"),
        ({"sampler": {"slots": 0}}, "sampler.slots=0: input should be greater than or equal to 1"),
        ({"ppo": PPO | {"kl": float("nan")}}, "ppo.kl=nan"),
        ({"ppo": PPO | {"launch": 4}}, "ppo.launch=4 is below ppo.batch_trajectories=512"),
        ({"ppo": PPO | {"baseline": "group"}}, "ppo.baseline=group compares attempts"),
        (
            {"ppo": PPO, "sampler": {"capture_routes": False}},
            "ppo.replay=True needs the routes that sampler.capture_routes=False",
        ),
        (
            {"sampler": {"context": 100}, "agent": {"context_tokens": 200}},
            "agent.context_tokens=200 is above sampler.context=100",
        ),
    ],
)
def test_refusals_name_key_value_and_way_out(tree, message):
    with pytest.raises(UserError) as refusal:
        parse_config(MINIMAL | tree, "here.yaml")
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("here.yaml: ")


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml"):
        load_config(path)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("change", ["ppo.clip", "=3", "run.a.b=3", "ppo=[", "ppo.clip=[1"])
def test_a_change_that_is_none_is_refused(tmp_path, change):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(parse_config(MINIMAL, "here")))
    with pytest.raises(UserError, match="--set"):
        load_config(path, [change])


def test_a_section_that_a_command_needs_is_named():
    with pytest.raises(UserError, match="no `sft:` section"):
        require(parse_config(MINIMAL, "here"), "sft")


def test_a_config_is_frozen():
    config = Config.model_validate(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid_and_begins_with_its_command(path):
    load_config(path)
    first, *_ = path.read_text().splitlines()
    assert first.startswith("# ")
    assert "t1jax" in path.read_text().partition("\nrun:")[0]
