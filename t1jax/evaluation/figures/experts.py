"""Of routes: where replay changed something, and the load of the experts."""

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from t1jax.evaluation.drawing import BLUE, MAP, ORANGE, Drawn, canvas, drawn
from t1jax.evaluation.figures.shared import Absent, label, legend_above, percent
from t1jax.evaluation.routes import Load
from t1jax.evaluation.run_folder import RunFolder


def replay_rate(run: RunFolder) -> Drawn:
    """How often the live router would have chosen otherwise, by layer."""
    metric = "replay_replace_rate_by_layer"
    rows = [row for row in run.rows.get("ppo", ()) if row.get(metric)]
    if not rows:
        raise Absent(f"no step of PPO has {metric}; `t1jax ppo` measures it where ppo.replay is on")
    rates = np.array([row[metric] for row in rows], float)
    layers = np.arange(rates.shape[1])
    with canvas(2.5) as (figure, (axes,)):
        axes.vlines(layers, rates.min(0), rates.max(0), color=BLUE, linewidth=5, alpha=0.3)
        axes.plot(layers, rates[-1], "o", color=BLUE, label=f"last step ({rows[-1]['step']})")
        axes.plot(layers, rates[0], "x", color=ORANGE, label=f"first step ({rows[0]['step']})")
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set_ylim(0, max(float(rates.max()) * 1.08, 1e-4))
        legend_above(axes)
        return drawn(
            figure,
            name="replay_rate",
            title="Replay: where the live router disagrees",
            caption="Share of (token, layer) rows whose live top experts are another set than the "
            f"recorded ones. Bars: lowest to highest of {len(rows)} steps.",
            healthy="a few percent at most in bfloat16, near 0 in float32, more in deeper layers; "
            "a jump means that trainer and sampler compute different things.",
            alt=f"Last step, from layer 0: {', '.join(percent(rate) for rate in rates[-1][:12])}"
            + (" …" if len(layers) > 12 else ""),
        )


def expert_load(run: RunFolder, load: Load | None) -> Drawn:
    """Which experts the tokens of an evaluation went to."""
    if load is None:
        raise Absent("no finished evaluation has trajectories with recorded routes; `t1jax eval` "
                     "of a checkpoint makes them where sampler.capture_routes is on")  # fmt: skip
    excess = load.excess
    layers, experts = excess.shape
    with canvas(min(1.25 + 0.16 * layers, 5.0)) as (figure, (axes,)):
        shown = axes.imshow(
            excess, aspect="auto", cmap=MAP, vmin=0, interpolation="nearest", origin="lower"
        )
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
        axes.grid(visible=False)
        bar = figure.colorbar(shown, ax=axes, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("× an even share")
        busiest = np.unravel_index(int(excess.argmax()), excess.shape)
        return drawn(
            figure,
            name="expert_load",
            title="Load of the experts",
            caption=f"Tokens that each expert got, over an even share, in {load.trajectories} "
            f"trajectories ({load.tokens:,} tokens) of the evaluation {label(load.evaluation)}: "
            f"{layers} layers × {experts} experts.",
            healthy="no dark row but one bright cell; a layer that uses few experts has collapsed.",
            alt=f"The busiest is expert {busiest[1]} of layer {busiest[0]} with {excess.max():.1f} "
            f"times an even share; {float((excess == 0).mean()):.1%} of the experts got nothing.",
        )
