"""Of time: seconds of stages, and of the parts of a step."""

import numpy as np

from t1jax.evaluation.drawing import BLUE, INK, Drawn, canvas, drawn
from t1jax.evaluation.figures.shared import Absent, duration
from t1jax.evaluation.run_folder import RunFolder


def stage_seconds(run: RunFolder) -> Drawn:
    """Seconds of each finished stage."""
    if not run.seconds:
        raise Absent("there is no stages.jsonl; `t1jax run` writes it")
    names, seconds = list(run.seconds), list(run.seconds.values())
    with canvas(0.8 + 0.26 * len(names)) as (figure, (axes,)):
        axes.barh(names[::-1], seconds[::-1], color=BLUE, height=0.62)
        for place, value in enumerate(seconds[::-1]):
            axes.annotate(duration(value), (value, place), xytext=(4, 0), va="center", color=INK,
                          textcoords="offset points")  # fmt: skip
        axes.set_xlim(0, max(seconds) * 1.18)
        axes.set_xlabel("seconds")
        axes.grid(axis="y", visible=False)
        return drawn(
            figure,
            name="seconds",
            title="Time of each stage",
            caption=f"Wall time of {len(names)} finished stages, {duration(sum(seconds))} in all.",
            healthy="most of it in PPO.",
            alt="; ".join(f"{name} {duration(value)}" for name, value in run.seconds.items()),
        )


def step_seconds(run: RunFolder) -> Drawn:
    """Where the seconds of a PPO step go."""
    prefix = "seconds/"
    rows = [row for row in run.rows.get("ppo", ()) if row.get("seconds")]
    names = sorted({n for row in rows for n in row if n.startswith(prefix)})
    if not names:
        raise Absent("there is no step of PPO yet; `t1jax ppo` makes them")
    medians = {n: float(np.median([row.get(n) or 0.0 for row in rows])) for n in names}
    order = sorted(names, key=medians.__getitem__)
    whole = float(np.median([row["seconds"] for row in rows]))
    with canvas(0.8 + 0.26 * len(order)) as (figure, (axes,)):
        shown = [n.removeprefix(prefix).replace("_", " ") for n in order]
        spread = np.array([
            np.quantile([row.get(n) or 0.0 for row in rows], [0.1, 0.9]) for n in order
        ])  # fmt: skip
        axes.barh(shown, [medians[n] for n in order], color=BLUE, height=0.62)
        axes.hlines(range(len(order)), spread[:, 0], spread[:, 1], color=INK, linewidth=1.2)
        axes.set_xlabel("seconds")
        axes.grid(axis="y", visible=False)
        return drawn(
            figure,
            name="step_seconds",
            title="Time of a PPO step",
            caption=f"Medians of {len(rows)} steps; lines: from the 10th to the 90th percentile. A "
            f"whole step takes {duration(whole)}; at staleness 1 the rollout runs beside the rest.",
            healthy="rollout, critic and actor share it; the first step also compiles.",
            alt="; ".join(f"{n.removeprefix(prefix)} {duration(medians[n])}" for n in order[::-1]),
        )
