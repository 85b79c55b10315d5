"""Of evaluations: what was solved, and how trials ended."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from t1jax.evaluation.drawing import BLUE, INK, PAPER, Drawn, canvas, drawn
from t1jax.evaluation.figures.shared import (
    Absent,
    label,
    legend_above,
    listed,
    met,
    outcome_of,
    percent,
    share_axis,
)
from t1jax.evaluation.run_folder import EVALUATED, Evaluation, RunFolder


def pass_at_1(run: RunFolder) -> Drawn:
    """Each evaluation's pass@1 with its interval."""
    shown = [run.evaluations[name] for name in EVALUATED if name in run.evaluations]
    told = [e for e in shown if not e.refused and e.summary["pass_at_1"] is not None]
    if not told:
        raise Absent("no finished evaluation named base, sft or ppo has a headline; "
                     "`t1jax eval` makes them")  # fmt: skip
    with canvas(0.9 + 0.42 * len(told)) as (figure, (axes,)):
        for place, evaluation in enumerate(reversed(told)):
            _interval(axes, place, evaluation.summary["pass_at_1"], evaluation.summary["ci95"])
        axes.set_yticks(range(len(told)), [label(e.name) for e in reversed(told)])
        axes.set_ylim(-0.6, len(told) - 0.4)
        share_axis(axes, "x", "pass@1", (-0.02, 1.02))
        axes.grid(axis="y", visible=False)
        return drawn(
            figure,
            name="pass_at_1",
            title="Solved at the first attempt",
            caption=f"Share of attempts that pass every assertion, over {extent(told)}. Bars: 95% "
            "intervals, a bootstrap over tasks with their attempts nested; exact bounds "
            "where all tasks agree.",
            healthy="base near 0, then rising; intervals of neighbours apart.",
            alt="; ".join(
                f"{label(e.name)} {percent(e.summary['pass_at_1'])}{between(e.summary['ci95'])}"
                for e in told
            ),
        )


def _interval(axes: Axes, place: int, value: float, ci95: Sequence[float] | None) -> None:
    if ci95 is not None:
        axes.plot(ci95, [place, place], color=BLUE, linewidth=5, alpha=0.35, solid_capstyle="butt")
    axes.plot([value], [place], "o", color=BLUE, markersize=8)
    right = value if ci95 is None else max(value, ci95[1])
    left = value if ci95 is None else min(value, ci95[0])
    inside = right < 0.8
    axes.annotate(
        percent(value), (right if inside else left, place), xytext=(7 if inside else -7, 0),
        textcoords="offset points", va="center", ha="left" if inside else "right", color=INK,
    )  # fmt: skip


def between(ci95: Sequence[float] | None) -> str:
    return "" if ci95 is None else f" (95% interval {percent(ci95[0])} to {percent(ci95[1])})"


def extent(evaluations: Sequence[Evaluation]) -> str:
    """How many tasks and attempts, of which split; each on its own where they differ."""
    told = {
        f"{e.summary['tasks']} tasks × {e.summary['attempts']} attempts of the {e.split} split": e
        for e in evaluations
    }
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{label(e.name)}: {extent}" for extent, e in told.items())


def composition(run: RunFolder) -> Drawn:
    """How the trials of each evaluation ended."""
    shown = [run.evaluations[name] for name in EVALUATED if name in run.evaluations]
    if not shown:
        raise Absent("no evaluation named base, sft or ppo is finished; `t1jax eval` makes them")
    counts = {label(e.name): e.summary["outcomes"] for e in reversed(shown)}
    with canvas(1.35 + 0.42 * len(shown)) as (figure, (axes,)):
        left = np.zeros(len(counts))
        for outcome in met(list(counts.values())):
            name, colour = outcome_of(outcome)
            share = np.array([c.get(outcome, 0) / sum(c.values()) for c in counts.values()])
            axes.barh(list(counts), share, left=left, color=colour, label=name, height=0.62,
                      edgecolor=PAPER, linewidth=0.8)  # fmt: skip
            left += share
        share_axis(axes, "x", "share of trials", (0, 1))
        axes.grid(visible=False)
        legend_above(axes, columns=3, least=1)
        trials = "; ".join(f"{label(e.name)} {e.summary['trials']} trials" for e in shown)
        return drawn(
            figure,
            name="composition",
            title="How evaluation trials ended",
            caption=f"Shares of all trials ({trials}). Partial: some assertions pass. Out of "
            "turns, context full, out of time: cut short, verified all the same.",
            healthy="solved grows from stage to stage; infrastructure is 0 or a sliver.",
            alt="; ".join(f"{name}: {listed(c)}" for name, c in counts.items()),
        )
