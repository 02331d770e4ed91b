import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from fixbin_jax import cli
from fixbin_jax.errors import CommandError, UserError

ROOT = Path(__file__).resolve().parents[1]

CONFIG = """
from ml_collections import ConfigDict, config_dict

def get_config():
    config = ConfigDict()
    config.seed = 0
    config.name = "run"
    config.anything = None
    config.model = ConfigDict()
    config.model.num_layers = 2
    config.model.use_bias = False
    config.model.mlp_width = config_dict.placeholder(int)
    config.model.remat = "dots"
    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-4
    config.optimizer.betas = (0.9, 0.95)
    config.mesh = ConfigDict()
    config.mesh.shape = (1, 1)
    config.mesh.data = -1
    config.mesh.fsdp = 1
    config.data = ConfigDict()
    config.data.files = ("a.txt",)
    config.data.zero_ids = ()
    config.data.steps = [1, 2]
    return config
"""


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "a config.py"
    path.write_text(CONFIG)
    return str(path)


def define_flags(fv: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "the run folder", fv, required=True)
    flags.DEFINE_integer("top_k", 40, "keep the k likeliest", 1, flag_values=fv)
    flags.DEFINE_float("temperature", 0.8, "softmax temperature", 0.0, flag_values=fv)
    flags.DEFINE_bool("json", False, "print JSON", fv)
    flags.DEFINE_enum("format", "fixbin", ["fixbin", "gpt_neox"], "what to write", fv)


def test_a_warning_of_the_library_is_one_plain_line(capsys):
    log = logging.getLogger("fixbin_jax.some.module")
    assert outcome(capsys, lambda fv: log.warning("skipped %s", "a"), "--workdir=a") == (
        0,
        "",
        "warning: skipped a\n",
    )


def outcome(capsys, main, *args, define=define_flags):
    """Exit status, standard output, standard error of a command."""
    with pytest.raises(SystemExit) as exit_info:
        cli.run(main, define, ["prog.py", *args])
    captured = capsys.readouterr()
    return exit_info.value.code, captured.out, captured.err


def refusal(capsys, *args, define=define_flags, main=lambda fv: None):
    """The one line that a command refused with exit status 2 prints, without its "error: "."""
    status, out, err = outcome(capsys, main, *args, define=define)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err.removeprefix("error: ").rstrip("\n")


# Flags.


def test_main_gets_the_flags_and_its_result_is_the_status(capsys):
    seen = []

    def main(fv):
        seen.append((fv.workdir, fv.top_k, fv.temperature, fv.json, fv.format))
        print("done")
        return 1

    args = ["--workdir", "a b", "--top_k=3", "-temperature=0", "--json", "--format=gpt_neox"]
    assert outcome(capsys, main, *args) == (1, "done\n", "")
    assert outcome(capsys, lambda fv: None, "--workdir=a")[0] == 0
    assert seen == [("a b", 3, 0.0, True, "gpt_neox")]


def test_flags_of_a_command_do_not_reach_the_next_one_or_the_global_flags(capsys):
    outcome(capsys, lambda fv: None, "--workdir=a", "--top_k=7")
    assert outcome(capsys, lambda fv: fv.top_k, "--workdir=a")[0] == 40
    assert "top_k" not in flags.FLAGS


@pytest.mark.parametrize("spelling", ["--help", "-h", "-help"])
def test_help_names_each_flag_and_exits_0_without_running(capsys, spelling):
    status, out, err = outcome(capsys, lambda fv: pytest.fail("ran"), spelling)
    assert (status, err) == (0, "")
    assert out.startswith("usage: python")
    assert "--workdir" in out and "the run folder (required)" in out
    assert "softmax temperature (default: 0.8)" in out and "print JSON\n" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workdri=a"], "--workdri: no such flag; did you mean --workdir?"),
        (["--workdir=a", "--temprature", "1"], "--temprature: no such flag; did you mean --temper"),
        (["--workdir=a", "--hlep"], "--hlep: no such flag; did you mean --help?"),
        (["--workdir=a", "--top_k=many"], "--top_k=many: expected a positive integer"),
        (["--workdir=a", "--top_k=1e3"], "--top_k=1e3: expected a positive integer"),
        (["--workdir=a", "--top_k=0"], "--top_k=0: expected a positive integer"),
        (["--workdir=a", "--top_k=a: b\nc"], "--top_k=a: b c: expected a positive integer"),
        (["--workdir=a", "--temperature=-1"], "--temperature=-1: expected a non-negative number"),
        (["--workdir=a", "--json=perhaps"], "--json=perhaps: expected true or false"),
        (["--workdir=a", "--nojson=1"], "--nojson=1 does not take an argument"),
        (
            ["--workdir=a", "--format=onnx"],
            "--format=onnx: value should be one of <fixbin|gpt_neox>",
        ),
        (["--top_k=3"], "--workdir: required, but not given"),
        (["--workdir"], "Missing value for flag --workdir"),
        (["run", "--workdir=a"], "'run': unexpected; arguments are written --name=value"),
        (["--workdir=a", "--", "--top_k=3"], "'--top_k=3': unexpected"),
    ],
)
def test_a_mistaken_argument_is_one_line_that_names_it(capsys, args, message):
    line = refusal(capsys, *args, main=lambda fv: pytest.fail("ran"))
    assert line.startswith(message)


