"""A program: google-jetstream's own Driver over T1Engine; prints what it sampled as JSON.

Run in a process of its own, for the Driver kills the process that it fails in. Patched where the
release does not run or changes ids: `jax.tree_map` is gone, a BOS id is put before every prompt,
importing it sets the root logger to DEBUG.
"""

import asyncio
import json
import logging
import os
import sys

import jax
import numpy as np
from jetstream.core import orchestrator
from jetstream.core.proto import jetstream_pb2
from jetstream.engine import token_utils, tokenizer_api

from t1jax.sampling.engine import Draw
from tests.sampling import small as S
from tests.sampling.test_engine import drive

REQUESTS = 10
TOKENS = 6


class Ids(tokenizer_api.Tokenizer):
    """Ids in, ids out; an end token that is never sampled."""

    pad_id, eos_id, bos_id = 0, -1, -1
    stop_tokens = frozenset()

    def encode(self, s, **kwargs):
        raise ValueError("prompts are ids here")

    def decode(self, token_ids, **kwargs):
        return "".join(f"<{i}>" for i in token_ids)


def delete_arrays(tree):
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def patch():
    plain = token_utils.pad_tokens

    def without_bos(tokens, *positional, is_bos=True, **named):
        return plain(np.asarray(tokens), *positional, is_bos=False, **named)

    orchestrator.delete_pytree = delete_arrays
    token_utils.pad_tokens = without_bos
    logging.getLogger().setLevel(logging.WARNING)


async def ask(server, prompt):
    """Tokens that the server gives for one prompt."""
    content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt.tolist())
    request = jetstream_pb2.DecodeRequest(token_content=content, max_tokens=TOKENS)
    tokens = []
    async for response in server.Decode(request):
        tokens += response.stream_content.samples[0].token_ids
    return tokens


async def ask_all(server, prompts):
    return await asyncio.gather(*(ask(server, prompt) for prompt in prompts))


def main():
    patch()
    engine, params = S.engine(draw=Draw(temperature=0.0), tokenizer=Ids()), S.params()
    prompts = [S.prompt(3 + 4 * i, seed=i) for i in range(REQUESTS)]
    driver = orchestrator.Driver(
        prefill_engines=[engine], generate_engines=[engine],
        prefill_params=[params], generate_params=[params],
    )  # fmt: skip
    got = asyncio.run(ask_all(orchestrator.LLMOrchestrator(driver), prompts))
    want = [drive(engine, params, [prompt], TOKENS)[0] for prompt in prompts]
    print(json.dumps({"got": got, "want": want}))
    sys.stdout.flush()
    os._exit(0)  # the Driver's threads wait for each other when they are told to stop


if __name__ == "__main__":
    main()
