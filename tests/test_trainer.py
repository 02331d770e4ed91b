import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train as command
from fixbin_jax import checkpoint, cli, trainer
from fixbin_jax.config import CheckpointConfig, Config, LogConfig, SampleConfig
from fixbin_jax.config_dict import to_mapping
from fixbin_jax.data.train_tokenizer import train_tokenizer
from fixbin_jax.errors import Diverged, Terminated, UserError
from fixbin_jax.metrics import read_metrics
from fixbin_jax.step import Step
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.jsonl, 400 documents, and a tokenizer of 300 ids."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["bit", "code", "table", "id", "width", "layer", "head", "step", "\n", "parity"]
    lines = [
        json.dumps({"text": " ".join(rng.choices(words, k=rng.randrange(5, 60)))})
        for _ in range(400)
    ]
    (folder / "text.jsonl").write_text("\n".join(lines))
    train_tokenizer(str(folder / "text.jsonl"), 300, folder / "tokenizer", text_field="text")
    return folder


@pytest.fixture
def config(text: Path) -> Config:
    config = tiny.change(
        tiny.CONFIG,
        data={"sources": str(text / "text.jsonl"), "tokenizer": str(text / "tokenizer")},
        train={"num_steps": 12, "batch_size": 8, "eval_interval": 5, "eval_batches": 2},
        optimizer={"warmup_steps": 3, "learning_rate": 1e-2},
        mesh={"fsdp": 2, "tensor": 4},
    )
    return tiny.change_whole(
        config,
        checkpoint=CheckpointConfig(interval=4),
        log=LogConfig(interval=1, tensorboard=False),
        sample=SampleConfig(max_new_tokens=0),
    )


def final_state(workdir: Path, config: Config) -> Any:
    folder = checkpoint.step_folders(workdir)[0]
    assert folder.name == str(config.train.num_steps)
    return checkpoint.read_state(folder, Step(config, tiny.placement()).shapes)


