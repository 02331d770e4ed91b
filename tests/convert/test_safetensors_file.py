"""The safetensors format against the safetensors library, and every way a file can be damaged."""

import contextlib
import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from convert.safetensors_file import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsFile,
    SafetensorsWriter,
    TensorSpec,
)
from fixbin_jax.errors import UserError

MANY = 10**9
NUMPY_DTYPES = ("bool", "uint8", "int16", "float16", "uint32", "float32", "int64", "float64")
ARRAYS = st.sampled_from(NUMPY_DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)


def spec_of(name, array):
    return TensorSpec(name, str(array.dtype), array.shape)


def write(folder, arrays, max_shard_bytes=MANY, dtype=None):
    specs = [TensorSpec(name, dtype or str(a.dtype), a.shape) for name, a in arrays.items()]
    with SafetensorsWriter(folder, specs, max_shard_bytes) as writer:
        for name, array in reversed(arrays.items()):
            writer.write(name, array)


def filled(file, name):
    spec = file.specs[name]
    out = np.empty(spec.size, spec.storage)
    file.fill(name, 0, out)
    return out.reshape(spec.shape)


def assert_same_bits(ours, theirs):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert ours.tobytes() == theirs.tobytes()


@given(arrays=st.dictionaries(st.text(min_size=1).filter("__metadata__".__ne__), ARRAYS))
def test_what_the_library_writes_is_read(arrays, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "any.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"note": "x"})
    file = SafetensorsFile(path)
    assert file.specs == {name: spec_of(name, array) for name, array in arrays.items()}
    assert file.nbytes == {name: array.nbytes for name, array in arrays.items()}
    for name, array in arrays.items():
        assert_same_bits(filled(file, name), array)


@given(
    arrays=st.dictionaries(
        st.text(min_size=1).filter("__metadata__".__ne__),
        st.sampled_from(("uint8", "float32", "int64")).flatmap(
            lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))
        ),
        min_size=1,
    )
)
def test_what_is_written_the_library_reads(arrays, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write(folder, arrays)
    with safetensors.safe_open(folder / SINGLE_NAME, "numpy") as theirs:
        assert theirs.metadata() == {"format": "pt"}
        assert set(theirs.keys()) == set(arrays)
        for name, array in arrays.items():
            assert_same_bits(theirs.get_tensor(name), array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_float_is_written_as_torch_reads_it(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    bits = torch.arange(2**16).to(torch.int32).to(torch.int16)
    values = bits.view(getattr(torch, dtype))
    number = ~values.isnan()
    write(tmp_path, {"odd": np.zeros(1, np.float32), "x": values.float().numpy()}, dtype=dtype)
    loaded = load_file(tmp_path / SINGLE_NAME)["x"]
    assert loaded.dtype == values.dtype
    assert torch.equal(loaded.view(torch.int16)[number], bits[number])
    assert torch.equal(loaded.isnan(), values.isnan())


def test_torch_reads_narrow_tensors_listed_before_wide_ones(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    specs = [
        TensorSpec("a", "uint8", (3,)),
        TensorSpec("b", "bfloat16", (5,)),
        TensorSpec("c", "float32", (2,)),
    ]
    with SafetensorsWriter(tmp_path, specs, MANY) as writer:
        writer.write("a", np.array([1, 2, 3], np.uint8))
        writer.write("b", np.arange(5, dtype=np.float32))
        writer.write("c", np.array([0.5, -0.0], np.float32))
    loaded = load_file(tmp_path / SINGLE_NAME)
    assert loaded["a"].tolist() == [1, 2, 3]
    assert loaded["b"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["b"].dtype == torch.bfloat16
    assert loaded["c"].tolist() == [0.5, -0.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_transposed_array_is_written_as_its_copy(tmp_path, dtype):
    stack = np.random.default_rng(0).normal(size=(2, 600, 700)).astype(np.float32)
    turned = stack.transpose(0, 2, 1)
    write(tmp_path, {"turned": turned, "copy": turned.copy()}, dtype=dtype)
    file = SafetensorsFile(tmp_path / SINGLE_NAME)
    assert_same_bits(filled(file, "turned"), filled(file, "copy"))


def test_shards_follow_the_given_order_and_are_listed(tmp_path):
    sizes = {"e": 4, "d": 4, "c": 20, "b": 8, "a": 1}
    arrays = {name: np.full(size, size, np.uint8) for name, size in sizes.items()}
    write(tmp_path, arrays, max_shard_bytes=10)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 37}
    assert index["weight_map"] == {
        "e": "model-00001-of-00003.safetensors",
        "d": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "b": "model-00003-of-00003.safetensors",
        "a": "model-00003-of-00003.safetensors",
    }
    assert {path.name for path in tmp_path.iterdir()} == {
        INDEX_NAME,
        *index["weight_map"].values(),
    }
    for name, shard in index["weight_map"].items():
        assert_same_bits(safetensors.numpy.load_file(tmp_path / shard)[name], arrays[name])


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), limit=st.integers(1, 60))
def test_no_shard_passes_the_limit_unless_it_holds_one_tensor(sizes, limit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write(folder, {str(i): np.zeros(size, np.uint8) for i, size in enumerate(sizes)}, limit)
    shards = [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]
    assert [int(name) for shard in shards for name in shard.specs] == list(range(len(sizes)))
    for shard in shards:
        assert sum(shard.nbytes.values()) <= limit or len(shard.specs) == 1
    assert (folder / INDEX_NAME).exists() == (sum(sizes) > limit and len(sizes) > 1)


def test_tensors_not_written_are_all_named(tmp_path):
    specs = [TensorSpec(name, "uint8", (4,)) for name in ("a", "b", "c")]
    with (
        pytest.raises(ValueError, match=r"not written: a, c$"),
        SafetensorsWriter(tmp_path, specs, 4) as writer,
    ):
        writer.write("b", np.zeros(4, np.uint8))
    assert not (tmp_path / INDEX_NAME).exists()


def test_an_exception_inside_the_context_passes(tmp_path):
    with (
        pytest.raises(KeyError),
        SafetensorsWriter(tmp_path, [TensorSpec("a", "uint8", (4,))], MANY),
    ):
        raise KeyError


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("a", np.zeros((2, 3), np.float32), "a: is written already"),
        ("z", np.zeros((2, 3), np.float32), "z: is not among the specs"),
        (
            "b",
            np.zeros((3, 2), np.float32),
            r"b: found float32 of shape \[3, 2\], expected",
        ),
        ("b", np.zeros((2, 3)), "b: found float64"),
        ("c", np.zeros(2, np.float32), "c: found float32 .* expected uint8"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(tmp_path, name, array, message):
    specs = [
        TensorSpec("a", "float32", (2, 3)),
        TensorSpec("b", "bfloat16", (2, 3)),
        TensorSpec("c", "uint8", (2,)),
    ]
    with (
        pytest.raises(ValueError, match=message),
        SafetensorsWriter(tmp_path, specs, MANY) as writer,
    ):
        writer.write("a", np.zeros((2, 3), np.float32))
        writer.write(name, array)


def test_a_value_too_large_for_float16_names_the_tensor(tmp_path):
    with pytest.raises(UserError, match=r"tensor big: .* 65504"):
        write(tmp_path, {"big": np.array([1.0, -1e5], np.float32)}, dtype="float16")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([TensorSpec("a", "uint8", ()), TensorSpec("a", "float32", (2,))], "more than once: a$"),
        ([TensorSpec("a", "F8_E4M3", (2,))], "tensor a: format F8_E4M3"),
    ],
)
def test_specs_that_cannot_be_written_are_refused(tmp_path, specs, message):
    with pytest.raises(ValueError, match=message):
        SafetensorsWriter(tmp_path, specs, MANY)


@contextlib.contextmanager
def no_file_beyond(nbytes):
    """Makes writes fail past this length of a file, as they do on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_disk_has_no_room_for_is_named(tmp_path):
    specs = [TensorSpec(name, "uint8", (4,)) for name in ("a", "b")]
    shard = "model-00001-of-00002.safetensors"
    with pytest.raises(OSError, match=shard), no_file_beyond(8):
        SafetensorsWriter(tmp_path, specs, 4).__enter__()
    (tmp_path / shard).unlink()

    writer = SafetensorsWriter(tmp_path, specs, 4).__enter__()
    with pytest.raises(OSError, match=shard), no_file_beyond(8):
        writer.write("a", np.ones(4, np.uint8))
    for name in ("a", "b"):
        writer.write(name, np.ones(4, np.uint8))
    with pytest.raises(OSError, match=INDEX_NAME), no_file_beyond(8):
        writer.__exit__(None, None, None)


def test_files_that_exist_are_not_overwritten(tmp_path):
    write(tmp_path, {"a": np.ones(2, np.float32)})
    before = (tmp_path / SINGLE_NAME).read_bytes()
    with pytest.raises(FileExistsError, match=SINGLE_NAME):
        write(tmp_path, {"a": np.zeros(2, np.float32)})
    assert (tmp_path / SINGLE_NAME).read_bytes() == before


def entry(begin, end, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def save(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        (b"{", 0, "the header is not JSON"),
        (b"\xff\xfe\xfd", 0, "the header is not JSON"),
        (b"[" * 100_000, 0, "the header is not JSON"),
        (b"[1]", 0, "the header is no JSON object"),
        ({"a": 1}, 0, "tensor a: found 1, expected an object"),
        ({"a": entry(0, 8) | {"shape": [-2]}}, 8, "tensor a: found"),
        ({"a": entry(0, 8) | {"shape": [2.0]}}, 8, "tensor a: found"),
        ({"a": entry(0, 8) | {"data_offsets": [0]}}, 8, "tensor a: found"),
        ({"a": entry(0, 12)}, 12, r"tensor a: data_offsets span 12 bytes, expected 8 for F32"),
        ({"a": entry(8, 0)}, 8, "tensor a: data_offsets span -8 bytes"),
        ({"a": entry(8, 0, "F8_E4M3")}, 8, "tensor a: "),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "tensor b: begins at byte 4, expected 8"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "tensor b: begins at byte 12, expected 8"),
        ({"a": entry(0, 8), "b": entry(8, 16)}, 15, "tensor b: ends at byte 16.* 15 bytes"),
        ({"a": entry(0, 8)}, 9, "9 bytes of tensors, expected 8"),
    ],
)
def test_a_damaged_file_is_refused_and_named(tmp_path, header, data_bytes, message):
    path = save(tmp_path / "damaged.safetensors", header, bytes(data_bytes))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "numpy").keys()
    with pytest.raises(UserError, match=rf"damaged\.safetensors: {message}"):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"\x02\x00", (2**63).to_bytes(8, "little") + b"{}"])
def test_a_header_longer_than_the_file_is_refused(tmp_path, content):
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"short\.safetensors: \d+ bytes are too few"):
        SafetensorsFile(path)


def test_a_file_cut_after_it_was_opened_is_an_error(tmp_path):
    path = save(tmp_path / "cut.safetensors", {"a": entry(0, 8)}, bytes(8))
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="tensor a: the file ends early"):
        filled(file, "a")
