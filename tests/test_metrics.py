import io
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixbin_jax.metrics import (
    MetricsWriter,
    Progress,
    format_count,
    format_duration,
    peak_flops,
    read_metrics,
)

# Peaks.


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("TPU v4i", None),
        ("TPU v3", None),
        ("cpu", None),
    ],
)
def test_peak_is_that_of_the_device_and_not_of_one_with_a_similar_name(kind, peak):
    assert peak_flops(kind, "bfloat16") == peak
    assert peak_flops(kind, "float32") is None


# metrics.jsonl.


def lines(workdir: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (workdir / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write(workdir: Path, resume_step: int | None, steps: range) -> None:
    with MetricsWriter(workdir, resume_step=resume_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, {"loss": 1 / (step + 3)})


def test_a_line_is_in_the_file_when_write_returns(tmp_path):
    writer = MetricsWriter(tmp_path / "a" / "b", resume_step=None, tensorboard=False)
    writer.write(3, {"loss": np.float32(0.1), "tokens": 7})
    assert lines(tmp_path / "a" / "b") == [{"step": 3, "loss": float(np.float32(0.1)), "tokens": 7}]
    writer.close()


def test_values_that_are_not_finite_are_null_so_that_each_line_is_strict_json(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "a": -math.inf, "b": 2.0})
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "a": None, "b": 2.0}]


