"""Step folders: parameters, optimizer, position in the data, config and tokenizer of one step.

    checkpoints/<step>/params      orbax, the arrays of model.Params
    checkpoints/<step>/optimizer   orbax, the optax state (absent where only weights were imported)
    checkpoints/<step>/run         run.json: step, position in the data, config
    checkpoints/<step>/tokenizer   tokenizer.json or tokenizer.model (absent where a checkpoint
                                   without one was imported)

A step folder appears whole, by one rename, or not at all.
"""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from fixbin_jax.config import Config
from fixbin_jax.config_dict import from_mapping, to_mapping
from fixbin_jax.data.tokenizers import Tokenizer, load_tokenizer
from fixbin_jax.errors import CommandError, UserError
from fixbin_jax.model import Params
from fixbin_jax.step import State

T = TypeVar("T")

FOLDER = "checkpoints"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Record:
    """What a step folder says of itself.

    Attributes:
      step: updates made.
      data: the position in the data, as the pipeline gave it; None for imported weights.
      config: the run's config.
    """

    step: int
    data: Mapping[str, Any] | None
    config: Config


class _FilesHandler(ocp.AsyncCheckpointHandler):
    """An item whose files one process writes, in the background like the arrays."""

    async def async_save(self, directory: Any, args: "_FilesSave") -> list[ocp.future.Future]:
        async def write() -> None:
            self.save(directory, args)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="files")]

    def save(self, directory: Any, args: "_FilesSave") -> None:
        if jax.process_index() == 0:
            args.write(Path(directory))

    def restore(self, directory: Any, args: Any = None) -> None:
        raise TypeError("read the files of a step folder directly")


@ocp.args.register_with_handler(_FilesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _FilesSave(ocp.args.CheckpointArgs):
    write: Callable[[Path], None]


class Checkpoints:
    """Writes the step folders of a run, in the background, keeping the newest few.

    Use as a context: leaving it waits for the last save.
    """

    def __init__(self, workdir: Path, keep: int) -> None:
        # orbax takes no relative path.
        self._folder = workdir.absolute() / FOLDER
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_names=("params", "optimizer", "run", "tokenizer"),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                cleanup_tmp_directories=True,
                enable_background_delete=True,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def path(self, step: int) -> Path:
        """Where a step is or will be."""
        return self._folder / str(step)

    def save(
        self,
        state: State,
        data: Mapping[str, Any] | None,
        config: Config,
        tokenizer: Tokenizer | None,
    ) -> Path:
        """Copies the state and returns; writing goes on in the background.

        Returns:
          The step folder that will appear.

        Raises:
          CommandError: this save cannot begin, or the one before it failed.
        """
        step = int(state.step)
        path = self.path(step)
        # orbax drops such a save and says nothing.
        newest = self._manager.latest_step()
        if newest is not None and step <= newest:
            raise CommandError(f"{path}: not saved, step {newest} is there already")
        record = {"step": step, "data": data, "config": to_mapping(config)}

        def write_record(directory: Path) -> None:
            (directory / "run.json").write_text(json.dumps(record, indent=2))

        items = {
            "params": ocp.args.StandardSave(state.params),
            "run": _FilesSave(write_record),
        }
        if tokenizer is not None:
            items["tokenizer"] = _FilesSave(tokenizer.save)
        if state.optimizer is not None:
            items["optimizer"] = ocp.args.StandardSave(state.optimizer)
        with _named_failure(path):
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        return path

    def check(self) -> None:
        """Raises CommandError where a save in the background has failed."""
        with _named_failure(self._folder):
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Returns when all is written; raises CommandError where it could not be."""
        with _named_failure(self._folder):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()


@contextlib.contextmanager
def _named_failure(path: Path) -> Iterator[None]:
    """Turns what orbax and the file system raise into one line that names the folder."""
    try:
        yield
    except Exception as error:
        raise CommandError(f"{path}: saving failed: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    if isinstance(error, CommandError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def step_folders(path: Path) -> list[Path]:
    """The complete step folders of a run folder, newest first."""
    folder = path / FOLDER
    if not folder.is_dir():
        return []
    steps = [p for p in folder.iterdir() if p.name.isdigit() and p.is_dir()]
    return sorted(steps, key=lambda p: int(p.name), reverse=True)


def open_newest(path: str | Path, read: Callable[[Path], T]) -> tuple[Path, T] | None:
    """`read` of the newest step folder that can be read; None where a run folder has no step.

    Args:
      path: a run folder or one step folder.
      read: reads what is needed from a step folder.

    Raises:
      UserError: there is no such folder, the step folder asked for cannot be read, or none of
        several can. A broken step folder is named in a warning before an older one is tried.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; expected a run folder or a step folder")
    folders = [path] if (path / "run").is_dir() else step_folders(path)
    failure: Exception | None = None
    for folder in folders:
        try:
            return folder, read(folder)
        # Whatever a torn file makes orbax, tensorstore or json raise.
        except Exception as error:
            failure = error
            if folder != folders[-1]:
                log.warning("%s: broken, skipped (%s)", folder, _first_line(error))
    if failure is not None:
        raise UserError(f"{folders[-1]}: cannot be read ({_first_line(failure)})")
    return None


def set_aside_newer(folder: Path) -> None:
    """Moves step folders newer than this one to `broken/` in the run folder, to be looked at.

    They could not be read, and stand where a run that goes on from this one will write.
    """
    aside = folder.parent.with_name("broken")
    for newer in step_folders(folder.parent.parent):
        if int(newer.name) > int(folder.name):
            aside.mkdir(exist_ok=True)
            number = len(list(aside.iterdir()))
            newer.rename(aside / f"{newer.name}-{number}")


def read_record(folder: Path) -> Record:
    """The step, data position and config of a step folder."""
    path = folder / "run" / "run.json"
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    return Record(found["step"], found["data"], from_mapping(Config, found["config"]))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a step folder.

    Raises:
      UserError: it has none that can be read.
    """
    if not (folder / "tokenizer").is_dir():
        raise UserError(f"{folder}: holds no tokenizer; it was imported from a folder without one")
    return load_tokenizer(str(folder / "tokenizer"))


def read_parameter(folder: Path, name: str) -> np.ndarray:
    """One parameter of a step folder by its dotted name, in host memory; no other is read."""
    *groups, leaf = name.split(".")
    wanted: Any = {leaf: 0}
    how: Any = {leaf: ocp.RestoreArgs(restore_type=np.ndarray)}
    for group in reversed(groups):
        wanted, how = {group: wanted}, {group: how}
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(
            folder / "params",
            args=ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True),
        )
    (array,) = jax.tree.leaves(found)
    return array


def read_params(folder: Path, shapes: Params) -> Params:
    """The parameters of a step folder, placed as `shapes` (jax.ShapeDtypeStruct) say."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "params", shapes)


def read_state(folder: Path, shapes: State) -> State:
    """The whole state of a step folder, placed as `shapes` (jax.ShapeDtypeStruct) say."""
    params = read_params(folder, shapes.params)
    with ocp.StandardCheckpointer() as checkpointer:
        optimizer = checkpointer.restore(folder / "optimizer", shapes.optimizer)
    step = jax.device_put(jax.numpy.int32(read_record(folder).step), shapes.step.sharding)
    return State(step, params, optimizer)
