"""What t1jax writes, transformers loads: the same logits, tokens and chats."""

import json

import numpy as np
import pytest

from t1jax.checkpoint.convert import convert
from t1jax.checkpoint.export import export
from t1jax.checkpoint.init_tiny import init_tiny

from . import made

pytestmark = [
    pytest.mark.hf,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of transformers' own, on import
]

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Which files are there?"},
    {
        "role": "assistant",
        "reasoning_content": "I should look.",
        "content": "",
        "tool_calls": [{"function": {"name": "run", "arguments": {"command": "ls", "n": [1]}}}],
    },
    {"role": "tool", "content": "README.md\n"},
    {"role": "tool", "content": "main.py"},
]
RENDERED = """<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
Which files are there?<|im_end|>
<|im_start|>assistant
<think>
I should look.
</think>

<tool_call>
<function=run>
<parameter=command>
ls
</parameter>
<parameter=n>
[1]
</parameter>
</function>
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
README.md
</tool_response>
<tool_response>
main.py
</tool_response><|im_end|>
<|im_start|>assistant
<think>
"""


def load(directory):
    """transformers' text model in float32; every tensor must have found its place."""
    import torch
    from transformers import Qwen3_5MoeForCausalLM

    model, info = Qwen3_5MoeForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize("name", ["ref-a", "ref-a/per_expert"])
def test_an_export_gives_the_references_logits(tmp_path, fixture_dir, name, text_only):
    import torch

    convert(fixture_dir(name), tmp_path / "dst", progress=made.silent())
    export(tmp_path / "dst", tmp_path / "back", text_only=text_only, progress=made.silent())
    model = load(tmp_path / "back")
    with np.load(fixture_dir("ref-a") / "forward.npz") as golden:
        ids, mask, wanted = (golden[key] for key in ("input_ids", "attention_mask", "logits"))
    with torch.no_grad():
        logits = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.numpy()
    assert np.abs(logits - wanted)[mask > 0].max() < 2e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    init_tiny(folder, progress=made.silent())
    return folder


def test_the_tiny_model_loads_whole(tiny):
    from transformers import AutoModelForImageTextToText

    load(tiny)
    _, info = AutoModelForImageTextToText.from_pretrained(tiny, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_the_tiny_tokenizer_and_template_load(tiny):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rendered = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert rendered == RENDERED
    ours = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer(rendered)["input_ids"] == ours.encode(rendered).ids
    assert tokenizer.decode(ours.encode(rendered).ids) == rendered
    generation = json.loads((tiny / "generation_config.json").read_text())
    assert tokenizer.eos_token_id == generation["eos_token_id"][0]
