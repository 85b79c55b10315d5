"""One episode: a policy, a terminal, and the record of what passed between them. Never imports jax.

policy = Policy(complete=scheduler.complete, chat=Chat.load(checkpoint), shape=shape)
episode = await run_episode(task, backend, policy, folder, EpisodeConfig(...))
"""
