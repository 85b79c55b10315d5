"""What the log-prob gap is made of, on trajectories where every part of it acts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.checkpoint.init_tiny import SIZES, train_tokenizer
from t1jax.errors import UserError
from t1jax.model.moe import Replay
from t1jax.model.qwen3_5 import bind
from t1jax.pipeline import gap
from t1jax.pipeline.collect import Rollout
from t1jax.pipeline.episodes import encoded_again
from t1jax.pipeline.learning import load_policy, open_setup
from t1jax.pipeline.mismatch import CELLS, mismatch
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.io import load_trajectory, save_trajectory
from t1jax.trajectory.record import Ending, Finish
from t1jax.trajectory.recorder import Recorder

from . import bandit

pytestmark = pytest.mark.slow
COLUMNS, COUNT = 64, 6


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small model that speaks init-tiny's language."""
    vocab = SIZES["tiny"].vocab
    path = tmp_path_factory.mktemp("checkpoint")
    bandit.checkpoint(path, vocab=vocab)
    train_tokenizer(vocab).save(str(path / "tokenizer.json"))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, source):
    """Episodes of random routes and of splits that no tokenizer would choose; their log-probs are
    a plain softmax over the logits of the same weights, one row a pass."""
    config = bandit.config("none", source)
    setup, chat = open_setup(config), Chat.load(source)
    params, model = load_policy(setup, source), setup.policy.config

    @jax.jit
    def logprobs(ids_BT, routes_LBTC):
        bound = bind(setup.policy, params)
        out = bound(ids_BT, run=setup.run, replay=Replay(routes_LBTC, None))
        logp_BTV = jax.nn.log_softmax(bound.head(out.hidden_BTD, setup.run), axis=-1)
        return jnp.take_along_axis(logp_BTV[:, :-1], ids_BT[:, 1:, None], axis=-1)[..., 0]

    root, random = tmp_path_factory.mktemp("trajectories"), np.random.default_rng(0)
    for number in range(COUNT):
        given = chat.encode_text("list every file")[: 8 + number]
        letters = [chat.encode_text(letter) for letter in "file"]
        words = chat.encode_text(" go on, then submit")
        sampled = np.concatenate([words, *letters, words[number:]])
        ids = np.concatenate([given, sampled])
        routes = np.stack([
            [random.permutation(model.moe.experts)[: model.moe.chosen] for _ in range(COLUMNS)]
            for _ in range(model.layers)
        ]).astype(np.uint8)  # fmt: skip
        row = np.pad(ids, (0, COLUMNS - len(ids))).astype(np.int32)
        told = np.asarray(logprobs(row[None], routes[:, None]))[0, len(given) - 1 : len(ids) - 1]
        recorder = Recorder(setup.shape)
        recorder.append_context(given)
        recorder.append_sampled(sampled, told, version=0, finish=Finish.length)
        recorder.record_routes(0, np.moveaxis(routes[:, : len(ids) - 1], 0, 1))
        ending = Ending(task=f"made/{number}", outcome="partial", reward=0.5)
        save_trajectory(recorder.finish(ending), root / f"{number}")
    return root


def test_with_replay_and_sampled_tokens_nothing_is_left_and_each_remedy_takes_away_its_part(
    tmp_path, source, folder, capsys
):
    out = tmp_path / "made" / "mismatch.json"
    measured = mismatch(str(folder), checkpoint=source, out=str(out), batch_tokens=256)
    assert json.loads(out.read_text()) == measured
    best, *others = (measured[cell] for cell in CELLS)
    assert best["abs_diff"] < 1e-4 and best["changed"] == 0
    assert best["rows_replayed"] > 0 and best["replay_replace_rate"] > 0.5
    for cell in others:
        low, high = cell["ci95"]
        assert 100 * best["abs_diff"] < low <= cell["abs_diff"] <= high
        assert cell["tokens"] == best["tokens"] and cell["trajectories"] == COUNT
    assert measured["retokenised_replay"]["changed"] == 4 * COUNT
    for part in ("routing", "tokens"):
        assert measured["parts"][part]["ci95"][0] > 0
    assert "encoded again, live router" in capsys.readouterr().out


def test_a_bootstrap_takes_whole_trajectories():
    """One trajectory of nine tokens with d = 1, one of one token with d = 0."""
    found = gap.Gap(
        train=np.array([1.0] * 9 + [0.0]), other=np.zeros(10), tokens=np.ones(10, np.int64),
        trajectory=np.array([0] * 9 + [1]),
    )  # fmt: skip
    means = found.means(np.array([[1, 1], [2, 0], [0, 2]]))
    np.testing.assert_allclose(means, [0.9, 1.0, 0.0])


def test_ppo_trains_on_the_text_encoded_again_where_it_is_told_to(source, folder):
    trajectories = tuple(load_trajectory(folder / f"{n}") for n in range(COUNT))
    rollout = Rollout(trajectories=trajectories, counts={})
    new, shares = encoded_again(rollout, Chat.load(source))
    sampled = sum(t.chunks[0].sampled_tokens for t in trajectories)
    assert shares == {"retokenised/changed": 4 * COUNT / sampled, "retokenised/lost": 0}
    texts = [
        [Chat.load(source).decode(t.chunks[0].ids) for t in r.trajectories] for r in (rollout, new)
    ]
    assert texts[0] == texts[1]
    assert all(t.chunks[0].missing_rows for t in new.trajectories)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trajectories": "nowhere"}, "nowhere is no directory"),
        ({"checkpoint": ""}, "nothing says which weights sampled"),
        ({"spoil": {"versions": 3}}, r"was sampled by weights \[3\]; expected 0 alone"),
        ({"spoil": {"recorded": False}}, r"lacks the routes of .*--on-missing live"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, source, folder, changes, message):
    arguments = {"trajectories": str(folder), "checkpoint": source, **changes}
    spoil = arguments.pop("spoil", {})
    if spoil:
        (name, value), whole = next(iter(spoil.items())), load_trajectory(folder / "1")
        column = np.full_like(getattr(whole.chunks[0], name), value)
        bad = dataclasses.replace(whole.chunks[0], **{name: column})
        save_trajectory(load_trajectory(folder / "0"), tmp_path / "0")
        save_trajectory(dataclasses.replace(whole, chunks=(bad,)), tmp_path / "1")
        arguments["trajectories"] = str(tmp_path)
    with pytest.raises(UserError, match=message):
        mismatch(**arguments)
