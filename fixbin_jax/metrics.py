"""What a run records (metrics.jsonl, TensorBoard) and what a person sees (the progress line)."""

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

# Dense bfloat16 operations per second of one JAX device, without sparsity; the first row whose
# words all stand in the device's kind holds. On TPU v4 and v5p one device is a whole chip.
#   TPU: https://cloud.google.com/tpu/docs/v4 (v5e, v5p, v6e likewise)
#   GPU: data sheets at https://www.nvidia.com/en-us/data-center/ (a100, h100, h200, ...); where a
#   sheet gives the figure with sparsity, half of it.
_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v5p", 459e12),
    ("TPU v4", 275e12),
    ("NVIDIA B200", 2250e12),
    ("NVIDIA GH200", 989e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA A100", 312e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA L4", 121e12),
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Most operations per second one device can do in matrix products.

    Args:
      device_kind: `jax.Device.device_kind`, such as "TPU v5 lite".
      dtype: of the products' inputs, such as "bfloat16".

    Returns:
      Floating-point operations per second; None where no figure is known: CPUs, other devices,
      and dtypes but bfloat16 and float16.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    words = set(device_kind.replace("-", " ").split())
    return next((peak for kind, peak in _PEAK_FLOPS if words.issuperset(kind.split())), None)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order.

    A line that is not an object with an integer "step" (a killed run's last one may be torn) is
    left out. A file that is not there has no lines.
    """
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


class MetricsWriter:
    """Appends lines to metrics.jsonl, and to TensorBoard if asked.

    Each line is one strict JSON object with "step" first, out of the process's hands when `write`
    returns; a value that is not finite becomes null.
    """

    def __init__(self, workdir: Path, *, resume_step: int | None, tensorboard: bool) -> None:
        """Opens workdir/metrics.jsonl and cuts what a killed run wrote too much.

        Args:
          workdir: the run folder; made if it is not there.
          resume_step: the step the run continues from: lines of later steps are removed, since
            they will be written again. None for a run that starts anew: all lines are removed.
          tensorboard: also write events to workdir/tensorboard. Without the tensorboardX package
            a line on standard error says so, and the run goes on.
        """
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / "metrics.jsonl"
        last = -1 if resume_step is None else resume_step
        kept = [record for record in read_metrics(path) if record["step"] <= last]
        temporary = path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), "utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")
        self._events = _open_tensorboard(workdir, last + 1) if tensorboard else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line.

        Args:
          step: the step the values belong to.
          values: scalars by name, such as "loss" or "eval_loss".
        """
        numbers = {name: v if isinstance(v, int) else float(v) for name, v in values.items()}
        strict = {name: v if math.isfinite(v) else None for name, v in numbers.items()}
        self._file.write(json.dumps({"step": step, **strict}, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _open_tensorboard(workdir: Path, purge_step: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        print(
            "note: no TensorBoard events, tensorboardX is not installed: "
            "pip install 'fixbin-jax[plot]'",
            file=sys.stderr,
        )
        return None
    return SummaryWriter(str(workdir / "tensorboard"), purge_step=purge_step)


class Progress:
    """One line about long work: how far, how fast, how long yet.

    For example `step 120/2000   6.0%  loss 3.412  12.3k tokens/s  41.2% of peak  left 2m 31s`. On
    a terminal the line is rewritten in place, elsewhere it is printed anew at intervals.

    The rate is that of the last half minute, counted from the end of the first item (a first step
    is mostly compilation) and without what passed inside `pause`.
    """

    _WINDOW_SECONDS = 30.0
    _REDRAW_SECONDS = 0.1

    def __init__(
        self,
        total: int,
        *,
        label: str = "step",
        unit: str = "tokens",
        units_per_item: float = 1,
        peak_rate: float | None = None,
        stream: TextIO | None = None,
        interval_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts at nothing done; prints nothing yet.

        Args:
          total: items in all, at least 1.
          label: what an item is called.
          unit: what the rate counts.
          units_per_item: tokens in a step, say.
          peak_rate: units per second at which the devices would be fully used, where known.
          stream: where the line goes; standard error if None.
          interval_seconds: between lines where the stream is not a terminal.
          clock: seconds since any fixed moment.
        """
        self._total = total
        self._label = label
        self._unit = unit
        self._units_per_item = units_per_item
        self._peak_rate = peak_rate
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._interval = self._REDRAW_SECONDS if self._in_place else interval_seconds
        self._clock = clock
        self._paused_seconds = 0.0
        self._marks: deque[tuple[float, int]] = deque()  # (seconds not paused, items done)
        self._drawn_at = -math.inf
        self._line_is_open = False

    @property
    def rate(self) -> float | None:
        """Units per second; None before there are two moments to compare."""
        items_per_second = self._items_per_second()
        return None if items_per_second is None else items_per_second * self._units_per_item

    @property
    def peak_share(self) -> float | None:
        """Rate as a share of peak_rate, 0 to 1; None where either is unknown."""
        rate = self.rate
        return None if rate is None or self._peak_rate is None else rate / self._peak_rate

    def update(self, done: int, fact: str = "") -> None:
        """Counts items up to `done` as finished now, and shows the line if it is due.

        Args:
          done: items finished so far, at most total.
          fact: what else to show, such as "loss 3.412".
        """
        now = self._clock()
        active = now - self._paused_seconds
        self._marks.append((active, done))
        while len(self._marks) > 2 and self._marks[1][0] <= active - self._WINDOW_SECONDS:
            self._marks.popleft()
        if now - self._drawn_at >= self._interval or done >= self._total:
            self._drawn_at = now
            self._draw(done, fact)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time inside the `with` block (evaluating, saving) out of the rate."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    def note(self, text: str) -> None:
        """Prints a line that stays, above the progress line."""
        self._stream.write(("\r\x1b[K" if self._line_is_open else "") + text + "\n")
        self._stream.flush()
        self._line_is_open = False

    def close(self) -> None:
        """Ends the line, so that what is printed next begins a new one."""
        if self._line_is_open:
            self._stream.write("\n")
            self._stream.flush()
            self._line_is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _items_per_second(self) -> float | None:
        if len(self._marks) < 2:
            return None
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else None

    def _draw(self, done: int, fact: str) -> None:
        facts = [f"{self._label} {done}/{self._total}  {done / self._total:5.1%}"]
        if fact:
            facts.append(fact)
        items_per_second = self._items_per_second()
        if items_per_second:
            facts.append(f"{format_count(items_per_second * self._units_per_item)} {self._unit}/s")
            if self.peak_share is not None:
                facts.append(f"{self.peak_share:.1%} of peak")
            facts.append(f"left {format_duration((self._total - done) / items_per_second)}")
        line = "  ".join(facts)
        if self._in_place:
            # A line as wide as the terminal would wrap, and \r would return to its second half.
            line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
        else:
            line += "\n"
        self._stream.write(line)
        self._stream.flush()
        self._line_is_open = self._in_place


def format_count(number: float) -> str:
    """A number in three or four digits: 999, 12.3k, 536.9M, 17.0B."""
    suffixes = ("", "k", "M", "B", "T")
    if round(number) < 1000:
        return f"{number:.3g}"
    power = 1
    while round(number / 1000**power, 1) >= 1000 and power < len(suffixes) - 1:
        power += 1
    return f"{number / 1000**power:.1f}{suffixes[power]}"


def format_duration(seconds: float) -> str:
    """A time in its two largest units: 45s, 2m 31s, 1h 05m, 3d 04h."""
    total = round(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if minutes == 0:
        return f"{total}s"
    if hours == 0:
        return f"{minutes}m {total % 60:02d}s"
    if days == 0:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{days}d {hours % 24:02d}h"
