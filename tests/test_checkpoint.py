import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from fixbin_jax import checkpoint
from fixbin_jax.checkpoint import Checkpoints
from fixbin_jax.data.tokenizers import Tokenizer, unicode_tokenizer
from fixbin_jax.errors import CommandError, UserError
from fixbin_jax.step import State, Step
from tests import tiny

CONFIG = tiny.change(tiny.CONFIG, model={"input": tiny.INPUTS["learned"]})
POSITION = {"next_batch": 3, "seed": 0}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return unicode_tokenizer()


@functools.cache
def step_on(data: int, fsdp: int, tensor: int) -> Step:
    return Step(CONFIG, tiny.placement(data, fsdp, tensor))


def trained(step: Step, updates: int) -> State:
    """A state in which nothing is zero any more."""
    state = step.init(0)
    for i in range(updates):
        state, _ = step.update(state, step._place.put_batch(tiny.batch(CONFIG, i)))
    return state


def assert_equal(a: object, b: object) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def save(workdir: Path, states: list[State], tokenizer: Tokenizer, keep: int = 3) -> None:
    with Checkpoints(workdir, keep) as checkpoints:
        for state in states:
            checkpoints.save(state, POSITION, CONFIG, tokenizer)
        checkpoints.wait()


def test_a_state_saved_on_one_mesh_is_the_same_on_any_other(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    state = trained(step_on(1, 2, 4), 3)
    save(tmp_path, [state], tokenizer)
    folder = tmp_path / "checkpoints" / "3"
    for mesh in ((1, 1, 1), (4, 1, 1), (1, 8, 1), (2, 2, 2)):
        shapes = step_on(*mesh).shapes
        restored = checkpoint.read_state(folder, shapes)
        assert_equal(restored, state)
        for array, shape in zip(jax.tree.leaves(restored), jax.tree.leaves(shapes), strict=True):
            assert array.sharding == shape.sharding
    host = checkpoint.read_params(folder, jax.tree.map(np.empty_like, state.params))
    assert {type(x) for x in jax.tree.leaves(host)} == {np.ndarray}
    assert_equal(host, state.params)


def test_a_step_folder_holds_position_config_and_tokenizer(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    save(tmp_path, [trained(step_on(1, 1, 1), 2)], tokenizer)
    folder = tmp_path / "checkpoints" / "2"
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [
        "optimizer",
        "params",
        "run",
        "tokenizer",
    ]
    assert checkpoint.read_record(folder) == checkpoint.Record(2, POSITION, CONFIG)
    assert checkpoint.read_tokenizer(folder).fingerprint == tokenizer.fingerprint


def test_the_newest_few_are_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    step = step_on(1, 1, 1)
    states = [trained(step, n) for n in (1, 2, 3, 5)]
    save(tmp_path, states, tokenizer, keep=2)
    assert [p.name for p in checkpoint.step_folders(tmp_path)] == ["5", "3"]


def test_a_step_is_never_silently_not_saved(tmp_path: Path, tokenizer: Tokenizer) -> None:
    step = step_on(1, 1, 1)
    save(tmp_path, [trained(step, 2)], tokenizer)
    for updates in (2, 1):
        with pytest.raises(CommandError, match=f"checkpoints/{updates}"):
            save(tmp_path, [trained(step, updates)], tokenizer)


def test_a_save_in_the_background_stores_the_values_of_its_own_step(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    place = tiny.placement(1, 4, 2)
    step = step_on(1, 4, 2)
    state = trained(step, 1)
    expected = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path, 3) as checkpoints:
        checkpoints.save(state, POSITION, CONFIG, tokenizer)
        for i in range(5):  # these take over the memory of the state being written
            state, _ = step.update(state, place.put_batch(tiny.batch(CONFIG, i)))
        checkpoints.wait()
    assert_equal(checkpoint.read_state(tmp_path / "checkpoints" / "1", step.shapes), expected)


def test_a_save_that_fails_stops_the_run(tmp_path: Path) -> None:
    class Unwritable:
        def save(self, folder: Path) -> None:
            raise OSError(28, "No space left on device", str(folder))

    state = trained(step_on(1, 1, 1), 1)
    checkpoints = Checkpoints(tmp_path, 3)
    checkpoints.save(state, POSITION, CONFIG, Unwritable())  # type: ignore[arg-type]
    with pytest.raises(CommandError, match=r"saving failed: OSError.*No space left"):
        checkpoints.wait()
    assert checkpoint.step_folders(tmp_path) == []


def _truncate(folder: Path) -> None:
    for file in (folder / "params").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        lambda folder: shutil.rmtree(folder / "params"),
        lambda folder: shutil.rmtree(folder / "optimizer"),
        lambda folder: (folder / "run" / "run.json").write_text('{"step": 3'),
        lambda folder: [shutil.rmtree(folder), folder.mkdir()],
    ],
)
def test_a_broken_step_is_named_and_the_one_before_is_read(
    damage: Callable[[Path], object],
    tmp_path: Path,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = step_on(1, 1, 1)
    states = [trained(step, n) for n in (1, 2)]
    save(tmp_path, states, tokenizer)
    damage(tmp_path / "checkpoints" / "2")

    def read(folder: Path) -> State:
        checkpoint.read_record(folder)
        return checkpoint.read_state(folder, step.shapes)

    found = checkpoint.open_newest(tmp_path, read)
    assert found is not None
    assert found[0].name == "1"
    assert_equal(found[1], states[0])
    assert "checkpoints/2: broken, skipped" in caplog.text
    # The step that could not be read makes room for the one that will be written.
    checkpoint.set_aside_newer(found[0])
    assert [p.name for p in checkpoint.step_folders(tmp_path)] == ["1"]
    assert len(list((tmp_path / "broken").iterdir())) == 1
    save(tmp_path, [states[1]], tokenizer)
    assert_equal(checkpoint.read_state(tmp_path / "checkpoints" / "2", step.shapes), states[1])
    damage(tmp_path / "checkpoints" / "1")
    damage(tmp_path / "checkpoints" / "2")
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.open_newest(tmp_path, read)


def test_what_a_killed_save_leaves_is_no_step(tmp_path: Path, tokenizer: Tokenizer) -> None:
    step = step_on(1, 1, 1)
    states = [trained(step, n) for n in (1, 2)]
    save(tmp_path, states[:1], tokenizer)
    whole = tmp_path / "checkpoints" / "1"
    torn = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    shutil.copytree(whole, torn)
    assert [p.name for p in checkpoint.step_folders(tmp_path)] == ["1"]
    save(tmp_path, states[1:], tokenizer)
    assert_equal(checkpoint.read_state(tmp_path / "checkpoints" / "2", step.shapes), states[1])
    assert not torn.exists()


@pytest.mark.parametrize("name", ["plain", "with space", "trailing/", "~/home"])
def test_every_spelling_of_a_path_is_the_same_folder(
    name: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    state = trained(step_on(1, 1, 1), 1)
    save(Path(name).expanduser().absolute(), [state], tokenizer)
    for path in (name, str(Path(name).expanduser().absolute()), f"{name}/checkpoints/1"):
        found = checkpoint.open_newest(path, checkpoint.read_record)
        assert found is not None
        assert found[1].step == 1


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing: no such folder"):
        checkpoint.open_newest(tmp_path / "missing", checkpoint.read_record)
    assert checkpoint.open_newest(tmp_path, checkpoint.read_record) is None


def test_a_config_written_by_another_version_names_the_key(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    save(tmp_path, [trained(step_on(1, 1, 1), 1)], tokenizer)
    record = tmp_path / "checkpoints" / "1" / "run" / "run.json"
    record.write_text(record.read_text().replace('"rope_theta"', '"rope_tehta"'))
    with pytest.raises(UserError, match=r"rope_tehta: no such key; did you mean .*rope_theta"):
        checkpoint.open_newest(tmp_path, checkpoint.read_record)
