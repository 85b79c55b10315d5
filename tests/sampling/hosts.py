"""A program: one of two processes that share a scheduler; prints what it saw as JSON.

    python -m tests.sampling.hosts PORT PROCESS
"""

import asyncio
import json
import sys

import jax

PORT, PROCESS = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, int(PROCESS), initialization_timeout=120)

import numpy as np  # noqa: E402

from tests.sampling import small as S  # noqa: E402

MESH = "data=2"


async def lead(scheduler):
    """Two turns of six sessions, some requests cancelled, and new weights at the end."""

    async def talk(i):
        stream, answers = S.prompt(5 + 6 * i, i), []
        for turn in range(2):
            request = S.request(stream, 6 + i, session=f"s{i}", seed=i)
            done = await scheduler.complete(request)
            answers.append(done.ids.tolist())
            stream = np.concatenate([stream, done.ids, S.prompt(4, turn)])
        return answers

    gone = [
        asyncio.create_task(scheduler.complete(S.request(S.prompt(60, i), 60))) for i in range(3)
    ]
    talks = asyncio.gather(*map(talk, range(6)))
    await asyncio.sleep(0.05)
    for task in gone:
        task.cancel()
    return await talks


async def main():
    from t1jax.sampling.hosts import Hosts
    from t1jax.sampling.scheduler import Scheduler

    link = Hosts(timeout_s=120)
    ours = Scheduler(S.engine(mesh=MESH), S.params(MESH), S.OPTIONS, link=link)
    answers = await lead(ours) if link.leads else None
    await ours.swap(S.params(MESH, 1), 1)
    new = await ours.complete(S.request(S.prompt(9), 5)) if link.leads else None
    await ours.close()
    counters = ours.counters
    decisions = {
        name: getattr(counters, name)
        for name in ("prefill_tokens", "cached_tokens", "sampled_tokens", "decode_steps",
                     "preemptions", "evictions", "cached_bytes", "free_slots")
    }  # fmt: skip
    print(json.dumps({
        "answers": answers, "new": None if new is None else new.ids.tolist(),
        "version": ours.version, "decisions": decisions,
    }))  # fmt: skip


asyncio.run(main())
