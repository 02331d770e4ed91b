"""Batches from streams of ids: endless shuffled ones for training, finite ones held out.

A batch is a dict of numpy arrays: `ids` int32 [B, L], the input; `targets` int32 [B, L], the id
that follows each; `mask` bool [B, L], which targets count.

With several processes each gets its own contiguous rows of every global batch: process p of P the
rows from p * B / P.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np

from fixbin_jax.data.corpus import TokenStream
from fixbin_jax.errors import UserError

Batch = dict[str, np.ndarray]


class _Windows:
    """Window i of a stream is its ids from i * L to i * L + L inclusive: L inputs, L targets."""

    def __init__(self, ids: np.ndarray, context: int):
        self._ids = ids
        self._context = context

    def __len__(self) -> int:
        return max(0, self._ids.size - 1) // self._context

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._context
        return self._ids[start : start + self._context + 1]


def shuffled_windows(ids: np.ndarray, context: int, seed: int) -> grain.MapDataset:
    """Endless windows [L + 1] of a stream: epoch after epoch, each window once an epoch.

    Element i is a function of the arguments and i. grain orders epoch e by `seed` + e.

    Args:
      ids: [N], a stream; an array in memory or on disk.
      context: L.
      seed: from 0 to 2**32 - 1.

    Raises:
      UserError: if the stream is shorter than one window, or the seed out of range.
    """
    if ids.size < context + 1:
        raise UserError(
            f"training stream: {ids.size} ids, expected at least {context + 1} for one window of "
            f"context {context} + 1"
        )
    if not 0 <= seed < 2**32:
        raise UserError(f"data seed: found {seed}, expected 0 to {2**32 - 1}")
    return grain.MapDataset.source(_Windows(ids, context)).shuffle(seed).repeat()


class TrainingBatches(Iterator[Batch]):
    """Endless training batches, read ahead by threads; the position is one integer.

    Batch n is a function of the windows, the batch size and n alone, whatever the number of
    processes and threads.
    """

    def __init__(
        self,
        windows: grain.MapDataset,
        batch_size: int,
        identity: Mapping[str, Any],
        *,
        process_index: int = 0,
        process_count: int = 1,
        read_threads: int = 2,
    ):
        """Starts at batch 0.

        Args:
          windows: endless windows [L + 1], see `shuffled_windows`.
          batch_size: B, the rows of the global batch.
          identity: what determines the windows, as JSON values; `restore` refuses another.
          process_index: which rows to give, see the module.
          process_count: how many processes share a global batch.
          read_threads: how many threads read ahead; 0 reads when asked.

        Raises:
          UserError: if the processes do not divide the batch.
        """
        rows = _rows_per_process(batch_size, process_count)
        self._identity = {"batch_size": batch_size, **identity}
        # Endless windows have no remainder; without drop_remainder grain rounds their length up
        # through a float, past what len() can hold.
        chunks = windows.batch(rows, drop_remainder=True)
        self._batches = chunks[process_index::process_count].map(_training_batch)
        self._read_options = grain.ReadOptions(
            num_threads=read_threads, prefetch_buffer_size=2 * read_threads
        )
        self._start(0)

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._next_batch += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The position as JSON values: the index of the next batch, and what determines it."""
        return {"next_batch": self._next_batch, **self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at a position taken by `state`, in this process or another.

        Raises:
          UserError: if the position was taken on other data or settings.
        """
        changed = [
            f"{key} {state.get(key)!r} there, {here!r} here"
            for key, here in self._identity.items()
            if state.get(key) != here
        ]
        if changed:
            raise UserError(
                f"data position: saved by a run with other data or settings ({'; '.join(changed)})"
                ", expected the same"
            )
        self.close()
        self._start(state["next_batch"])

    def close(self) -> None:
        """Stops reading ahead."""
        self._iterator.close()

    def _start(self, next_batch: int) -> None:
        self._next_batch = next_batch
        self._iterator = iter(self._batches[next_batch:].to_iter_dataset(self._read_options))


def training_batches(
    stream: TokenStream,
    context: int,
    batch_size: int,
    seed: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    read_threads: int = 2,
) -> TrainingBatches:
    """Training batches over the shuffled windows of one stream.

    The arguments are those of `shuffled_windows` and `TrainingBatches`, as is what is raised.
    """
    return TrainingBatches(
        shuffled_windows(stream.ids, context, seed),
        batch_size,
        {"context": context, "seed": seed, "stream": stream.fingerprint},
        process_index=process_index,
        process_count=process_count,
        read_threads=read_threads,
    )


def held_out_batches(
    ids: np.ndarray,
    context: int,
    batch_size: int,
    *,
    max_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Yields the batches that score every target of a stream, `ids[1:]`, exactly once, in order.

    All have the same shape: the last window is padded with id 0, the last batch with rows of it,
    and the mask is false there. Every process gets the same number of batches.

    Args:
      ids: [N], a stream.
      context: L.
      batch_size: B, the rows of the global batch.
      max_batches: stops after so many; None for all.
      process_index: which rows to give, see the module.
      process_count: how many processes share a global batch.

    Raises:
      UserError: if the processes do not divide the batch.
    """
    rows = _rows_per_process(batch_size, process_count)
    batches = -(-max(0, ids.size - 1) // (batch_size * context))
    if max_batches is not None:
        batches = min(batches, max_batches)
    size = rows * context
    for index in range(batches):
        start = (index * process_count + process_index) * size
        span = ids[start : start + size + 1]
        flat = np.zeros(size + 1, np.int32)
        flat[: span.size] = span
        mask = np.arange(1, size + 1) < span.size
        yield {
            "ids": flat[:-1].reshape(rows, context),
            "targets": flat[1:].reshape(rows, context),
            "mask": mask.reshape(rows, context),
        }


def _rows_per_process(batch_size: int, process_count: int) -> int:
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f"batch_size: found {batch_size}, expected a positive multiple of the "
            f"{process_count} processes"
        )
    return batch_size // process_count


def _training_batch(windows_BxW: np.ndarray) -> Batch:
    windows_BxW = windows_BxW.astype(np.int32)
    ids_BxL, targets_BxL = windows_BxW[:, :-1], windows_BxW[:, 1:]
    return {"ids": ids_BxL, "targets": targets_BxL, "mask": np.ones(targets_BxL.shape, bool)}
