"""Of training: rewards, outcomes, losses, the critic."""

from collections.abc import Sequence

import numpy as np

from t1jax.evaluation.drawing import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    Drawn,
    band,
    canvas,
    drawn,
)
from t1jax.evaluation.figures.shared import (
    LONG,
    Absent,
    dots,
    legend_above,
    listed,
    met,
    needed,
    outcome_of,
    share_axis,
    step_axis,
)
from t1jax.evaluation.run_folder import RunFolder


def reward(run: RunFolder) -> Drawn:
    """PPO's rewards by step."""
    steps, mean = needed(run, "ppo", "reward/mean")
    _, low = run.series("ppo", "reward/low")
    _, high = run.series("ppo", "reward/high")
    success_steps, success = run.series("ppo", "success")
    with canvas(2.7) as (figure, (axes,)):
        axes.plot(steps, mean, color=BLUE, label="mean reward", **dots(steps))
        if len(low) == len(steps) == len(high):
            band(axes, steps, low, high, BLUE)
        axes.plot(
            success_steps, success, color=ORANGE, linestyle="--", label="solved", **dots(steps)
        )
        step_axis(axes, "PPO step")
        axes.set_ylim(min(0.0, *low, *mean), max(1.0, *mean))
        legend_above(axes)
        row = run.rows["ppo"][-1]
        return drawn(
            figure,
            name="reward",
            title="Reward in training",
            caption=f"Mean reward of each step's {row.get('trajectories', 0):g} trained episodes "
            f"and the share that is solved, {len(steps)} steps. Band: 95% interval of the mean "
            "(normal approximation over episodes).",
            healthy="rises, then levels off below 1; a fall to 0 that stays is a collapse.",
            alt=f"Mean reward from {mean[0]:.3f} at step {steps[0]} to {mean[-1]:.3f} at step "
            f"{steps[-1]}; the best is {max(mean):.3f}.",
        )


def outcomes(run: RunFolder) -> Drawn:
    """How the trained episodes ended, by PPO step."""
    rows = [row for row in run.rows.get("ppo", ()) if row.get("trajectories")]
    prefix = "outcome/"
    counts = [
        {n.removeprefix(prefix): v for n, v in row.items() if n.startswith(prefix) and v}
        for row in rows
    ]
    if not counts:
        raise Absent("there is no step of PPO yet; `t1jax ppo` makes them")
    steps = [row["step"] for row in rows]
    total = np.array([max(sum(each.values()), 1) for each in counts])
    names = met(counts)
    shares = [np.array([each.get(name, 0.0) for each in counts]) / total for name in names]
    with canvas(2.9) as (figure, (axes,)):
        edges = _edges(steps)
        below = np.zeros(len(steps))
        for name, share in zip(names, shares, strict=True):
            shown, colour = outcome_of(name)
            axes.stairs(below + share, edges, baseline=below, fill=True, color=colour, label=shown,
                        edgecolor=PAPER, linewidth=0.6 if len(steps) <= LONG else 0)  # fmt: skip
            below += share
        share_axis(axes, "y", "", (0, 1))
        step_axis(axes, "PPO step")
        axes.grid(visible=False)
        axes.set_xlim(edges[0], edges[-1])
        legend_above(axes, least=1)
        return drawn(
            figure,
            name="outcomes",
            title="How training episodes ended",
            caption=f"Shares of each step's {total[-1]:g} trained episodes. Trials that "
            "infrastructure broke are no episodes and are not in here.",
            healthy="solved and partial take over; cut-short ones shrink.",
            alt=f"First step: {listed(counts[0])}. Last step: {listed(counts[-1])}.",
        )


def _edges(steps: Sequence[int]) -> np.ndarray:
    """Borders of the steps' columns."""
    return np.append(np.array(steps, float) - 0.5, steps[-1] + 0.5)


def sft_loss(run: RunFolder) -> Drawn:
    """The loss of fine-tuning."""
    steps, loss = needed(run, "sft", "loss")
    with canvas(2.4) as (figure, (axes,)):
        axes.plot(steps, loss, color=PURPLE, **dots(steps))
        step_axis(axes, "SFT step")
        axes.set_ylabel("nats a token")
        axes.set_ylim(0, 1.05 * max(loss))
        return drawn(
            figure,
            name="sft_loss",
            title="Loss of fine-tuning",
            caption=f"Mean negative log-likelihood of sampled tokens, before each of {len(steps)} "
            "updates, each on another batch.",
            healthy="falls steeply, then slowly; no spikes that last.",
            alt=f"From {loss[0]:.3f} to {loss[-1]:.3f} nats a token.",
        )


def critic(run: RunFolder) -> Drawn:
    """How much of the returns the critic explains, in warm-up and in PPO."""
    parts = [(stage, *run.series(stage, "explained_variance")) for stage in ("critic", "ppo")]
    parts = [part for part in parts if part[1]]
    if not parts:
        raise Absent(
            "no update of a critic has an explained variance yet (it has none where all returns of "
            "a batch are equal); `t1jax critic` and `t1jax ppo` make them"
        )
    with canvas(2.5) as (figure, (axes,)):
        begin = 0
        for (stage, steps, share), colour in zip(parts, (GREEN, BLUE), strict=False):
            name = "warm-up" if stage == "critic" else "PPO"
            places = [begin + step for step in steps]
            axes.plot(places, np.maximum(share, -1), color=colour, label=name, **dots(steps))
            begin += max(row["step"] for row in run.rows[stage]) + 1
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.set_ylim(max(min(-0.05, *(v for _, _, share in parts for v in share)), -1.0), 1)
        step_axis(axes, "critic update, warm-up first")
        legend_above(axes)
        every = [value for _, _, share in parts for value in share]
        return drawn(
            figure,
            name="explained_variance",
            title="Explained variance of the critic",
            caption="Share of the variance of a batch's returns that values from before the update "
            f"explain, {len(every)} updates. 1: all of it; 0: no better than the mean. Below −1 is "
            "drawn at −1.",
            healthy="above 0 after warm-up, 0.5 or more later; below 0 means that advantages are "
            "noisier with the critic than without.",
            alt=f"From {every[0]:.3f} to {every[-1]:.3f}; the highest is {max(every):.3f}.",
        )
