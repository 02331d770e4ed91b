"""The picture of a run: its losses over its steps."""

import math
import os
from pathlib import Path

from fixbin_jax.errors import UserError
from fixbin_jax.metrics import read_metrics

# From Okabe and Ito's palette, which the colour-blind can tell apart.
_TRAINING = "#0072B2"
_HELD_OUT = "#D55E00"
_QUIET = "#595959"


def write_loss_curve(metrics_jsonl: Path, output_png: Path, entropy: float | None) -> None:
    """Draws the losses in a metrics.jsonl as a PNG.

    Args:
      metrics_jsonl: lines with "loss" (training) and "eval_loss" (held-out text), in nats per id.
      output_png: written under a temporary name and renamed.
      entropy: of the held-out text's ids taken one by one, in nats, as a line to compare with;
        None for no line.

    Raises:
      UserError: matplotlib is missing, or the file holds no finite loss.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
    except ModuleNotFoundError:
        raise UserError(
            f"{output_png}: drawing it needs matplotlib: pip install 'fixbin-jax[plot]'"
        ) from None

    training = _series(metrics_jsonl, "loss")
    held_out = _series(metrics_jsonl, "eval_loss")
    if not training and not held_out:
        raise UserError(f"{metrics_jsonl}: no line with a finite loss or eval_loss")
    losses = [loss for _, loss in training + held_out]

    figure = Figure(figsize=(7.0, 4.2), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        steps, values = zip(*training, strict=True)
        axes.plot(steps, values, color=_TRAINING, alpha=0.3, linewidth=0.8)
        axes.plot(
            steps, smoothed(values), color=_TRAINING, linewidth=1.8, label="training text, smoothed"
        )
    if held_out:
        steps, values = zip(*held_out, strict=True)
        axes.plot(
            steps,
            values,
            color=_HELD_OUT,
            linewidth=1.0,
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.8,
            label="held-out text",
        )
    if entropy is not None:
        axes.axhline(
            entropy,
            color=_QUIET,
            linewidth=1.0,
            linestyle=(0, (5, 3)),
            zorder=1,
            label=f"unigram entropy of the held-out text, {entropy:.2f}",
        )
    if min(losses) > 0 and max(losses) > 3 * min(losses):
        # Most of a run's steps go into the last part of its fall, which a linear scale flattens.
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)

    temporary = output_png.with_name(output_png.name + ".tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, output_png)


def smoothed(values: tuple[float, ...]) -> list[float]:
    """Each value's mean with its neighbours, as many before as after, at most 1/25 of all."""
    reach = max(1, len(values) // 50)
    result = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        window = values[i - near : i + near + 1]
        result.append(sum(window) / len(window))
    return result


def _series(metrics_jsonl: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of each line that has a finite value of that name."""
    return [
        (record["step"], record[name])
        for record in read_metrics(metrics_jsonl)
        if isinstance(record.get(name), int | float) and math.isfinite(record[name])
    ]