def assert_equal(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def stop_after(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """The next run gets SIGTERM while its `updates`-th update is under way."""
    terminated = threading.Event()

    @contextlib.contextmanager
    def sigterm() -> Iterator[threading.Event]:
        yield terminated

    calls = 0
    build = Step.__init__

    def patched(self: Step, *args: Any) -> None:
        build(self, *args)
        update = self.update

        def counted(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == updates:
                terminated.set()
            return update(*args)

        self.update = counted  # type: ignore[assignment]

    monkeypatch.setattr(trainer, "_sigterm", sigterm)
    monkeypatch.setattr(Step, "__init__", patched)


def test_a_run_leaves_checkpoints_metrics_config_and_a_curve(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.change(config, log={"tensorboard": True}, sample={"max_new_tokens": 5})
    trainer.train(config, tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "tensorboard",
    ]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in checkpoint.step_folders(tmp_path / "run")] == ["12", "8", "4"]
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    evaluations = [r for r in records if "eval_loss" in r]
    assert [r["step"] for r in evaluations] == [0, 5, 10, 12]
    assert {r["eval_tokens"] for r in evaluations} == {2 * 8 * 16}
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert all({"grad_norm", "learning_rate"} <= r.keys() for r in records if "loss" in r)
    out = capsys.readouterr().out
    for words in (
        "devices     8 x cpu",
        "data 1 x fsdp 2 x tensor 4",
        "at the input",
        "128 tokens",
        "unigram entropy",
        "sample",
        "loss.png",
    ):
        assert words in out


@pytest.mark.parametrize("updates", [1, 4, 7, 11])
def test_a_stopped_run_continues_bit_for_bit(
    updates: int, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train(config, tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        stop_after(patch, updates)
        with pytest.raises(Terminated, match=f"SIGTERM at step {updates}"):
            trainer.train(config, tmp_path / "stopped")
    assert checkpoint.step_folders(tmp_path / "stopped")[0].name == str(updates)
    trainer.train(config, tmp_path / "stopped")
    assert_equal(
        final_state(tmp_path / "stopped", config), final_state(tmp_path / "undisturbed", config)
    )
    undisturbed, stopped = (
        [
            {k: r[k] for k in ("step", "loss", "eval_loss") if k in r}
            for r in read_metrics(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("undisturbed", "stopped")
    )
    assert stopped == undisturbed


def test_one_compilation_of_the_update_with_evaluation_and_resume(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Step] = []
    build = Step.__init__

    def kept(self: Step, *args: Any) -> None:
        build(self, *args)
        steps.append(self)

    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Terminated):
            trainer.train(config, tmp_path)
    monkeypatch.setattr(Step, "__init__", kept)
    trainer.train(config, tmp_path)
    (step,) = steps
    assert step.update._cache_size() == 1
    assert step.evaluate._cache_size() == 1


def test_a_finished_run_is_left_as_it_is(config: Config, tmp_path: Path) -> None:
    trainer.train(config, tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")}
    metrics = (tmp_path / "metrics.jsonl").read_text()
    trainer.train(config, tmp_path)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")} == before
    assert (tmp_path / "metrics.jsonl").read_text() == metrics


def test_the_last_step_is_saved_whatever_the_interval(config: Config, tmp_path: Path) -> None:
    config = tiny.change(config, train={"num_steps": 5}, checkpoint={"interval": 3})
    trainer.train(config, tmp_path)
    assert [p.name for p in checkpoint.step_folders(tmp_path)] == ["5", "3"]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_what_is_not_finite_stops_the_run_and_is_not_saved(
    name: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Step._update

    def poisoned(self: Step, state: Any, batch: Any) -> Any:
        after, metrics = update(self, state, batch)
        bad = jax.numpy.where(after.step == 8, jax.numpy.nan, metrics[name])
        return after, {**metrics, name: bad}

    monkeypatch.setattr(Step, "_update", poisoned)
    with pytest.raises(Diverged, match=f"step 8: {name} is nan; .*checkpoints/4$"):
        trainer.train(config, tmp_path)
    assert [p.name for p in checkpoint.step_folders(tmp_path)] == ["4"]


def test_a_used_folder_is_for_the_run_that_used_it(config: Config, tmp_path: Path) -> None:
    trainer.train(config, tmp_path)
    longer = tiny.change(config, train={"num_steps": 14})
    with pytest.raises(UserError, match=r"config.train.num_steps: 12 -> 14.*--change_config"):
        trainer.train(longer, tmp_path)
    trainer.train(longer, tmp_path, change_config=True)
    assert checkpoint.step_folders(tmp_path)[0].name == "14"
    # How and when may change freely.
    elsewhere = tiny.change(longer, mesh={"fsdp": 8, "tensor": 1}, compute={"remat": "full"})
    trainer.train(elsewhere, tmp_path)
    other_batch = tiny.change(longer, train={"batch_size": 16, "num_steps": 16})
    with pytest.raises(UserError, match="batch_size"):
        trainer.train(other_batch, tmp_path, change_config=True)


def test_a_folder_without_a_step_is_free_for_another_run(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        trainer.train(tiny.change(config, data={"sources": "missing.txt"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    trainer.train(config, tmp_path / "run")


def test_a_run_from_given_weights_begins_at_step_0(config: Config, tmp_path: Path) -> None:
    trainer.train(config, tmp_path / "first")
    second = tiny.change(config, train={"init_from": str(tmp_path / "first"), "num_steps": 3})
    trainer.train(second, tmp_path / "second")
    first_loss, second_loss = (
        [r for r in read_metrics(tmp_path / name / "metrics.jsonl") if "eval_loss" in r]
        for name in ("first", "second")
    )
    assert second_loss[0]["step"] == 0
    assert second_loss[0]["eval_loss"] == pytest.approx(first_loss[-1]["eval_loss"], rel=1e-6)
    other = tiny.change(second, model={"num_layers": 3})
    with pytest.raises(UserError, match=r"init_from: .* holds another model"):
        trainer.train(other, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_another_mesh_goes_on_with_the_same_losses(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train(config, tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Terminated):
            trainer.train(config, tmp_path / "moved")
    trainer.train(tiny.change(config, mesh={"data": 4, "fsdp": 1, "tensor": 2}), tmp_path / "moved")
    losses = [
        [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in r]
        for name in ("undisturbed", "moved")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def quickly(config: Config, workdir: Path, path: Path) -> list[str]:
    """The command line of a run, its config written to a file."""
    path.write_text(
        "from fixbin_jax.config import Config\n"
        "from fixbin_jax.config_dict import from_mapping, to_config_dict\n"
        f"def get_config():\n    return to_config_dict(from_mapping(Config, "
        f"{to_mapping(config)!r}))\n"
    )
    return [sys.executable, str(ROOT / "train.py"), f"--config={path}", f"--workdir={workdir}"]


@pytest.mark.slow
def test_kill_9_at_ten_moments_and_sigterm_lose_nothing(config: Config, tmp_path: Path) -> None:
    config = tiny.change(
        config, train={"num_steps": 400, "eval_interval": 50}, checkpoint={"interval": 5}
    )
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    argv = quickly(config, tmp_path / "killed", tmp_path / "config.py")
    metrics = tmp_path / "killed" / "metrics.jsonl"
    rng = random.Random(0)
    exits = []
    for i in range(11):
        with (tmp_path / f"log{i}").open("w") as log:
            process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=log)
        # A moment in the start, or so many new lines of metrics and a fraction of a second later.
        lines = _lines(metrics) + rng.randrange(1, 40)
        deadline = time.monotonic() + (rng.uniform(0, 3) if i in (3, 6) else 120)
        while time.monotonic() < deadline and _lines(metrics) < lines and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGTERM if i == 10 else signal.SIGKILL)
        exits.append(process.wait(60))
    assert exits == [-signal.SIGKILL] * 10 + [Terminated.status], (tmp_path / "log10").read_text()
    assert "\nstopped: SIGTERM at step" in (tmp_path / "log10").read_text()
    result = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "resume" in result.stdout
    trainer.train(config, tmp_path / "undisturbed")
    assert_equal(
        final_state(tmp_path / "killed", config), final_state(tmp_path / "undisturbed", config)
    )
    steps = [r["step"] for r in read_metrics(metrics) if "loss" in r]
    assert steps == list(range(1, 401))


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.model.n_layer=4", ["config.model.n_layer", "num_layers"]),
        ("--config.optimizer.learning_rat=1", ["learning_rate"]),
        ("--config.model.num_layers=many", ["config.model.num_layers", "many"]),
        ("--config.model.width=33", ["config.model.width", "33", "num_heads"]),
        ("--config.mesh=4,2", ["config.mesh"]),
        ("--config.model.vocab_size=100", ["300", "100"]),
        ("--config.model.context_length=100000", ["ids", "100000"]),
        ("--config.data.sources=/no/such/file.txt", ["/no/such/file.txt"]),
        ("--config.data.sources={empty}", ["empty.txt"]),
        ("--config.data.sources={latin}", ["latin.txt"]),
        ("--config.data.sources={folder}", ["folder"]),
        ("--config.data.tokenizer=/no/such", ["/no/such"]),
        ("--config.train.init_from=/no/such", ["/no/such"]),
        ("--config.train.batch_size=7", ["7", "fsdp"]),
        ("--config.optimizer.learning_rate=nan", ["learning_rate", "nan"]),
        ("--config.compute.dtype=float8", ["float8", "bfloat16"]),
        ("--workdr=x", ["--workdr", "--workdir"]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    argument: str,
    words: list[str],
    config: Config,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 1000)
    (tmp_path / "folder").mkdir()
    places = {name: tmp_path / f"{name}.txt" for name in ("empty", "latin")}
    argv = quickly(config, tmp_path / "run", tmp_path / "config.py")[1:]
    with pytest.raises(SystemExit) as exit_:
        cli.run(
            command.main,
            command.define_flags,
            [*argv, argument.format(**places, folder=tmp_path / "folder")],
        )
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_made_is_named(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--workdir: .*/file/run: .*/file is a file"):
        trainer.train(config, tmp_path / "file" / "run")


def test_a_step_with_a_torn_tokenizer_is_broken(config: Config, tmp_path: Path) -> None:
    config = tiny.change(config, train={"num_steps": 8})
    trainer.train(config, tmp_path)
    expected = final_state(tmp_path, config)
    tokenizer = tmp_path / "checkpoints" / "8" / "tokenizer" / "tokenizer.model"
    tokenizer.write_bytes(tokenizer.read_bytes()[:100])
    trainer.train(config, tmp_path)
    assert [p.name for p in (tmp_path / "broken").iterdir()] == ["8-0"]
    assert_equal(final_state(tmp_path, config), expected)
