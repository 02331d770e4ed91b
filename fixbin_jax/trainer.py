"""The training loop: batches into updates, evaluation and saving at intervals, safe stops.

A run starts from the first of these that exists: the newest complete step of its own folder, the
checkpoint that config.train.init_from names, parameters drawn from config.train.seed.
"""

import contextlib
import json
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from fixbin_jax import checkpoint
from fixbin_jax.checkpoint import Checkpoints, Record
from fixbin_jax.config import Config
from fixbin_jax.config_dict import changes, to_mapping
from fixbin_jax.curve import write_loss_curve
from fixbin_jax.data.batches import TrainingBatches, held_out_batches, training_batches
from fixbin_jax.data.corpus import (
    BY_DOCUMENT_HASH,
    BY_EVAL_SOURCE,
    BY_TAIL,
    Corpus,
    read_corpus,
    unigram_entropy,
)
from fixbin_jax.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer
from fixbin_jax.errors import Diverged, Terminated, UserError
from fixbin_jax.generate import Generator, Sampling, TextStream, encode_prompt
from fixbin_jax.metrics import (
    MetricsWriter,
    Progress,
    format_count,
    peak_flops,
    read_metrics,
)
from fixbin_jax.model import Params
from fixbin_jax.sharding import Placement, check_divisible, make_placement
from fixbin_jax.step import State, Step

# Of what the held-out tokens are.
_HELD_OUT = {
    BY_DOCUMENT_HASH: "in {documents}, by document hash",
    BY_TAIL: "at the end of the text",
    BY_EVAL_SOURCE: "in {documents} of config.data.eval_sources",
}


def train(config: Config, workdir: str | Path, change_config: bool = False) -> None:
    """Trains until config.train.num_steps, continuing what the run folder holds.

    Args:
      config: the run.
      workdir: the run folder; made if it is not there.
      change_config: go on in a folder that was used with another config.

    Raises:
      UserError: the config does not fit the devices, the data or the run folder.
      Diverged: the loss or the gradient is no longer finite; nothing of that step is saved.
      Terminated: SIGTERM came; the step it came in is saved.
    """
    workdir = Path(workdir).expanduser().absolute()
    _check_writable(workdir)
    with _sigterm() as terminated:
        place = make_placement(config.mesh)
        check_divisible(config, place)
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_vocabulary(tokenizer, config.model.vocab_size)
        sample_prompt = _sample_prompt(config, tokenizer)
        step = Step(config, place)
        state, position = _start(config, workdir, step, change_config)
        corpus = _read(config, tokenizer)
        batches = training_batches(
            corpus.train,
            config.model.context_length,
            config.train.batch_size,
            config.train.seed,
            read_threads=config.data.read_threads,
        )
        if position is not None:
            batches.restore(position)
        entropy = unigram_entropy(corpus.held_out.ids, config.model.vocab_size)
        _announce(config, place, step, tokenizer, corpus, entropy, int(state.step))
        _claim(workdir, config)
        with (
            contextlib.closing(batches),
            Checkpoints(workdir, config.checkpoint.keep) as checkpoints,
            MetricsWriter(
                workdir,
                resume_step=int(state.step) if position is not None else None,
                tensorboard=config.log.tensorboard,
            ) as writer,
        ):
            run = _Run(config, place, step, tokenizer, corpus, batches, checkpoints, writer)
            state = run.loop(state, terminated)
    _report(workdir, config, step, state, tokenizer, sample_prompt, entropy)


def _check_writable(workdir: Path) -> None:
    """Refuses a run folder that cannot be made or written, before anything is computed."""
    nearest = workdir
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise UserError(f"--workdir: {workdir}: {nearest} is a file, expected a folder")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"--workdir: {workdir}: {nearest} cannot be written")


def _start(
    config: Config, workdir: Path, step: Step, change_config: bool
) -> tuple[State, Mapping[str, Any] | None]:
    """The state to go on from, and its position in the data (None for a run that begins)."""

    def own_step(folder: Path) -> tuple[Record, list[str], State | None]:
        record = checkpoint.read_record(folder)
        checkpoint.read_tokenizer(folder)  # a torn one would be found only by who needs it
        refused = [] if change_config else changes(record.config, config)
        return record, refused, None if refused else checkpoint.read_state(folder, step.shapes)

    if workdir.is_dir():
        found = checkpoint.open_newest(workdir, own_step)
        if found is not None:
            folder, (record, refused, state) = found
            if state is None:
                raise UserError(
                    f"--workdir: {workdir} holds a run with another config ({'; '.join(refused)}); "
                    "name another folder, or go on in this one with --change_config"
                )
            checkpoint.set_aside_newer(folder)
            return state, record.data
    if config.train.init_from:
        return step.start_from(_initial_params(config, step)), None
    return step.init(config.train.seed), None


