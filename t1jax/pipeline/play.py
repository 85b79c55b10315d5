"""Real rollouts for training: one engine, its scheduler, sandboxes, and the tasks of each step."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from sandbox.task import Task
from t1jax.agent.conversation import Policy
from t1jax.config import SamplingSection
from t1jax.data.tasks import Schedule
from t1jax.model.qwen3_5 import Params
from t1jax.pipeline.collect import Collect, Publish
from t1jax.pipeline.learning import Setup
from t1jax.pipeline.rollout import Rollouts, load_baselines, load_tasks, token_play
from t1jax.sampling.open import scheduler
from t1jax.trajectory.chat import Chat

Playing = tuple[Collect, Publish, Callable[[int], Sequence[Task]]]


@asynccontextmanager
async def playing(setup: Setup, stage: str, policy: Params) -> AsyncIterator[Playing]:
    """What a stage needs to play its own episodes, for the length of a block.

    Args:
      setup: the models and the config.
      stage: `critic` or `ppo`; trajectories lie in RUN/trajectories/STAGE.
      policy: parameters that the engine holds until the stage publishes its first.
    """
    config = setup.config
    ppo, warm_up = config.ppo, config.critic
    sampling = SamplingSection() if ppo is None else ppo.sampling
    reward = warm_up.reward if stage == "critic" and warm_up else ppo.reward if ppo else "fraction"
    tasks = load_tasks(config, "train")
    schedule = _schedule(setup, stage, tasks)
    async with scheduler(
        (setup.policy.config, policy),
        config.sampler,
        mesh=config.model.mesh,
        dtype=config.model.dtype,
        version=-1,  # until the stage publishes its first, version 0 or a restored one
    ) as engine:
        chat = Chat.load(config.model.checkpoint)
        player = Policy(complete=engine.complete, chat=chat, shape=setup.shape)
        play = token_play(
            lambda task: player,
            config.agent,
            config.sandbox,
            sampling,
            reward=reward,
            baselines=load_baselines(config, "train"),
        )
        folder = setup.folder / "trajectories" / stage
        collect = Rollouts(folder, play, config.sandbox, seed=config.seed)
        yield collect, engine.swap, schedule


def _schedule(setup: Setup, stage: str, tasks: Sequence[Task]) -> Callable[[int], Sequence[Task]]:
    ppo, warm_up = setup.config.ppo, setup.config.critic
    if stage == "critic":
        launch, group = (warm_up.batch_trajectories if warm_up else 1), 1
    else:
        launch, group = (ppo.launch, ppo.group) if ppo else (1, 1)
    by_root = {task.root: task for task in tasks}
    order = Schedule(list(by_root), launch=launch, group=group, seed=setup.config.seed)
    return lambda step: [by_root[root] for root in order.of(step)]
