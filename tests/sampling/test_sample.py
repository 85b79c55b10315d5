"""`t1jax sample`: what it writes is what `t1jax score` finds, and a bad line is named."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from t1jax.errors import UserError
from t1jax.sampling.sample import read_prompts, routes_path, sample
from t1jax.score import score


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.slow
def test_lines_come_back_in_order_and_score_agrees(tmp_path, fixture_dir):
    checkpoint = str(fixture_dir("ref-a"))
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt_ids": [5, 6, 7], "max_tokens": 6, "temperature": 1.0},
        {"prompt_ids": list(range(40)), "max_tokens": 3, "top_p": 0.8, "top_k": 9},
        {"prompt_ids": [5, 6, 7], "max_tokens": 6, "seed": 0},
    )
    output = tmp_path / "out.jsonl"
    sample(checkpoint, prompts, str(output), slots=4, prefill_chunk=16, steps_per_round=1)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [len(line["ids"]) for line in lines] == [6, 3, 6]
    assert lines[0]["ids"] == lines[2]["ids"]  # the seed of line 1 is 0
    assert [line["finish"] for line in lines] == ["length"] * 3
    assert not list(tmp_path.glob("*.incomplete"))

    routes = load_file(routes_path(str(output)))
    streams = [line["prompt_ids"] + line["ids"] for line in lines]
    lengths = np.array([len(stream) for stream in streams])
    tokens = np.zeros((3, lengths.max()), np.int32)
    recorded = np.full((3, lengths.max(), *routes["0"].shape[1:]), -1, np.int16)
    for i, (stream, line) in enumerate(zip(streams, lines, strict=True)):
        tokens[i, : len(stream)] = stream
        recorded[i, : len(stream) - 1] = routes[line["routes"]]
    save_file(
        {"input_ids": tokens, "lengths": lengths, "routed_experts": recorded},
        tmp_path / "in.safetensors",
    )
    out = tmp_path / "scored.safetensors"
    score(checkpoint, str(tmp_path / "in.safetensors"), str(out), replay=True)
    scored = load_file(out)["logprobs"]
    for i, (stream, line) in enumerate(zip(streams, lines, strict=True)):
        sampled = slice(len(line["prompt_ids"]) - 1, len(stream) - 1)
        np.testing.assert_allclose(line["logprobs"], scored[i, sampled], atol=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_ids": [1], "max_tokens": 0}, "line 3: max_tokens: .*greater than or equal to 1"),
        ({"prompt_ids": [1], "temperature": -1}, "line 3: temperature: .*greater than or equal"),
        ({"prompt_ids": [1], "top_p": 0}, "line 3: top_p: .*greater than 0"),
        ({"prompt_ids": [1], "tempreature": 1}, "line 3: tempreature: Extra inputs"),
        ({"prompt_ids": [1], "prompt": "x"}, "line 3: expected either prompt or prompt_ids"),
        ({"prompt_ids": []}, "line 3: the prompt has no token"),
        ({"prompt": "x"}, "line 3: prompt needs the checkpoint's tokenizer.json"),
        ({"prompt_ids": [-1]}, r"line 3: prompt_ids.0: .*greater than or equal to 0"),
        ([1], "line 3: the line: "),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_by_its_number(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    write_lines(path, {"prompt_ids": [1]})
    path.write_text(path.read_text() + "\n" + json.dumps(line) + "\n")
    with pytest.raises(UserError, match=message):
        read_prompts(str(path), None)


def test_a_token_that_the_model_lacks_is_named_and_nothing_is_written(tmp_path, fixture_dir):
    prompts = write_lines(
        tmp_path / "p.jsonl",
        {"prompt_ids": [1], "max_tokens": 2},
        {"prompt_ids": [10**6], "max_tokens": 42},
    )
    output = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="line 2: token 0 has id 1000000; the vocabulary has"):
        sample(str(fixture_dir("ref-a")), prompts, str(output), slots=4, prefill_chunk=16)
    assert not output.exists() and not routes_path(str(output)).exists()


@pytest.mark.parametrize("output", ["missing/out.jsonl", "."])
def test_a_place_that_cannot_be_written_is_refused_first(tmp_path, output):
    with pytest.raises(UserError, match="cannot be written: expected a file"):
        sample("nowhere", "nothing", str(tmp_path / output))
