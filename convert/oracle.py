"""A checkpoint's own PyTorch model, to compare logits with."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from convert.settle import Oracle
from convert.weights import WeightFiles
from fixbin_jax.errors import UserError


def torch_oracle(folder: Path, files: WeightFiles, *, trust_remote_code: bool) -> Oracle:
    """The model that the folder's config.json names, float32, with the folder's tensors.

    The tensors are put in by the names that `files` gives them, wrapper prefixes stripped, and
    every one of the model's must be there: from_pretrained would leave what it misses random.

    Raises:
      UserError: torch or transformers is not installed, the model's code does not run, or its
        tensors are not those of the files.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            f"{error.name}: not installed, needed to run the checkpoint's own model; "
            "pip install 'fixbin-jax[hf]'"
        ) from error
    with _offline():
        try:
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
            # transformers 4.56 renamed the argument, and the config's own key with it.
            options = {"dtype" if hasattr(config, "dtype") else "torch_dtype": torch.float32}
            auto = transformers.AutoModelForCausalLM
            if getattr(config, "auto_map", None):
                model = auto.from_config(config, trust_remote_code=trust_remote_code, **options)
                missing, extra = _fill(model, files)
            else:
                # Its own architectures have names of tensors that change as it loads them.
                loaded: Any = auto.from_pretrained(folder, output_loading_info=True, **options)
                model, loading = loaded
                missing, extra = loading["missing_keys"], loading["unexpected_keys"]
        except UserError:
            raise
        # Its code is somebody else's: it may raise anything.
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"{folder}: its own model does not load: {lines[0]}") from error
    if missing or extra:
        raise UserError(
            f"{folder}: its own model and its tensors differ: missing {sorted(missing)}, "
            f"extra {sorted(extra)}"
        )
    model.eval()

    def logits(ids_BxL: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(ids_BxL).long()).logits.float().numpy()

    return logits


def _fill(model: Any, files: WeightFiles) -> tuple[set[str], set[str]]:
    """Puts the tensors in; the model's names that have none, and the names it does not have."""
    import torch

    # A and b of an affine code are bytes; the other tensors are widened.
    state = {
        name: torch.from_numpy(
            files.raw(name) if files.dtype(name) == "uint8" else files.read(name)
        )
        for name in files.names
    }
    found = model.load_state_dict(state, strict=False)
    needed = set(found.missing_keys) - set(getattr(model, "_non_persistent_buffers_set", ()))
    return needed, set(found.unexpected_keys)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Everything is in the folder: nothing is asked of a network."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
