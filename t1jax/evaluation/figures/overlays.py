"""Of two runs: the same curve of each, one over the other."""

import dataclasses

from matplotlib.axes import Axes

from t1jax.evaluation.drawing import BLUE, ORANGE, Drawn, band, canvas, drawn
from t1jax.evaluation.figures.shared import Absent, dots, legend_above, step_axis
from t1jax.evaluation.run_folder import RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric of a stage, and how it is drawn."""

    stage: str
    metric: str
    title: str
    unit: str
    log: bool = False
    low: str = ""  # metrics of its interval, where it has one
    high: str = ""


CURVES = (
    Curve(stage="ppo", metric="reward/mean", title="Reward in training", unit="mean reward",
          low="reward/low", high="reward/high"),
    Curve(stage="ppo", metric="success", title="Solved in training", unit="share of episodes"),
    Curve(stage="ppo", metric="mismatch/train_rollout_logprob_abs_diff", log=True,
          title="Log-prob gap between trainer and sampler", unit="mean |d|, nats"),
    Curve(stage="ppo", metric="explained_variance", title="Explained variance of the critic",
          unit="share of variance"),
    Curve(stage="ppo", metric="approximate_kl", title="Movement of one update", unit="nats",
          log=True),
    Curve(stage="ppo", metric="seconds", title="Time of a PPO step", unit="seconds"),
    Curve(stage="sft", metric="loss", title="Loss of fine-tuning", unit="nats a token"),
)  # fmt: skip


def overlay(a: RunFolder, b: RunFolder, curve: Curve) -> Drawn:
    """Both runs' curve; of one alone where the other has none.

    Raises:
      Absent: neither run has it.
    """
    lines = [
        (name, run, *_drawable(run, curve), colour, dash)
        for name, run, colour, dash in (("A", a, BLUE, "-"), ("B", b, ORANGE, "--"))
    ]
    lines = [line for line in lines if line[2]]
    if not lines:
        raise Absent(f"neither run has {curve.metric} of {curve.stage}")
    with canvas(2.6) as (figure, (axes,)):
        for name, run, steps, values, colour, dash in lines:
            axes.plot(steps, values, color=colour, linestyle=dash, label=name, **dots(steps))
            _interval(axes, run, curve, steps, colour)
        if curve.log:
            axes.set_yscale("log")
        axes.set_ylabel(curve.unit)
        step_axis(axes, f"{curve.stage.upper()} step")
        legend_above(axes)
        told = "; ".join(f"{name} has {len(steps)} steps" for name, _, steps, *_ in lines)
        intervals = " Bands: 95% intervals of the mean over episodes." if curve.low else ""
        return drawn(
            figure,
            name=f"{curve.stage}_{curve.metric.replace('/', '_')}",
            title=curve.title,
            caption=f"{curve.metric} by step: {told}.{intervals}",
            healthy="",
            alt="; ".join(
                f"{name} from {values[0]:.3g} to {values[-1]:.3g}"
                for name, _, _, values, *_ in lines
            ),
        )


def _drawable(run: RunFolder, curve: Curve) -> tuple[list[int], list[float]]:
    """Steps and numbers; on a logarithmic axis those above 0."""
    steps, values = run.series(curve.stage, curve.metric)
    kept = [
        (step, value)
        for step, value in zip(steps, values, strict=True)
        if value > 0 or not curve.log
    ]
    return [step for step, _ in kept], [value for _, value in kept]


def _interval(axes: Axes, run: RunFolder, curve: Curve, steps: list[int], colour: str) -> None:
    if not curve.low:
        return
    (_, low), (_, high) = run.series(curve.stage, curve.low), run.series(curve.stage, curve.high)
    if len(low) == len(steps) == len(high):
        band(axes, steps, low, high, colour)
