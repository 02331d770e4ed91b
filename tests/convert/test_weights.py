"""Folders of weights: which files are read, what they hold, and what is refused."""

import json
import logging
import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from convert.dtypes import BLOCK
from convert.safetensors_file import SafetensorsWriter, TensorSpec
from convert.weights import WeightFiles
from fixbin_jax.errors import UserError

INDEX = "model.safetensors.index.json"
ONE = np.array([1.0, -0.0], np.float32)
TWO = np.array([[2.0]], np.float32)


def save_shards(folder, shards, weight_map=None):
    """Writes {file: {name: array}} and an index, by default the true one."""
    for file_name, arrays in shards.items():
        safetensors.numpy.save_file(arrays, folder / file_name)
    if weight_map is None:
        weight_map = {name: file for file, arrays in shards.items() for name in arrays}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_named(folder, names):
    arrays = {name: np.array([i], np.float32) for i, name in enumerate(names)}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    return WeightFiles.open(folder)


def test_a_file_a_folder_and_shards_give_the_same_tensors(tmp_path):
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    safetensors.numpy.save_file({"b": TWO, "a": ONE}, single / "model.safetensors")
    save_shards(sharded, {"1.safetensors": {"b": TWO}, "2.safetensors": {"a": ONE}})
    for path in (single, single / "model.safetensors", sharded):
        weights = WeightFiles.open(path)
        assert weights.names == ("a", "b")
        assert weights.prefix == ""
        assert weights.nbytes == 12
        assert weights.shape("b") == (1, 1)
        assert weights.dtype("a") == "float32"
        assert weights.read("a").tobytes() == ONE.tobytes()
        assert weights.raw("b").tolist() == TWO.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float_tensors_come_back_as_torch_reads_them(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = torch.randn(3, BLOCK // 2 + 1).to(getattr(torch, dtype))
    save_file({"odd": torch.zeros(1, dtype=torch.uint8), "x": values}, tmp_path / "m.safetensors")
    weights = WeightFiles.open(tmp_path / "m.safetensors")
    assert weights.dtype("x") == dtype
    np.testing.assert_array_equal(weights.read("x"), values.float().numpy())
    stack = np.zeros((2, *values.shape), np.float32)
    layer = stack[1]
    assert weights.read("x", out=layer) is layer
    np.testing.assert_array_equal(stack[1], values.float().numpy())
    assert not stack[0].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_pattern_survives_reading_and_writing(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    bits = torch.arange(2**16).to(torch.int32).to(torch.int16)
    save_file({"x": bits.view(getattr(torch, dtype))}, tmp_path / "from.safetensors")
    read = WeightFiles.open(tmp_path / "from.safetensors")
    with SafetensorsWriter(tmp_path, [TensorSpec("x", dtype, (2**16,))], 10**9) as writer:
        writer.write("x", read.read("x"))
    again = WeightFiles.open(tmp_path)
    np.testing.assert_array_equal(again.raw("x").view(np.int16), bits.numpy())


def test_raw_gives_the_stored_bits(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {
        "codes": torch.tensor([[0, 1], [1, 1]], dtype=torch.uint8),
        "ids": torch.tensor([-(2**40)]),
        "mask": torch.tensor([True, False]),
        "one": torch.tensor(1.0, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "same.bin")
    for path in (tmp_path, tmp_path / "same.bin"):
        weights = WeightFiles.open(path)
        assert weights.raw("codes").tolist() == [[0, 1], [1, 1]]
        assert weights.raw("ids").tolist() == [-(2**40)]
        assert weights.raw("mask").tolist() == [True, False]
        assert weights.raw("one") == np.uint16(0x3F80)
        assert [weights.dtype(name) for name in weights.names] == [
            "uint8",
            "int64",
            "bool",
            "bfloat16",
        ]


def test_other_formats_are_listed_and_refused_on_reading(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {"x": torch.zeros(2, dtype=torch.float8_e4m3fn), "y": torch.zeros(2).int()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = WeightFiles.open(tmp_path)
    assert weights.nbytes == 10
    for read, name, found in ((weights.read, "y", "int32"), (weights.read, "x", "F8_E4M3")):
        with pytest.raises(UserError, match=f"tensor {name}: found format {found}, .*float32"):
            read(name)
    with pytest.raises(UserError, match="tensor x: found format F8_E4M3"):
        weights.raw("x")


@pytest.mark.parametrize(
    "out",
    [
        np.empty(3, np.float32),
        np.empty(2),
        np.empty(4, np.float32)[::2],
    ],
    ids=["shape", "dtype", "strided"],
)
def test_an_out_that_does_not_fit_is_refused(tmp_path, out):
    safetensors.numpy.save_file({"a": ONE}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="out for tensor a"):
        WeightFiles.open(tmp_path).read("a", out)


def test_a_name_that_is_not_there_is_an_error(tmp_path):
    weights = save_named(tmp_path, ["a"])
    for ask in (weights.shape, weights.dtype, weights.read, weights.raw):
        with pytest.raises(UserError, match="no tensor b"):
            ask("b")


def test_without_weights_the_message_says_what_was_looked_for(tmp_path):
    with pytest.raises(UserError, match=r"no weights.*model\.safetensors.*pytorch_model\.bin$"):
        WeightFiles.open(tmp_path)
    with pytest.raises(UserError, match="no such file or folder"):
        WeightFiles.open(tmp_path / "absent")
    (tmp_path / "weights.h5").touch()
    with pytest.raises(UserError, match=r"found the ending '\.h5'"):
        WeightFiles.open(tmp_path / "weights.h5")


def test_the_index_goes_before_the_single_file_with_a_warning(tmp_path, caplog):
    save_shards(tmp_path, {"1.safetensors": {"a": ONE}})
    save_named(tmp_path, ["stray"])
    assert WeightFiles.open(tmp_path).names == ("a",)
    assert "model.safetensors: not read" in caplog.text


def test_an_index_of_the_single_file_gives_no_warning(tmp_path, caplog):
    save_shards(tmp_path, {"model.safetensors": {"a": ONE}})
    assert WeightFiles.open(tmp_path).names == ("a",)
    assert not caplog.records


def test_a_tensor_absent_from_the_index_is_left_out_with_a_warning(tmp_path, caplog):
    save_shards(tmp_path, {"1.safetensors": {"a": ONE, "b": TWO}}, {"a": "1.safetensors"})
    assert WeightFiles.open(tmp_path).names == ("a",)
    assert caplog.record_tuples[0][:2] == ("fixbin_jax.convert", logging.WARNING)
    assert caplog.text.rstrip().endswith("the index lacks them: b")


@pytest.mark.parametrize(
    ("shards", "weight_map", "message"),
    [
        (
            {"1.safetensors": {"a": ONE}},
            {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"},
            r"shards named but missing: 2\.safetensors, 3\.safetensors",
        ),
        (
            {"1.safetensors": {"a": ONE}, "2.safetensors": {"b": TWO}},
            {"a": "2.safetensors", "b": "2.safetensors", "c": "1.safetensors"},
            r"absent .*: a \(2.safetensors, found in 1.safetensors\), "
            r"c \(1.safetensors, found in no shard\)",
        ),
        (
            {"1.safetensors": {"a": ONE, "b": ONE}, "2.safetensors": {"b": TWO, "a": TWO}},
            {"a": "1.safetensors", "b": "2.safetensors"},
            r"more than one shard: a \(1.safetensors and 2.safetensors\), b \(",
        ),
    ],
    ids=["missing shard", "absent tensor", "doubled tensor"],
)
def test_an_index_and_shards_that_disagree_are_refused(tmp_path, shards, weight_map, message):
    save_shards(tmp_path, shards, weight_map)
    with pytest.raises(UserError, match=message):
        WeightFiles.open(tmp_path)


def test_a_truncated_shard_is_named(tmp_path):
    save_shards(tmp_path, {"1.safetensors": {"a": ONE}, "2.safetensors": {"b": TWO}})
    shard = tmp_path / "2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"2\.safetensors: tensor b: .*truncated"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ("{}", "expected an object"),
        ('{"weight_map": {}}', "expected an object"),
        ('{"weight_map": {"a": 1}}', "tensor a: found 1"),
        ('{"weight_map": {"a": ""}}', "tensor a: found ''"),
        ('{"weight_map": {"a": "../1.safetensors"}}', r"tensor a: found '\.\./1"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, text, message):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=rf"{re.escape(INDEX)}: {message}"):
        WeightFiles.open(tmp_path)


PREFIXES = st.lists(st.sampled_from(["_orig_mod.", "module."]), max_size=4).map("".join)
BARE = st.sampled_from(["head.weight", "model.norm.bias", "my_module.x", "a._orig_mod.b"])


@given(names=st.dictionaries(BARE, PREFIXES, min_size=1))
def test_wrappers_of_any_depth_change_no_name(names, tmp_path_factory):
    stored = [prefix + name for name, prefix in names.items()]
    weights = save_named(tmp_path_factory.mktemp("model"), stored)
    assert weights.names == tuple(sorted(names))
    assert [int(weights.read(name)[0]) for name in names] == list(range(len(names)))
    prefixes = set(names.values())
    assert weights.prefix == (prefixes.pop() if len(prefixes) == 1 else "")


def test_names_that_become_equal_are_all_listed(tmp_path):
    names = ["a", "module.a", "b", "_orig_mod.c", "module._orig_mod.c"]
    with pytest.raises(UserError, match=r": _orig_mod\.c = module\._orig_mod\.c, a = module\.a$"):
        save_named(tmp_path, names)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "legacy"])
def test_a_pickled_model_gives_the_tensors_torch_saved(tmp_path, torch, legacy):
    state = {
        "half": torch.randn(BLOCK + 3).bfloat16(),
        "turned": torch.randn(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    weights = WeightFiles.open(tmp_path)
    assert weights.names == ("half", "parameter", "turned")
    assert weights.nbytes == 2 * (BLOCK + 3) + 48 + 8
    for name, tensor in state.items():
        np.testing.assert_array_equal(weights.read(name), tensor.detach().float().numpy())


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_a_training_checkpoint_is_unwrapped(tmp_path, torch, key):
    content = {key: {"module.a": torch.ones(2)}, "optimizer": {"state": {0: torch.ones(3)}}}
    torch.save(content, tmp_path / "ckpt.pt")
    weights = WeightFiles.open(tmp_path / "ckpt.pt")
    assert (weights.names, weights.prefix) == (("a",), "module.")


def test_pickled_shards_follow_their_index(tmp_path, torch):
    torch.save({"a": torch.ones(2)}, tmp_path / "1.bin")
    torch.save({"b": torch.zeros(2)}, tmp_path / "2.bin")
    index = {"weight_map": {"a": "1.bin", "b": "2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    weights = WeightFiles.open(tmp_path)
    assert [weights.read(name).tolist() for name in weights.names] == [[1, 1], [0, 0]]


def test_safetensors_go_before_pickles(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert save_named(tmp_path, ["a"]).names == ("a",)


def test_entries_that_are_no_tensors_are_left_out_with_a_warning(tmp_path, torch, caplog):
    torch.save({"a": torch.ones(2), "step": 3, "note": "x"}, tmp_path / "m.bin")
    assert WeightFiles.open(tmp_path / "m.bin").names == ("a",)
    assert caplog.text.rstrip().endswith("no dense tensors: note, step")


@pytest.mark.parametrize("content", [[1, 2], {"step": 3}, {1: 2}, {}], ids=str)
def test_a_pickle_without_named_tensors_is_refused(tmp_path, torch, content):
    torch.save(content, tmp_path / "m.bin")
    with pytest.raises(UserError, match=r"m\.bin: found .*expected a dictionary of tensors"):
        WeightFiles.open(tmp_path / "m.bin")


class Evil:
    """Unpickled without care, creates the file `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("by", ["torch", "legacy torch", "pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, torch, by):
    path, trace = tmp_path / "pytorch_model.bin", tmp_path / "trace"
    content = {"a": torch.ones(2), "b": Evil(trace)}
    if by == "pickle":
        path.write_bytes(pickle.dumps({"b": Evil(trace)}, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=by == "torch")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: refused: the pickle calls \S*mkdir"):
        WeightFiles.open(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "legacy"])
def test_a_pickle_truncated_anywhere_is_refused(tmp_path, torch, legacy):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    for kept in range(0, len(content), 3):
        path.write_bytes(content[:kept])
        with pytest.raises(UserError, match=r"pytorch_model\.bin: .+$"):
            WeightFiles.open(tmp_path)


def mapped_bytes():
    """Bytes of files that are mapped into this process and in memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip(f"{status} is not there")
    return 1024 * int(re.search(r"RssFile:\s+(\d+)", status.read_text())[1])


def test_the_pages_of_a_pickle_do_not_stay_in_memory(tmp_path, torch):
    tensors = {str(i): torch.full((2**20,), i) for i in range(8)}
    torch.save(tensors, tmp_path / "m.bin")
    weights = WeightFiles.open(tmp_path / "m.bin")
    before = mapped_bytes()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(weights.raw(name), tensor.numpy())
        assert mapped_bytes() - before < weights.nbytes / 2


def test_without_torch_a_pickle_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"pip install 'fixbin-jax\[hf\]'"):
        WeightFiles.open(tmp_path)
