import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# These two set up an environment; .ci/run calls one, and the quickstart below is the other.
MAKE = {"make train", "make test"}


def commands(page: Path) -> list[str]:
    """What stands behind `$ ` in the page's console blocks."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
        joined = block.replace("\\\n", " ")
        found += [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]
    return [command for command in found if command not in MAKE]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout in which the quickstart has been trained, briefly."""
    place = tmp_path_factory.mktemp("checkout")
    for name in ("train.py", "configs", "fixbin_jax", "docs", "README.md"):
        (place / name).symlink_to(ROOT / name)
    run(
        place,
        "python train.py --config=configs/quickstart.py --workdir=runs/quickstart "
        "--config.train.num_steps=3 --config.train.eval_batches=1",
    )
    return place


def run(place: Path, command: str) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # As on a machine on which nothing is set: one device.
        "XLA_FLAGS": "",
    }
    result = subprocess.run(
        command, shell=True, cwd=place, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs_as_it_stands(page: Path, place: Path) -> None:
    found = commands(page)
    assert found
    for command in found:
        run(place, command)


def test_the_readme_shows_the_two_commands_and_its_python_runs() -> None:
    text = (ROOT / "README.md").read_text()
    assert {line.removeprefix("$ ").strip() for line in text.splitlines()} >= MAKE
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
