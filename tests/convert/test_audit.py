import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import audit, to_hf
from fixbin_jax.codes import affine_code, code_table
from fixbin_jax.config import InputConfig
from tests.convert.runs import make_run, run_tokenizer

INPUTS = {
    "learned": InputConfig("learned"),
    "binary": InputConfig("binary", zero_ids=(7,)),
    "affine": InputConfig("affine", code_width=11, lift="interleave"),
}


@pytest.fixture(scope="module", params=INPUTS)
def interface(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(interface: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "run"
    return make_run(folder, run_tokenizer(), input=INPUTS[interface])


def export(run: Path, output: Path, format: str) -> Path:
    to_hf.export(str(run), output, format=format, dtype="float32", max_shard_bytes=10**9)
    return output


def change_table(folder: Path, name: str, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = np.ascontiguousarray(change(tensors[name].copy()))
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("format", ["run", *to_hf.FORMATS])
def test_what_a_model_is_is_found_in_every_form_of_it(tmp_path, run, interface, format):
    path = run if format == "run" else export(run, tmp_path / "out", format)
    found = audit.audit(path)
    assert (found.interface, found.claim_holds, found.mismatches) == (interface, True, ())
    assert found.trained == (304 * 32 if interface == "learned" else 0)
    shapes = {
        ("learned", "run"): (304, 32),
        ("learned", "fixbin"): (304, 32),
        ("binary", "fixbin"): (304, 9),
        ("affine", "fixbin"): (11, 9),
    }
    code = None if interface == "learned" else INPUTS[interface].code(304)
    assert found.shape == shapes.get((interface, format), None if format == "run" else (304, 32))
    # Id 7 shares the code of id 0.
    assert found.injective == (interface != "binary")
    if code is not None:
        assert (found.row_masks, found.shift) == (code.row_masks, code.shift)
        assert (found.zero_ids, found.lift) == (code.zero_ids, code.lift)


def test_a_damaged_codebook_is_no_code_and_the_rows_at_fault_are_listed(tmp_path):
    run = make_run(tmp_path / "run", run_tokenizer(), input=INPUTS["binary"])
    for value in (0.5, None):
        out = export(run, tmp_path / f"out{value}", "fixbin")

        def damage(table: np.ndarray, value: float | None = value) -> np.ndarray:
            for row in (20, 200):
                table[row, 3] = 1 - table[row, 3] if value is None else value
            return table

        change_table(out, "input.embedding.weight", damage)
        found = audit.audit(out)
        assert (found.interface, found.claim, found.claim_holds) == ("other", "binary", False)
        assert found.mismatches == (20, 200)
        assert found.binary_values == (value is None)


def test_a_folder_that_claims_another_interface_is_found_out(tmp_path):
    run = make_run(tmp_path / "run", run_tokenizer(), input=INPUTS["learned"])
    out = export(run, tmp_path / "out", "fixbin")
    code = affine_code(304, seed=3)
    change_table(
        out, "input.embedding.weight", lambda _: code_table(code, np.arange(304), 32).astype("f4")
    )
    found = audit.audit(out)
    assert (found.interface, found.claim, found.claim_holds) == ("affine", "learned", False)
    assert (found.row_masks, found.shift, found.trained) == (code.row_masks, code.shift, 0)


def test_a_zero_row_that_the_config_does_not_name_is_found_out(tmp_path):
    run = make_run(tmp_path / "run", run_tokenizer(), input=INPUTS["binary"])
    out = export(run, tmp_path / "out", "fixbin")

    def clear(table: np.ndarray) -> np.ndarray:
        table[100] = 0
        return table

    change_table(out, "input.embedding.weight", clear)
    found = audit.audit(out)
    assert (found.zero_ids, found.claim_holds) == ((7, 100), False)
    assert found.reason == "config.json, zero_ids: [7], the weights have [7, 100]"


def test_a_singular_matrix_is_not_injective(tmp_path):
    run = make_run(tmp_path / "run", run_tokenizer(), input=INPUTS["affine"])
    out = export(run, tmp_path / "out", "fixbin")

    def repeat_column(matrix: np.ndarray) -> np.ndarray:
        matrix[:, 0] = matrix[:, 1]
        return matrix

    change_table(out, "input.matrix", repeat_column)
    found = audit.audit(out)
    assert (found.interface, found.injective, found.claim_holds) == ("other", False, False)
    assert "rank 8, expected rank 9" in found.reason


def test_the_command_prints_json_and_its_status_is_the_verdict(tmp_path, capsys):
    from absl import flags

    run = make_run(tmp_path / "run", run_tokenizer(), input=INPUTS["binary"])
    out = export(run, tmp_path / "out", "fixbin")

    def command(*args: str) -> int:
        fv = flags.FlagValues()
        audit.define_flags(fv)
        fv(["audit", f"--path={out}", *args])
        return audit.main(fv)

    assert command("--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(dataclasses.asdict(audit.audit(out)))
    )
    assert command() == 0
    assert "zero ids       1: 7\n" in capsys.readouterr().out
    change_table(out, "input.embedding.weight", lambda table: table[::-1])
    assert command() == 1
