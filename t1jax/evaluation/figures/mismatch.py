"""Of trainer against sampler: the log-prob gap, and what each remedy takes away."""

from t1jax.evaluation.drawing import BLUE, GREEN, ORANGE, PURPLE, Drawn, canvas, drawn
from t1jax.evaluation.figures.shared import Absent, dots, legend_above, needed, step_axis
from t1jax.evaluation.run_folder import CELLS, RunFolder

CELL_LABELS = {
    "tito_replay": "TITO, replay", "tito_live": "TITO, live router",
    "retokenised_replay": "re-tokenised, replay", "retokenised_live": "re-tokenised, live router",
}  # fmt: skip
PARTS = {
    "mismatch/train_rollout_logprob_abs_diff": ("mean |d|", BLUE, "-"),
    "mismatch/max": ("max |d|", ORANGE, "--"),
    "mismatch/k3": ("k3, of the KL", GREEN, "-."),
    "approximate_kl": ("KL of one update", PURPLE, ":"),
}


def gap(run: RunFolder) -> Drawn:
    """The log-prob gap, its parts, and how far an update moves, by step."""
    steps, mean = needed(run, "ppo", "mismatch/train_rollout_logprob_abs_diff")
    _, share = run.series("ppo", "mismatch/ESS")
    with canvas(2.9) as (figure, (axes,)):
        curves = {metric: run.series("ppo", metric) for metric in PARTS}
        log = any(value > 0 for _, values in curves.values() for value in values)
        for metric, (name, colour, dash) in PARTS.items():
            points = [p for p in zip(*curves[metric], strict=True) if p[1] > 0 or not log]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=dash, label=name,
                          **dots(points))  # fmt: skip
        axes.set_yscale("log" if log else "linear")
        axes.set_ylabel("nats")
        step_axis(axes, "PPO step")
        legend_above(axes, columns=2)
        ess = f" Effective sample size of the last step: {share[-1]:.1%}." if share else ""
        return drawn(
            figure,
            name="gap",
            title="Log-prob gap between trainer and sampler",
            caption="d: log-prob of a sampled token in the trainer, under the rollout's weights, "
            f"less the sampler's. k3 is the mean of eᵈ − 1 − d. Dotted, for scale: the movement "
            f"of one update. A logarithmic axis has no numbers of 0 or less.{ess}",
            healthy="flat; with float32, replay and token-in-token-out near 1e-6, with bfloat16 "
            "near 1e-2; well below what an update moves.",
            alt=f"Mean absolute difference from {mean[0]:.3g} at step {steps[0]} to {mean[-1]:.3g} "
            f"at step {steps[-1]}.",
        )


def ablation(run: RunFolder) -> Drawn:
    """The gap with and without each of its two remedies, at the same weights."""
    cells = {name: run.mismatch[name] for name in reversed(CELLS) if name in run.mismatch}
    if not cells:
        raise Absent("there is no mismatch.json; `t1jax mismatch` makes it")
    with canvas(0.95 + 0.4 * len(cells)) as (figure, (axes,)):
        for place, cell in enumerate(cells.values()):
            axes.plot(cell.ci95, [place] * 2, color=BLUE, marker="|", markersize=9)
            axes.plot([cell.abs_diff], [place], "o", color=BLUE)
        axes.set_yticks(range(len(cells)), [CELL_LABELS[name] for name in cells])
        axes.set_ylim(-0.6, len(cells) - 0.4)
        if all(min(cell.abs_diff, *cell.ci95) > 0 for cell in cells.values()):
            axes.set_xscale("log")
        axes.set_xlabel("mean |log-prob of trainer − of sampler|, nats")
        axes.grid(axis="y", visible=False)
        return drawn(
            figure,
            name="ablation",
            title="What each remedy takes away",
            caption="The gap on one set of trajectories at the same weights: tokens as sampled "
            "(TITO) or re-tokenised from text, experts replayed or chosen again. Bars: 95% "
            f"intervals, a bootstrap over trajectories.{_extent_of_mismatch(run)}",
            healthy="TITO with replay is smallest, and apart from the others; with float32 it is "
            "below 1e-4.",
            alt="; ".join(
                f"{CELL_LABELS[name]} {cell.abs_diff:.3g} (95% interval {cell.ci95[0]:.3g} to "
                f"{cell.ci95[1]:.3g})"
                for name, cell in cells.items()
            ),
        )


def _extent_of_mismatch(run: RunFolder) -> str:
    first, *_ = run.mismatch.values()
    known = [f"{first.facts[n]:,} {n}" for n in ("trajectories", "tokens") if n in first.facts]
    told = f" {', '.join(known)}." if known else ""
    again = run.mismatch.get("retokenised_replay")
    if again is not None and "changed" in again.facts:
        told += f" Re-tokenising changed {again.facts['changed']:,} ids."
    return told
