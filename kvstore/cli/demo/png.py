"""The demo's picture: time to first token computed and restored."""

from __future__ import annotations

import io
from pathlib import Path

from kvstore.cli.demo.facts import Outcome
from kvstore.private_files import write_private_file

_COMPUTED, _RESTORED = "#c2410c", "#0f766e"


def write_png(outcome: Outcome, path: Path) -> list[Path]:
    """Draw the two times as bars; nothing is written when matplotlib is not installed.

    Returns:
        The file, or nothing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return []
    first, stored = outcome.restored.answers[0], outcome.computed.stored
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [f"computed\n{first.prompt_tokens:,} tokens", f"restored\n{first.restored_tokens:,} tokens"]
    milliseconds = [outcome.cold_s * 1000, outcome.restored_s * 1000]
    bars = axes.barh(names, milliseconds, color=[_COMPUTED, _RESTORED], height=0.6)
    axes.bar_label(bars, labels=[f"{value:,.0f} ms" for value in milliseconds], padding=6)
    axes.invert_yaxis()
    axes.set_xlim(0, max(milliseconds) * 1.15)
    axes.set_xlabel(
        f"time to first token (ms); {stored.raw_bytes / 2**20:,.0f} MiB of KV cache, "
        f"{stored.stored_bytes / 2**20:,.0f} MiB stored in LMDB"
    )
    machine = outcome.computed.machine
    axes.set_title(f"{outcome.ratio:.1f}x faster after a restart ({machine['model']}, {machine['dtype']}, CPU)")
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150)
    write_private_file(path, picture.getvalue())
    return [path]