@given(saved=st.integers(0, 12), killed=st.integers(0, 12), torn=st.integers(0, 40))
def test_a_killed_and_resumed_run_has_the_lines_of_an_undisturbed_one(
    tmp_path_factory, saved, killed, torn
):
    """Killed after `killed` steps while writing the next line, resumed from step `saved`."""
    whole, resumed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resumed")
    saved = min(saved, killed)
    write(whole, None, range(1, 13))
    write(resumed, None, range(1, killed + 1))
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": killed + 1, "loss": 0.123456789})[:torn])
    write(resumed, saved, range(saved + 1, 13))
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [p.name for p in resumed.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_keeps_no_line_not_even_of_step_0(tmp_path):
    write(tmp_path, None, range(5))
    write(tmp_path, None, range(2))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


def test_reading_leaves_out_what_is_no_line_of_ours(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_bytes(b'{"step": 1}\n\n[1]\n{"loss": 2}\n{"step": "3"}\n\xff\x00\n{"step": 4}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 4}]


def test_tensorboard_holds_the_values_and_purges_the_steps_that_are_run_again(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with MetricsWriter(tmp_path, resume_step=4, tensorboard=True) as writer:
        writer.write(5, {"loss": 2.5})
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, events = path.read_bytes(), []
    while data:
        # A TFRecord is a length, its checksum, the event, its checksum.
        (size,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert scalars == [(5, "loss", 2.5)]
    assert [e.step for e in events if e.HasField("session_log")] == [5]


def test_without_tensorboardx_one_line_says_so_and_the_run_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=True) as writer:
        writer.write(1, {"loss": 1.0})
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "fixbin-jax[plot]" in err
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


# The progress line.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def steps(progress: Progress, clock: Clock, first: int, last: int, seconds: float) -> None:
    for step in range(first, last + 1):
        clock.now += seconds
        progress.update(step, f"loss {10 - step:.3f}")


def test_the_line_shows_step_percent_loss_rate_share_and_time_left():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(
        200, units_per_item=1000, peak_rate=8000, stream=stream, interval_seconds=4, clock=clock
    )
    steps(progress, clock, 1, 9, 0.5)
    assert stream.getvalue().splitlines() == [
        "step 1/200   0.5%  loss 9.000",
        "step 9/200   4.5%  loss 1.000  2.0k tokens/s  25.0% of peak  left 1m 36s",
    ]
    assert (progress.rate, progress.peak_share) == (2000.0, 0.25)


def test_without_a_known_peak_the_line_has_no_share():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(2, label="file", unit="documents", stream=stream, clock=clock)
    steps(progress, clock, 1, 2, 4.0)
    assert stream.getvalue().splitlines()[-1] == (
        "file 2/2  100.0%  loss 8.000  0.25 documents/s  left 0s"
    )
    assert progress.peak_share is None


def test_compiling_pausing_and_the_distant_past_do_not_count_in_the_rate():
    clock = Clock()
    progress = Progress(10_000, stream=io.StringIO(), clock=clock)
    steps(progress, clock, 1, 1, 77.0)
    assert progress.rate is None
    steps(progress, clock, 2, 100, 1.0)
    assert progress.rate == pytest.approx(1.0)
    with progress.pause():
        clock.now += 1000
    steps(progress, clock, 101, 110, 1.0)
    assert progress.rate == pytest.approx(1.0)
    steps(progress, clock, 111, 180, 0.5)
    assert progress.rate == pytest.approx(2.0)


def test_a_pause_that_fails_ends_all_the_same():
    clock = Clock()
    progress = Progress(100, stream=io.StringIO(), clock=clock)
    steps(progress, clock, 1, 2, 1.0)
    with pytest.raises(KeyError), progress.pause():
        clock.now += 50
        raise KeyError
    steps(progress, clock, 3, 3, 1.0)
    assert progress.rate == pytest.approx(1.0)


halves = st.integers(1, 40).map(lambda n: n / 2)


@given(
    items=st.lists(st.tuples(halves, st.integers(1, 5), st.just(0) | halves), min_size=2),
    scale=st.floats(0.5, 1000),
)
def test_rate_times_active_time_is_what_was_done_in_the_last_half_minute(items, scale):
    clock, done, active, marks = Clock(), 0, 0.0, []
    progress = Progress(10**6, units_per_item=scale, stream=io.StringIO(), clock=clock)
    for seconds, count, pause_seconds in items:
        with progress.pause():
            clock.now += pause_seconds
        clock.now += seconds
        active += seconds
        done += count
        progress.update(done)
        marks.append((active, done))
    start, before = max((m for m in marks[:-1] if m[0] <= active - 30), default=marks[0])
    assert progress.rate == pytest.approx(scale * (done - before) / (active - start))


def test_a_stream_that_is_no_terminal_gets_whole_lines_at_intervals_and_the_last():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(25, stream=stream, interval_seconds=10, clock=clock)
    steps(progress, clock, 1, 25, 1.0)
    progress.close()
    text = stream.getvalue()
    assert "\r" not in text and "\x1b" not in text
    shown = [line.split("  ")[0] for line in text.splitlines()]
    assert shown == ["step 1/25", "step 11/25", "step 21/25", "step 25/25"]


def test_a_terminal_gets_one_line_written_over_and_over(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    clock, stream = Clock(), Terminal()
    with Progress(3, stream=stream, clock=clock) as progress:
        steps(progress, clock, 1, 2, 1.0)
        clock.now += 0.01
        progress.note("step 2: held-out loss 3.0")
        progress.note("saved")
        steps(progress, clock, 3, 3, 1.0)
    drawn = stream.getvalue().split("\r\x1b[K")
    assert drawn[0] == ""
    assert drawn[1] == "step 1/3  33.3%  loss 9.000"
    assert drawn[2] == "step 2/3  66.7%  loss 8.000  1 tokens/s  left 1s"[:29]
    assert drawn[3] == "step 2: held-out loss 3.0\nsaved\n"
    assert drawn[4] == "step 3/3  100.0%  loss 7.000  1 tokens/s"[:29] + "\n"
    assert len(drawn) == 5


def test_a_terminal_is_not_redrawn_for_each_of_many_fast_steps():
    clock, stream = Clock(), Terminal()
    progress = Progress(10_000, stream=stream, clock=clock)
    steps(progress, clock, 1, 1000, 0.001)
    assert stream.getvalue().count("\r") <= 11


def test_closing_without_a_line_prints_nothing():
    stream = Terminal()
    Progress(3, stream=stream).close()
    assert stream.getvalue() == ""


# Numbers as people read them.


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (999, "999"),
        (999.6, "1.0k"),
        (1000, "1.0k"),
        (12_345, "12.3k"),
        (999_949, "999.9k"),
        (999_960, "1.0M"),
        (536_870_912, "536.9M"),
        (17e9, "17.0B"),
        (2.5e15, "2500.0T"),
    ],
)
def test_counts(number, text):
    assert format_count(number) == text


@given(st.integers(0, 10**15))
def test_a_count_is_told_within_half_a_tenth_of_its_unit(number):
    text = format_count(number)
    unit = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1)
    shown = float(text.rstrip("kMBT"))
    assert shown < 1000 or unit == 1e12
    assert abs(shown * unit - number) <= 0.0500001 * unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (151, "2m 31s"),
        (3599.6, "1h 00m"),
        (3900, "1h 05m"),
        (86_399, "23h 59m"),
        (273_600, "3d 04h"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