def test_all_missing_flags_are_named_at_once(capsys):
    def define(fv):
        define_flags(fv)
        cli.define_config(fv)

    assert refusal(capsys, define=define) == "--workdir, --config: required, but not given"


# Errors while running.


def raiser(error):
    def main(fv):
        raise error

    return main


def test_a_user_error_is_one_line_even_if_its_message_has_more(capsys):
    line = refusal(capsys, "--workdir=a", main=raiser(UserError("a.txt:\n  broken")))
    assert line == "a.txt: broken"


def test_a_bug_passes_through(capsys):
    for bug in (ValueError("v"), KeyError("k"), OSError("no errno, no file")):
        with pytest.raises(type(bug)) as raised:
            cli.run(raiser(bug), define_flags, ["prog", "--workdir=a"])
        assert raised.value is bug


def test_an_os_error_is_one_line_that_names_the_file(capsys, tmp_path):
    def open_missing(fv):
        (tmp_path / "missing").open()

    def list_file(fv):
        (tmp_path / "file").touch()
        list((tmp_path / "file").iterdir())

    line = refusal(capsys, "--workdir=a", main=open_missing)
    assert line == f"{tmp_path}/missing: No such file or directory"
    assert refusal(capsys, "--workdir=a", main=list_file) == f"{tmp_path}/file: Not a directory"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line_though_the_write_has_no_file_name(capsys):
    def main(fv):
        with open("/dev/full", "w") as file:
            file.write("x")

    line = refusal(capsys, "--workdir=a", main=main)
    assert line == "writing a file: No space left on device"


def test_ctrl_c_is_status_130_and_one_line(capsys):
    result = outcome(capsys, raiser(KeyboardInterrupt()), "--workdir=a")
    assert result == (130, "", "interrupted\n")


COMMAND = """
import sys
from fixbin_jax import cli

def main(fv):
    {body}

cli.run(main, lambda fv: None)
"""