def _initial_params(config: Config, step: Step) -> Params:
    def read(folder: Path) -> Params | None:
        same = checkpoint.read_record(folder).config.model == config.model
        return checkpoint.read_params(folder, step.structure.shapes) if same else None

    found = checkpoint.open_newest(config.train.init_from, read)
    if found is None:
        raise UserError(f"config.train.init_from: {config.train.init_from} holds no complete step")
    folder, params = found
    if params is None:
        raise UserError(f"config.train.init_from: {folder} holds another model than config.model")
    return params


def _read(config: Config, tokenizer: Tokenizer) -> Corpus:
    data = config.data
    return read_corpus(
        data.sources,
        tokenizer,
        config.model.context_length,
        text_field=data.text_field,
        strict=data.strict,
        eval_source=data.eval_sources or None,
        eval_fraction=data.eval_fraction,
    )


def _claim(workdir: Path, config: Config) -> None:
    """Makes the run folder and writes what it is a run of."""
    workdir.mkdir(parents=True, exist_ok=True)
    temporary = workdir / "config.json.tmp"
    temporary.write_text(json.dumps(to_mapping(config), indent=2) + "\n")
    os.replace(temporary, workdir / "config.json")


def _announce(
    config: Config,
    place: Placement,
    step: Step,
    tokenizer: Tokenizer,
    corpus: Corpus,
    entropy: float,
    start: int,
) -> None:
    """Prints what is about to run."""
    model, data = config.model, config.data
    devices = place.mesh.devices.flat
    total, at_input = step.structure.count()
    tokens = config.train.batch_size * model.context_length
    parts = f" in {config.train.micro_batches} parts" if config.train.micro_batches > 1 else ""
    code = model.code
    interface = model.input.interface
    if code is not None:
        interface += f" code of {code.code_width} bits, {code.lift}"
    lost = corpus.lost_characters
    held_out = _HELD_OUT[corpus.split_rule].format(
        documents=_counted(corpus.held_out.documents, "document")
    )
    lines = {
        "devices": f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}",
        "mesh": " x ".join(f"{axis} {size}" for axis, size in place.mesh.shape.items()),
        "model": f"{model.num_layers} layers, width {model.width}, {model.num_heads} heads, "
        f"context {model.context_length}, vocabulary {model.vocab_size:,}, {config.compute.dtype}",
        "input": interface,
        "parameters": f"{total:,} in all, {total:,} trained, {at_input:,} at the input",
        "tokenizer": f"{data.tokenizer}, {tokenizer.vocab_size:,} ids"
        + (f", loses {lost:.2%} of the characters" if lost else ""),
        "data": f"{data.sources}: {format_count(corpus.train.ids.size)} tokens in "
        + _counted(corpus.train.documents, "document")
        + (f", {_counted(corpus.bad_records, 'bad record')} skipped" if corpus.bad_records else ""),
        "held out": f"{format_count(corpus.held_out.ids.size)} tokens {held_out}; "
        f"unigram entropy {entropy:.3f} nats per token",
        "step": f"{tokens:,} tokens{parts}, {config.train.num_steps:,} steps, "
        f"{tokens * config.train.num_steps / corpus.train.ids.size:.3g} epochs",
    }
    if start:
        lines["resume"] = f"step {start:,} of {config.train.num_steps:,}"
    for name, text in lines.items():
        print(f"{name:<11} {text}")
    print(flush=True)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


