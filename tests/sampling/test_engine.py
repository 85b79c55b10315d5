"""The Engine contract: what an outer loop may rely on, without our scheduler."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jetstream.engine.engine_api import Engine, ResultTokens

from t1jax.sampling.engine import Draw

from . import small as S

STEPS = 6


def drive(engine, params, prompts, steps=STEPS):
    """An outer loop that knows the contract alone; tokens of each prompt, one slot each."""
    assert isinstance(engine, Engine)
    state = engine.init_decode_state()
    for slot, tokens in enumerate(prompts):
        padded = np.pad(tokens, (0, 64 - len(tokens)))
        prefix = engine.prefill(params=params, padded_tokens=padded, true_length=len(tokens))
        state = engine.insert(prefix, state, slot=slot)
    sampled = [[] for _ in prompts]
    for _ in range(steps):
        state, result = engine.generate(params, state)
        assert isinstance(result, ResultTokens)
        result.copy_to_host_async()
        result = result.convert_to_numpy()
        for slot, tokens in enumerate(sampled):
            data = result.get_result_at_slot(slot)
            assert data.valid.all() and data.tokens.shape == (1, 1)
            assert data.lengths[0] == len(tokens) + 1
            tokens.append(int(data.tokens[0, 0]))
    return sampled


def test_a_loop_that_knows_the_contract_alone_samples_greedily():
    prompts = [S.prompt(n, seed=n) for n in (1, 7, 40)]
    sampled = drive(S.engine(draw=Draw(temperature=0.0)), S.params(), prompts)
    streams = [np.concatenate([p, s]) for p, s in zip(prompts, sampled, strict=True)]
    for prompt, tokens, (logits, _) in zip(prompts, sampled, S.scored(streams), strict=True):
        assert logits.argmax(axis=-1)[len(prompt) - 1 : -1].tolist() == tokens


def in_slot(engine, state, slot, steps=STEPS):
    """Tokens, log-probs and routes of one slot."""
    tokens, logprobs, routes = [], [], []
    for _ in range(steps):
        state, result = engine.generate(S.params(), state)
        data = result.convert_to_numpy().get_result_at_slot(slot)
        tokens.append(data.tokens[0, 0])
        logprobs.append(data.raw_logprob[0, 0])
        routes.append(data.routes[0, 0])
    return state, np.array(tokens), np.array(logprobs), np.array(routes)


def test_a_prefix_goes_on_where_it_ended():
    """Chunks of 2, 2 and 1, then three single tokens, are one prompt of 8."""
    engine, tokens = S.engine(), S.prompt(8)
    prefill = lambda tokens, prefix=None: engine.prefill(  # noqa: E731
        params=S.params(), existing_prefix=prefix, padded_tokens=tokens, true_length=len(tokens)
    )
    whole, prefix, routes = prefill(tokens), None, []
    for begin, end in ((0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8)):
        prefix = prefill(tokens[begin:end], prefix)
        routes.append(prefix.read_routes())
    assert prefix.length == whole.length == 8
    np.testing.assert_array_equal(np.concatenate(routes), whole.read_routes())
    for one, other in zip(*map(jax.tree.leaves, (prefix.held, whole.held)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_sequence_that_lost_its_slot_goes_on_as_if_it_had_not():
    engine = S.engine()
    first, second = (
        engine.prefill(params=S.params(), padded_tokens=S.prompt(n, n), true_length=n)
        for n in (20, 33)
    )
    state = engine.insert(first, engine.init_decode_state(), 2, draw=Draw(seed=1))
    _, *undisturbed = in_slot(engine, state, 2, 2 * STEPS)

    state = engine.insert(first, engine.init_decode_state(), 2, draw=Draw(seed=1))
    state, *before = in_slot(engine, state, 2)
    kept = engine.take(state, 2, length=20 + STEPS)
    state = engine.insert(second, state, 2, draw=Draw(seed=9))
    state, *_ = in_slot(engine, state, 2)
    state = engine.insert(kept, state, 1, draw=Draw(seed=1))
    state, *after = in_slot(engine, state, 1)
    for whole, a, b in zip(undisturbed, before, after, strict=True):
        np.testing.assert_allclose(np.concatenate([a, b]), whole, atol=1e-5)


def test_slots_stop_by_themselves_and_then_nothing_moves():
    engine = S.engine()
    prefix = engine.prefill(params=S.params(), padded_tokens=S.prompt(9), true_length=9)
    state = engine.init_decode_state()
    _, tokens, *_ = in_slot(engine, engine.insert(prefix, state, 0), 0)
    stop = int(tokens[2])
    state = engine.insert(prefix, engine.init_decode_state(), 0, stop_ids=[stop])
    state = engine.insert(prefix, state, 1, max_tokens=2)
    state = engine.insert(prefix, state, 2)
    state = engine.release(state, [2])
    state, result = engine.generate(S.params(), state, steps=4)
    result = result.convert_to_numpy()
    steps = [result.get_result_at_slot(i).valid[0].tolist() for i in range(4)]
    taken = tokens.tolist().index(stop) + 1
    assert steps == [[1] * taken + [0] * (4 - taken), [1, 1, 0, 0], [0] * 4, [0] * 4]
    assert state.cache.length_B.tolist() == [9 - 1 + taken, 10, 8, 0]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.cache))


def test_several_steps_in_a_call_are_single_steps():
    engine = S.engine()
    prefix = engine.prefill(params=S.params(), padded_tokens=S.prompt(9), true_length=9)
    _, tokens, logprobs, routes = in_slot(
        engine, engine.insert(prefix, engine.init_decode_state(), 3), 3, 4
    )
    state = engine.insert(prefix, engine.init_decode_state(), 3)
    _, result = engine.generate(S.params(), state, steps=4)
    data = result.convert_to_numpy().get_result_at_slot(3)
    np.testing.assert_array_equal(data.tokens[0], tokens)
    np.testing.assert_allclose(data.raw_logprob[0], logprobs, atol=1e-6)
    np.testing.assert_array_equal(data.routes[0], routes)
    assert data.routes.dtype == np.uint8


def test_one_prefix_in_several_slots_draws_with_several_seeds():
    engine = S.engine()
    prefix = engine.prefill_multisampling(
        params=S.params(), padded_tokens=S.prompt(9), true_length=9, num_samples=3
    )
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [0, 2, 3], draw=Draw(seed=5))
    _, result = engine.generate(S.params(), state, steps=4)
    rows = result.convert_to_numpy().get_result_at_slots([0, 2, 3]).tokens
    state = engine.insert(prefix, engine.init_decode_state(), 1, draw=Draw(seed=6))
    _, alone = engine.generate(S.params(), state, steps=4)
    np.testing.assert_array_equal(alone.convert_to_numpy().get_result_at_slot(1).tokens[0], rows[1])
    assert len({tuple(row) for row in rows.tolist()}) == 3


def test_upstreams_later_names():
    engine = S.engine()
    assert engine.use_chunked_prefill and engine.prefill_chunk_size == 16
    assert (engine.max_concurrent_decodes, engine.samples_per_slot) == (4, 1)
    assert engine.max_prefill_length == 128 and engine.free_resource(0) is None
    assert engine.mesh.size == 1 and engine.colocated_cpus is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.prefill(params=None, padded_tokens=np.zeros(4), true_length=0),
         "true_length=0; expected 1 to the 4 given"),
        (lambda e: e.prefill(params=None, padded_tokens=np.array([1, 64]), true_length=2),
         r"token 1 has id 64; the vocabulary has 0\.\.63"),
        (lambda e: e.prefill(params=None, padded_tokens=np.zeros(200, int), true_length=200),
         "200 tokens do not fit in sampler.context=128"),
        (lambda e: e.release(None, [4]), "slot 4; expected 0 to 3"),
        (lambda e: e.generate(None, None, sampler=print), "sampler= is not used"),
        (lambda e: e.build_tokenizer(None), "without tokenizer="),
        (lambda e: Draw(temperature=-1.0), "temperature=-1.0; expected 0"),
        (lambda e: S.engine(S.OPTIONS.model_copy(update={"prefill_chunk": 24})),
         "prefill_chunk=24; expected a power of two"),
        (lambda e: S.engine(mesh="data=8"), "slots=4 does not divide into the 8 parts"),
        (lambda e: S.engine(mesh="context=2"), "sample on a mesh with context=1"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(S.engine())


def test_nothing_but_sampling_imports_tensorflow():
    modules = [
        "t1jax.cli", "t1jax.checkpoint.convert", "t1jax.score", "t1jax.rl.steps",
        "t1jax.sampling.sampler", "t1jax.sampling.programs", "t1jax.sampling.sample",
        "t1jax.trajectory.completion",
    ]  # fmt: skip
    program = f"import sys, {', '.join(modules)}; print('tensorflow' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert shown.stdout.strip() == "False"