def run_command(body: str, stdout: int | IO[str]) -> subprocess.CompletedProcess[str]:
    code = COMMAND.format(body=body)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("count", [1, 100_000])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_left_ends_the_command_quietly(monkeypatch, count, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reader, writer = os.pipe()
    os.close(reader)
    result = run_command(f"print('x\\n' * {count})", writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_broken_pipe_that_is_not_standard_output_is_a_bug():
    result = run_command("raise BrokenPipeError('a worker died')", subprocess.DEVNULL)
    assert "BrokenPipeError: a worker died" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_on_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        result = run_command("print('x')", full)
    assert result.stderr == "error: standard output: No space left on device\n"
    assert result.returncode == 2


def test_help_of_a_module_names_the_module(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        '"""Does a thing.\n\nAt length."""\n' + COMMAND.format(body="pass")
    )
    result = subprocess.run(
        [sys.executable, "-m", "pack", "--config=a", "-h"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("usage: python -m pack --name=value ...\n\nDoes a thing.\n")
    assert "At length" not in result.stdout


# The config file.


def define_config_flags(fv: flags.FlagValues) -> None:
    cli.define_config(fv)
    flags.DEFINE_bool("json", False, "print JSON", fv)


def configured(capsys, *args) -> ConfigDict:
    """The config that a command given args sees."""
    seen = []

    def main(fv):
        seen.append(cli.get_config(fv))

    assert outcome(capsys, main, *args, define=define_config_flags) == (0, "", "")
    return seen[0]


def config_refusal(capsys, *args) -> str:
    return refusal(
        capsys, *args, define=define_config_flags, main=lambda fv: print(cli.get_config(fv))
    )


def test_overrides_change_the_keys_they_name_and_nothing_else(capsys, config_file):
    plain = configured(capsys, f"--config={config_file}")
    changed = configured(
        capsys,
        "--config.model.num_layers=4",
        "--json",
        f"--config={config_file}",
        "-config.seed=9",
        "--config.name",
        "a=b",
        "--config.mesh.data",
        "-2",
        "--config.model.use_bias",
    )
    assert changed.model.num_layers == 4 and changed.seed == 9 and changed.mesh.data == -2
    assert changed.name == "a=b" and changed.model.use_bias is True
    with changed.unlocked():
        changed.model.num_layers, changed.seed, changed.mesh.data = 2, 0, -1
        changed.name, changed.model.use_bias = "run", False
    assert changed == plain
    assert plain.is_locked and plain.model.is_locked


def test_the_last_of_equal_overrides_counts(capsys, config_file):
    config = configured(capsys, f"--config={config_file}", "--config.seed=1", "--config.seed=2")
    assert config.seed == 2


VALUES = [
    ("seed", "1e3", 1000),
    ("seed", "-7", -7),
    ("seed", "1_000", 1000),
    ("model.use_bias", "true", True),
    ("model.use_bias", "True", True),
    ("model.use_bias", "0", False),
    ("model.mlp_width", "64", 64),
    ("model.mlp_width", "none", None),
    ("model.mlp_width", "None", None),
    ("model.remat", "none", "none"),
    ("name", "", ""),
    ("name", "é 'x', 1", "é 'x', 1"),
    ("anything", "3", 3),
    ("anything", "none", None),
    ("anything", "word", "word"),
    ("optimizer.learning_rate", "1", 1.0),
    ("optimizer.learning_rate", "-2.5e-4", -2.5e-4),
    ("optimizer.betas", "0.8,1", (0.8, 1.0)),
    ("optimizer.betas", "(0.8, 0.99)", (0.8, 0.99)),
    ("mesh.shape", "4,2", (4, 2)),
    ("mesh.shape", "[4, 2]", (4, 2)),
    ("mesh.shape", "8", (8,)),
    ("mesh.shape", "", ()),
    ("data.files", "b.txt", ("b.txt",)),
    ("data.files", "data/*.txt, /tmp/[ab].txt", ("data/*.txt", "/tmp/[ab].txt")),
    ("data.files", "('a, b', 'c')", ("a, b", "c")),
    ("data.files", "(a,b)", ("a", "b")),
    ("data.zero_ids", "57344", (57344,)),
    ("data.zero_ids", "1,2", (1, 2)),
    ("data.steps", "3", [3]),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_a_value_is_read_by_the_type_its_key_has(config_file, key, text, value):
    found = cli.load_config(config_file, [(key, text)])
    for part in key.split("."):
        found = found[part]
    assert found == value and type(found) is type(value)
    if isinstance(value, tuple):
        assert [type(x) for x in found] == [type(x) for x in value]


def test_a_placeholder_that_the_file_fills_can_be_set_back_to_none(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.replace("return config", "config.model.mlp_width = 8; return config"))
    assert cli.load_config(str(path)).model.mlp_width == 8
    assert cli.load_config(str(path), [("model.mlp_width", "none")]).model.mlp_width is None


@given(number=st.floats(allow_nan=False))
def test_every_float_survives_its_spelling(tmp_path_factory, number):
    path = tmp_path_factory.getbasetemp() / "float_config.py"
    path.write_text(CONFIG)
    config = cli.load_config(str(path), [("optimizer.learning_rate", repr(number))])
    assert config.optimizer.learning_rate == number


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "--config.model.n_layer=4",
            "--config.model.n_layer: no such key; did you mean --config.model.num_layers?",
        ),
        (
            "--config.num_layers=4",
            "--config.num_layers: no such key; did you mean --config.model.num_layers?",
        ),
        (
            "--config.modle.use_bias=1",
            "--config.modle.use_bias: no such key; did you mean --config.model.use_bias?",
        ),
        (
            "--config.optimizer.learning_rat=1",
            "--config.optimizer.learning_rat: no such key; "
            "did you mean --config.optimizer.learning_rate?",
        ),
        ("--config.seed.x=1", "--config.seed.x: no such key; did you mean --config.seed?"),
        ("--config.sed", "--config.sed: no such key; did you mean --config.seed?"),
        ("--config.=1", "--config.: no such key; did you mean "),
        ("--config..seed=1", "--config..seed: no such key; did you mean --config.seed?"),
        ("--config.items=1", "--config.items: no such key; did you mean "),
        ("--config.seed=1.5", "--config.seed=1.5: expected an integer"),
        ("--config.seed=many", "--config.seed=many: expected an integer"),
        ("--config.seed=inf", "--config.seed=inf: expected an integer"),
        ("--config.seed=none", "--config.seed=none: expected an integer"),
        ("--config.seed=", "--config.seed=: expected an integer"),
        ("--config.seed", "--config.seed: no value; write --config.seed=VALUE"),
        ("--config.model.mlp_width=wide", "--config.model.mlp_width=wide: expected an integer"),
        ("--config.model.use_bias=maybe", "--config.model.use_bias=maybe: expected true or false"),
        (
            "--config.optimizer.learning_rate=fast",
            "--config.optimizer.learning_rate=fast: expected a number",
        ),
        ("--config.mesh.shape=4,x", "--config.mesh.shape=4,x: expected an integer"),
        ("--config.mesh=4,2", "--config.mesh: a group, set one of its keys: data, fsdp, shape"),
        ("--config.mesh", "--config.mesh: a group, set one of its keys: data, fsdp, shape"),
    ],
)
def test_a_mistaken_override_is_one_line_that_names_the_key(capsys, config_file, override, message):
    line = config_refusal(capsys, f"--config={config_file}", override)
    assert line.startswith(message) if message.endswith(" ") else line == message


def test_noconfig_is_no_way_to_spell_an_override(capsys, config_file):
    line = config_refusal(capsys, f"--config={config_file}", "--noconfig.model.use_bias")
    assert line.startswith("--noconfig.model.use_bias: no such flag")


def test_overrides_of_a_command_without_a_config_are_unknown_flags(capsys):
    line = refusal(capsys, "--workdir=a", "--config.seed=1")
    assert line.startswith("--config.seed: no such flag")


def test_an_empty_config_has_no_key_to_offer(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("from ml_collections import ConfigDict as get_config")
    with pytest.raises(UserError) as raised:
        cli.load_config(str(path), [("seed", "5")])
    assert str(raised.value) == "--config.seed: no such key"


def test_a_function_in_a_config_cannot_be_set(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.replace("return config", "config.anything = len; return config"))
    with pytest.raises(UserError, match=r"--config\.anything=3: .* cannot be set here"):
        cli.load_config(str(path), [("anything", "3")])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config(:\n", "SyntaxError: "),
        ("\n1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("def get_config():\n    return x\n", "line 2: NameError: name 'x' is not defined"),
        ("def get_config():\n    raise ValueError('a\\nb')\n", "line 2: ValueError: a b"),
        ("import no_such_module_x\n", "line 1: ModuleNotFoundError: No module named"),
        ("def get_config():\n    open('/no/such')\n", "line 2: FileNotFoundError: "),
        ("def get_config(size):\n    pass\n", "TypeError: "),
        ("config = {}\n", "the file defines no function get_config()"),
        ("get_config = 3\n", "the file defines no function get_config()"),
        ("def get_config():\n    pass\n", "get_config() returned NoneType, expected ConfigDict"),
        ("def get_config():\n    return {}\n", "get_config() returned dict, expected ConfigDict"),
        (
            "from ml_collections import FrozenConfigDict\n"
            "def get_config():\n    return FrozenConfigDict()\n",
            "get_config() returned FrozenConfigDict, expected ConfigDict",
        ),
        ("x = '\0'\n", ""),
    ],
)
def test_a_broken_config_file_is_one_line_with_file_and_cause(capsys, tmp_path, source, message):
    path = tmp_path / "config.py"
    path.write_text(source)
    line = config_refusal(capsys, f"--config={path}")
    assert line.startswith(f"--config={path}: {message}")


def test_a_missing_config_file_is_named(capsys, tmp_path):
    line = config_refusal(capsys, "--config=nowhere/x.py")
    assert line == "--config=nowhere/x.py: no such file"
    assert config_refusal(capsys, f"--config={tmp_path}") == f"--config={tmp_path}: no such file"


def test_a_config_file_that_is_not_utf8_is_named(capsys, tmp_path):
    path = tmp_path / "config.py"
    path.write_bytes(b"x = '\xff'\n")
    assert config_refusal(capsys, f"--config={path}").startswith(f"--config={path}: SyntaxError: ")


def test_relative_and_home_paths_find_the_config(monkeypatch, tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.load_config("config.py").seed == cli.load_config("~/config.py").seed == 0


def test_loading_leaves_nothing_behind(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    before = set(sys.modules)
    first = cli.load_config(str(path), [("seed", "5")])
    assert cli.load_config(str(path)).seed == 0 and first.seed == 5
    assert set(sys.modules) == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_library_s_log_of_a_failure_brings_no_traceback(capsys):
    def main(_: flags.FlagValues) -> None:
        try:
            raise ValueError("save")
        except ValueError:
            logging.getLogger("absl").exception("background save failed")
        raise CommandError("runs/a: saving failed")

    with pytest.raises(SystemExit):
        cli.run(main, lambda _: None, ["program"])
    assert capsys.readouterr().err == "error: runs/a: saving failed\n"
