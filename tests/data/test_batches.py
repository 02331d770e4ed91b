import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixbin_jax.data.batches import held_out_batches, shuffled_windows, training_batches
from fixbin_jax.data.corpus import TokenStream
from fixbin_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def stream(size: int, dtype=np.uint16) -> TokenStream:
    """A stream whose every id is its own position, so that a window tells where it is from."""
    return TokenStream(np.arange(size, dtype=dtype), 1, size)


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    taken = [next(batches) for _ in range(count)]
    batches.close()
    return taken


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys() == {"ids", "targets", "mask"}
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key])


def joined(parts):
    """The global batches from those of every process."""
    return [{key: np.concatenate([part[key] for part in row]) for key in row[0]} for row in parts]


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(0, 8))
def test_every_epoch_has_every_window_once(windows, context, seed, rest):
    size = windows * context + 1 + min(rest, context - 1)
    dataset = shuffled_windows(np.arange(size), context, seed)
    epochs = np.array([[dataset[e * windows + i] for i in range(windows)] for e in range(4)])
    starts = epochs[:, :, 0]
    in_stream_order = np.arange(windows) * context
    np.testing.assert_array_equal(np.sort(starts), np.tile(in_stream_order, (4, 1)))
    np.testing.assert_array_equal(epochs, starts[:, :, None] + np.arange(context + 1))


def test_epochs_and_seeds_have_orders_of_their_own():
    datasets = [shuffled_windows(np.arange(501), 5, seed) for seed in (0, 10, 20)]
    orders = [
        tuple(int(dataset[i][0]) for i in range(e, e + 100))
        for dataset in datasets
        for e in (0, 100, 200)
    ]
    assert len({tuple(range(0, 500, 5)), *orders}) == 10


def test_batches_are_the_windows_in_turn_across_epochs():
    windows = shuffled_windows(stream(100).ids, 8, seed=3)
    batches = take(training_batches(stream(100), 8, batch_size=5, seed=3), 12)
    rows = [row for batch in batches for row in batch["ids"]]
    np.testing.assert_array_equal(rows, [windows[i][:-1] for i in range(60)])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_targets_are_the_next_ids_and_all_count(dtype):
    for batch in take(training_batches(stream(100, dtype), 8, batch_size=4, seed=0), 5):
        np.testing.assert_array_equal(batch["targets"], batch["ids"] + 1)
        assert batch["ids"].dtype == batch["targets"].dtype == np.int32
        assert batch["mask"].dtype == bool
        assert batch["mask"].all()
        assert {value.shape for value in batch.values()} == {(4, 8)}


def test_batches_do_not_depend_on_the_number_of_threads():
    first = take(training_batches(stream(300), 8, 4, 0, read_threads=0), 40)
    for threads in (1, 2, 3):
        batches = training_batches(stream(300), 8, 4, 0, read_threads=threads)
        assert_same(take(batches, 40), first)


# Hundreds of windows: grain takes longer to shuffle few, about 5 ms / windows for each row.
@settings(max_examples=20)
@given(
    size=st.integers(400, 900),
    context=st.integers(1, 3),
    batch_size=st.integers(1, 11),
    stops=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    threads=st.integers(0, 2),
)
def test_a_run_that_stops_anywhere_goes_on_as_one_that_never_did(
    size, context, batch_size, stops, threads
):
    arguments = (stream(size), context, batch_size, 7)
    undisturbed = take(training_batches(*arguments), sum(stops) + 20)
    taken, state = [], None
    for stop in [*stops, 20]:
        batches = training_batches(*arguments, read_threads=threads)
        if state is not None:
            batches.restore(json.loads(json.dumps(state)))
        taken += [next(batches) for _ in range(stop)]
        state = batches.state()
        batches.close()
    assert_same(taken, undisturbed)


def test_a_stop_at_an_epochs_end_begins_the_next_epoch():
    batches = training_batches(stream(81), 8, batch_size=5, seed=0)
    take(batches, 2)
    resumed = training_batches(stream(81), 8, batch_size=5, seed=0)
    resumed.restore(batches.state())
    starts = sorted(int(row[0]) for batch in take(resumed, 2) for row in batch["ids"])
    assert starts == list(range(0, 80, 8))


def test_the_position_is_that_of_the_last_batch_taken_not_of_those_read_ahead():
    batches = training_batches(stream(300), 8, batch_size=4, seed=0)
    assert batches.state()["next_batch"] == 0
    for taken in range(1, 4):
        next(batches)
        assert batches.state()["next_batch"] == taken
    batches.close()


def test_restoring_goes_back_as_well():
    batches = training_batches(stream(300), 8, batch_size=4, seed=0)
    start = batches.state()
    first = [next(batches) for _ in range(5)]
    batches.restore(start)
    assert_same(take(batches, 5), first)


