"""What several figures share: names and colours of outcomes, kinds of axes, what is absent."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from t1jax.evaluation.drawing import BLUE, GREEN, GREY, INK, MUTED, OCHRE, ORANGE, PURPLE
from t1jax.evaluation.run_folder import RunFolder

LABELS = {"base": "base", "sft": "SFT", "ppo": "PPO"}
# How trials end, from best to worst; those that were cut short are verified all the same.
OUTCOMES = {
    "solved": ("solved", GREEN), "partial": ("partial", BLUE), "failed": ("failed", ORANGE),
    "turns_exhausted": ("out of turns", OCHRE), "context_full": ("context full", PURPLE),
    "agent_timeout": ("out of time", INK), "verifier_timeout": ("verifier out of time", MUTED),
    "infra_error": ("infrastructure", GREY),
}  # fmt: skip
SHORT, LONG = 12, 120  # points of a curve, up to which they are marked; from which lines are thin


class Absent(Exception):  # noqa: N818 - it is no error: the run has not come that far
    """The numbers of a figure are not there yet; the message says which, and what makes them."""


def needed(run: RunFolder, stage: str, metric: str) -> tuple[list[int], list[float]]:
    """Steps and numbers of a metric that a figure cannot do without."""
    steps, values = run.series(stage, metric)
    if not steps:
        raise Absent(f"metrics.jsonl has no {metric} of {stage} yet; `t1jax {stage}` makes it")
    return steps, values


# ---- in words ------------------------------------------------------------------------------------


def label(name: str) -> str:
    """An evaluation's name for people."""
    return LABELS.get(name, name)


def percent(value: float) -> str:
    """A share for people."""
    return f"{100 * value:.1f}%"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def outcome_of(name: str) -> tuple[str, str]:
    """An outcome's name for people, and its colour."""
    return OUTCOMES.get(name, (name.replace("_", " "), GREY))


def met(counts: Sequence[Mapping[str, float]]) -> list[str]:
    """Outcomes that occur, from best to worst, unknown ones last."""
    names = {name for each in counts for name, number in each.items() if number}
    return [name for name in OUTCOMES if name in names] + sorted(names - set(OUTCOMES))


def listed(counts: Mapping[str, float]) -> str:
    """Counts of outcomes in a sentence."""
    return ", ".join(f"{counts[name]:g} {outcome_of(name)[0]}" for name in met([counts]))


# ---- axes ----------------------------------------------------------------------------------------


def dots(points: Sequence[Any]) -> dict[str, Any]:
    """A marker on each point of a curve that is short; a thin line where it is long."""
    if len(points) > LONG:
        return {"linewidth": 1.0}
    return {"marker": "o"} if len(points) <= SHORT else {}


def step_axis(axes: Axes, name: str) -> None:
    """Whole numbers along x."""
    axes.set_xlabel(name)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def share_axis(axes: Axes, which: str, name: str, limits: tuple[float, float]) -> None:
    """Percent along x or y."""
    axes.set(**{f"{which}lim": limits, f"{which}label": name})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(PercentFormatter(1, decimals=0))


def legend_above(axes: Axes, columns: int = 4, *, least: int = 2) -> None:
    """Names of what is drawn, where nothing is hidden by them; none of fewer than `least`."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) < least:
        return
    columns = min(len(names), columns)
    order = [n for column in range(columns) for n in range(column, len(names), columns)]  # by row
    axes.legend(
        [handles[n] for n in order], [names[n] for n in order], loc="lower left",
        bbox_to_anchor=(0, 1.0), borderaxespad=0.2, ncols=columns, columnspacing=1.2,
    )  # fmt: skip
