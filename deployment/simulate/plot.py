"""Times to first token of several runs as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_ttft(runs: Mapping[str, Sequence[float]], path: Path, *, title: str) -> None:
    """Write the share of requests by time to first token, a line a run. `runs`: label -> milliseconds.

    Raises:
        ValueError: matplotlib isn't installed, or the file's ending is none of a picture.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'loray[plot]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, times_ms in runs.items():
        ordered = sorted(times_ms)
        axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=label)
    axes.set(xscale="log", xlabel="time to first token (ms)", ylabel="share of requests", title=title, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
