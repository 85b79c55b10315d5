"""`t1jax eval`: a checkpoint, or a model behind a server, on a list of tasks under one harness.

Below RUN/evaluation/NAME: a directory a trial, results.jsonl (a line a trial, in the order of the
tasks) and summary.json, both written when every trial has ended. Finished trials are kept; those
that infrastructure broke are played again by the same command.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sandbox.base import Backend
from sandbox.commands import run_until_done
from sandbox.verify import Baseline
from t1jax.agent.endpoint import Client, Server, run_chat_episode
from t1jax.agent.episode import Episode
from t1jax.config import Config
from t1jax.errors import Preempted, UserError
from t1jax.evaluation.results import RESULTS, SUMMARY, write_results
from t1jax.evaluation.summary import lines, summarize, table
from t1jax.pipeline.policy import identity, player
from t1jax.pipeline.rollout import (
    PolicyOf,
    episode_config,
    load_baselines,
    load_tasks,
    token_play,
    with_policy,
)
from t1jax.pipeline.trials import (
    Job,
    Play,
    Played,
    keep_settings,
    make_jobs,
    play_all,
    write_json,
)
from t1jax.pipeline.watch import Watch

REWARD = "fraction"  # in the trajectories' endings; pass@1 is of all assertions


def evaluate(config: Config, *, key: str = "") -> dict[str, Any]:
    """Plays what is missing, writes results and summary, and prints the table.

    Args:
      config: its `evaluation` section says what is evaluated on what.
      key: of the server, where one is evaluated.

    Raises:
      UserError: no headline can be given; results and summary are written all the same.
      Preempted: a signal ended it; the same command goes on.
    """
    asked = config.evaluation
    folder = evaluation_folder(config)
    tasks = load_tasks(config, asked.split, asked.limit)
    checkpoint = "" if asked.endpoint else player(config, asked.checkpoint)
    keep_settings(folder, _settings(config, checkpoint))
    jobs = make_jobs(tasks, seed=config.seed, step=0, attempts=asked.attempts)
    ended = Preempted(f"ended by a signal; {folder} keeps what is finished: run it again to go on")
    results = run_until_done(_play(config, checkpoint, key, jobs, folder), ended)
    numbers = summarize(results, attempts=asked.attempts, seed=config.seed)
    summary = _described(config, checkpoint) | numbers
    write_results(folder / RESULTS, results)
    write_json(folder / SUMMARY, summary)
    Console().print(table(folder.name, summary))
    print("\n".join([*lines(summary), f"wrote {folder / SUMMARY}"]))
    if summary["refused"]:
        raise UserError(
            f"no headline: {summary['refused']}; run the same command again, which plays those "
            f"trials again (their errors are in {folder / RESULTS})"
        )
    return summary


def evaluation_folder(config: Config) -> Path:
    """Where an evaluation's files lie."""
    asked = config.evaluation
    return Path(config.run) / "evaluation" / (asked.name or asked.split)


async def _play(
    config: Config, checkpoint: str, key: str, jobs: Sequence[Job], folder: Path
) -> list[Played]:
    asked = config.evaluation
    baselines = load_baselines(config, asked.split)

    async def played(play: Play) -> list[Played]:
        with Watch(f"eval {folder.name}", len(jobs)) as watch:
            results = await play_all(jobs, play, folder, config.sandbox, watch)
        return [played for played in results if played is not None]

    if asked.endpoint:
        if not asked.endpoint_model:
            raise UserError("evaluation.endpoint is set and evaluation.endpoint_model is empty; "
                            "name the model")  # fmt: skip
        server = Server(url=asked.endpoint, model=asked.endpoint_model, key=key)
        async with Client(server) as client:
            return await played(chat_play(client, config, baselines))

    async def with_model(policy_of: PolicyOf) -> list[Played]:
        return await played(
            token_play(
                policy_of,
                config.agent,
                config.sandbox,
                asked.sampling,
                reward=REWARD,
                baselines=baselines,
            )
        )

    return await with_policy(config, checkpoint, with_model)


def chat_play(client: Client, config: Config, baselines: Mapping[Path, Baseline]) -> Play:
    """Episodes of a model behind a server."""

    async def play(job: Job, backend: Backend, folder: Path, watch: Watch) -> Episode:
        settings = episode_config(
            job, folder, config.agent, config.sandbox, config.evaluation.sampling, reward=REWARD
        )
        baseline = baselines.get(job.task.root)
        episode = await run_chat_episode(
            job.task, backend, client, folder, settings, baseline=baseline
        )
        watch.sampled(episode.usage.sampled_tokens)
        return episode

    return play


def _described(config: Config, checkpoint: str) -> dict[str, Any]:
    """What was evaluated, on what."""
    asked = config.evaluation
    policy = (
        {"endpoint": asked.endpoint, "endpoint_model": asked.endpoint_model}
        if asked.endpoint
        else identity(checkpoint)
    )
    return policy | {
        "split": asked.split,
        "limit": asked.limit,
        "seed": config.seed,
        "sampling": asked.sampling.model_dump(),
    }


def _settings(config: Config, checkpoint: str) -> dict[str, Any]:
    """What an evaluation's trials have in common. More attempts or tasks add to them."""
    described = _described(config, checkpoint)
    del described["limit"]
    return described | {"agent": config.agent.model_dump()}