def test_a_far_position_needs_no_replay():
    batches = training_batches(stream(300), 8, batch_size=4, seed=0)
    batches.restore({**batches.state(), "next_batch": 10**9})
    windows = shuffled_windows(stream(300).ids, 8, seed=0)
    np.testing.assert_array_equal(take(batches, 1)[0]["ids"][1], windows[4 * 10**9 + 1][:-1])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch_size": 8}, "batch_size 4 there, 8 here"),
        ({"context": 9}, "context 8 there, 9 here"),
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"stream": stream(301)}, "stream '"),
    ],
)
def test_a_position_on_other_data_or_settings_is_refused(changed, words):
    arguments = {"stream": stream(300), "context": 8, "batch_size": 4, "seed": 0}
    saved = training_batches(**arguments).state()
    with pytest.raises(UserError, match=words):
        training_batches(**{**arguments, **changed}).restore(saved)


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_the_rows_of_all_processes_are_the_global_batch(processes):
    def training(**process):
        return take(training_batches(stream(300), 8, 6, 0, **process), 15)

    def held_out(**process):
        return list(held_out_batches(stream(300).ids, 8, 6, **process))

    for batches in (training, held_out):
        parts = [
            batches(process_index=index, process_count=processes) for index in range(processes)
        ]
        assert parts[0][0]["ids"].shape == (6 // processes, 8)
        assert_same(joined(zip(*parts, strict=True)), batches())


def test_a_position_serves_another_number_of_processes():
    whole = training_batches(stream(300), 8, 6, 0)
    take(whole, 7)
    half = training_batches(stream(300), 8, 6, 0, process_index=1, process_count=2)
    half.restore(whole.state())
    whole.restore(whole.state())
    for one, other in zip(take(half, 5), take(whole, 5), strict=True):
        np.testing.assert_array_equal(one["ids"], other["ids"][3:])


@pytest.mark.parametrize(("batch_size", "processes"), [(4, 3), (0, 1), (-2, 1)])
def test_a_batch_the_processes_do_not_divide_is_refused(batch_size, processes):
    words = f"batch_size: found {batch_size}, expected a positive multiple of the {processes}"
    with pytest.raises(UserError, match=words):
        training_batches(stream(300), 8, batch_size, 0, process_count=processes)
    with pytest.raises(UserError, match=words):
        next(held_out_batches(stream(300).ids, 8, batch_size, process_count=processes))


def test_a_stream_shorter_than_a_window_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"8 ids, expected at least 9 "):
        training_batches(stream(8), 8, 1, 0)
    np.testing.assert_array_equal(
        take(training_batches(stream(9), 8, 1, 0), 3)[2]["ids"], [range(8)]
    )


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(UserError, match=f"data seed: found {seed}"):
        training_batches(stream(300), 8, 4, seed)


def test_a_stream_may_lie_on_disk(tmp_path):
    np.save(tmp_path / "ids.npy", stream(300).ids)
    mapped = TokenStream(np.load(tmp_path / "ids.npy", mmap_mode="r"), 1, 300)
    one, other = (take(training_batches(ids, 8, 4, 0), 9) for ids in (mapped, stream(300)))
    assert_same(one, other)


@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 6))
def test_held_out_batches_score_every_target_once_in_one_shape(size, context, batch_size):
    ids = stream(size).ids + np.uint16(1)
    batches = list(held_out_batches(ids, context, batch_size))
    scored = [batch["targets"][batch["mask"]] for batch in batches]
    np.testing.assert_array_equal(np.concatenate([*scored, []]), ids[1:])
    for batch in batches:
        assert {value.shape for value in batch.values()} == {(batch_size, context)}
        assert [batch[key].dtype for key in ("ids", "targets", "mask")] == [np.int32] * 2 + [bool]
        assert batch["mask"].any()
        mask = batch["mask"]
        np.testing.assert_array_equal(batch["ids"][mask] + 1, batch["targets"][mask])
        assert not batch["targets"][~mask].any()


def test_held_out_batches_can_be_limited():
    ids = stream(200).ids
    every = list(held_out_batches(ids, 8, 4))
    assert len(every) == 7
    assert_same(list(held_out_batches(ids, 8, 4, max_batches=2)), every[:2])
    assert_same(list(held_out_batches(ids, 8, 4, max_batches=50)), every)
    assert list(held_out_batches(ids, 8, 4, max_batches=0)) == []


def test_a_plain_script_reads_batches_with_no_absl_app_running():
    script = (
        "import numpy as np\n"
        "from fixbin_jax.data.batches import training_batches\n"
        "from fixbin_jax.data.corpus import TokenStream\n"
        "batches = training_batches(TokenStream(np.arange(99), 1, 99), 8, 4, 0)\n"
        "print(sum(int(next(batches)['mask'].sum()) for _ in range(5)))\n"
    )
    # orbax 0.12 names it as it is imported; jax 0.12 deprecates it.
    named = "ignore:jax.sharding.SingleDeviceSharding is deprecated:DeprecationWarning"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", named, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "160\n", "")