class _Run:
    """The loop of one run."""

    def __init__(
        self,
        config: Config,
        place: Placement,
        step: Step,
        tokenizer: Tokenizer,
        corpus: Corpus,
        batches: TrainingBatches,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
    ) -> None:
        self._config, self._place, self._step = config, place, step
        self._tokenizer, self._corpus, self._batches = tokenizer, corpus, batches
        self._checkpoints, self._writer = checkpoints, writer
        self._tokens = config.train.batch_size * config.model.context_length
        self._progress = Progress(
            config.train.num_steps,
            units_per_item=self._tokens,
            peak_rate=_peak_tokens_per_second(config, place, step),
        )
        self._saved: Path | None = None
        # (step, metrics) of the newest update: read only when the next is under way.
        self._unread: tuple[int, dict[str, jax.Array]] | None = None
        self._eval_loss: float | None = None

    def loop(self, state: State, terminated: threading.Event) -> State:
        """Updates until the last step; returns the last state, saved."""
        config, last = self._config, self._config.train.num_steps
        done = int(state.step)
        if done:
            self._saved = self._checkpoints.path(done)
        else:
            self._evaluate(state, 0)
        position = self._batches.state()
        batch = self._place.put_batch(next(self._batches)) if done < last else None
        with self._progress:
            while done < last and not terminated.is_set():
                state, metrics = self._step.update(state, batch)
                done += 1
                self._read_metrics()
                self._unread = (done, metrics)
                position = self._batches.state()
                if done < last:
                    # Placed while the update runs.
                    batch = self._place.put_batch(next(self._batches))
                if done % config.checkpoint.interval == 0 or done == last:
                    self._save(state, position)
                interval = config.train.eval_interval
                if done == last or (interval and done % interval == 0):
                    self._evaluate(state, done)
                self._checkpoints.check()
            self._read_metrics()
            if terminated.is_set() and done < last:
                if done and self._saved != self._checkpoints.path(done):
                    self._save(state, position)
                self._checkpoints.wait()
                raise Terminated(f"SIGTERM at step {done}: saved; the same command goes on there")
            self._checkpoints.wait()
        return state

    def _read_metrics(self) -> None:
        """Waits for the newest update's metrics, refuses what is not finite, tells the rest."""
        if self._unread is None:
            return
        step, found = self._unread
        self._unread = None
        metrics = {name: float(value) for name, value in jax.device_get(found).items()}
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                self._checkpoints.wait()
                last_good = f"the last good checkpoint is {self._saved}"
                raise Diverged(
                    f"step {step}: {name} is {metrics[name]}; "
                    + (last_good if self._saved else "there is no checkpoint before it")
                )
        fact = f"loss {metrics['loss']:.3f}"
        if self._eval_loss is not None:
            fact += f"  held-out {self._eval_loss:.3f}"
        self._progress.update(step, fact)
        if step % self._config.log.interval == 0 or step in (1, self._config.train.num_steps):
            if self._progress.rate is not None:
                metrics["tokens_per_second"] = self._progress.rate
            if self._progress.peak_share is not None:
                metrics["mfu"] = self._progress.peak_share
            self._writer.write(step, metrics)

    def _save(self, state: State, position: dict[str, Any]) -> None:
        with self._progress.pause():
            # Nothing that is not finite is saved.
            self._read_metrics()
            self._saved = self._checkpoints.save(state, position, self._config, self._tokenizer)

    def _evaluate(self, state: State, step: int) -> None:
        with self._progress.pause():
            self._read_metrics()
            config = self._config
            sums = [
                self._step.evaluate(state.params, self._place.put_batch(batch))
                for batch in held_out_batches(
                    self._corpus.held_out.ids,
                    config.model.context_length,
                    config.train.batch_size // config.train.micro_batches,
                    max_batches=config.train.eval_batches or None,
                )
            ]
            loss_sum, targets = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
            self._eval_loss = loss_sum / targets
            self._writer.write(step, {"eval_loss": self._eval_loss, "eval_tokens": int(targets)})
            self._progress.note(
                f"step {step}: held-out loss {self._eval_loss:.4f} nats per token "
                f"({format_count(targets)} tokens)"
            )


def _peak_tokens_per_second(config: Config, place: Placement, step: Step) -> float | None:
    """Tokens a second at which the devices would do nothing but the model's own operations."""
    device = place.mesh.devices.flat[0]
    peak = peak_flops(device.device_kind, config.compute.dtype)
    if peak is None:
        return None
    return peak * place.mesh.devices.size / step.structure.flops_per_token()


@contextlib.contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets while the context lasts, in the main thread."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def note(signum: int, frame: FrameType | None) -> None:
        event.set()

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)


def _sample_prompt(config: Config, tokenizer: Tokenizer) -> np.ndarray:
    prompt = encode_prompt(tokenizer, config.sample.prompt)
    if len(prompt) >= config.model.context_length:
        raise UserError(
            f"config.sample.prompt: {len(prompt)} ids leave no room in the model's context of "
            f"{config.model.context_length}"
        )
    return prompt


def _report(
    workdir: Path,
    config: Config,
    step: Step,
    state: State,
    tokenizer: Tokenizer,
    prompt: np.ndarray,
    entropy: float,
) -> None:
    """What a finished run leaves behind: a sample, the curve, and where things are."""
    if config.sample.max_new_tokens:
        generator = Generator(
            step.structure, state.params, tokenizer.vocab_size, tokenizer.end_of_text_id
        )
        room = config.model.context_length - len(prompt)
        sampling = Sampling(config.sample.temperature, seed=config.train.seed)
        stream = TextStream(tokenizer, prompt)
        print(f"\nsample\n------\n{config.sample.prompt}", end="", flush=True)
        for (ids,) in generator([prompt], min(config.sample.max_new_tokens, room), sampling):
            print(stream.add(ids), end="", flush=True)
        print(stream.add(np.array([], int), last=True), end="\n------\n\n")
    metrics, curve = workdir / "metrics.jsonl", workdir / "loss.png"
    held_out = [record["eval_loss"] for record in read_metrics(metrics) if "eval_loss" in record]
    print(
        f"held out    {held_out[0]:.3f} at first, {held_out[-1]:.3f} at last "
        f"({held_out[-1] / held_out[0]:.3f} of it), unigram entropy {entropy:.3f}"
    )
    try:
        write_loss_curve(metrics, curve, entropy)
    except UserError as error:
        print(f"curve       none: {error}")
    else:
        print(f"curve       {_shown(curve)}")
    print(f"checkpoint  {_shown(checkpoint.step_folders(workdir)[0])}")


def _shown(path: Path) -> Path:
    """A path as a person would write it from here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
