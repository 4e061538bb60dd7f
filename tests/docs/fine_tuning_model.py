"""A small model and text in place of those of docs/tutorials/fine-tuning.md.

    python -m tests.docs.fine_tuning_model dist

walks the tutorial in an empty folder with the wheel in ``dist`` as it is written, and prints the
seconds after each command. The Hub is an emulator on this machine, which serves the small model
under the name that the tutorial has.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from scripts.try_tutorial import Tutorial, run

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = Tutorial(ROOT / "docs" / "tutorials" / "fine-tuning.md")
NAME = "HuggingFaceTB/SmolLM2-135M"
CONTEXT = 129


def model_files(folder: Path) -> dict[str, bytes]:
    """The files of a Llama of 22,500 parameters that has learned sentences in their usual order,
    and of its tokenizer."""
    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    import tiny

    tiny.CONTEXT = CONTEXT
    tiny.base_model(steps=60).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_text(folder: Path) -> None:
    """The user's text: the same sentences in reversed order."""
    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    import tiny

    for name, shard, files in (("text", 0, 4), ("test", tiny.HELD_OUT, 1)):
        (folder / name).mkdir()
        for number in range(files):
            text = "\n".join(tiny.texts(shard + number, 8192 // tiny.CONTEXT))
            (folder / name / f"{number}.txt").write_text(text)


def main(dist: Path) -> None:
    from tests.model_hub import running_model_hub

    with tempfile.TemporaryDirectory() as folder, running_model_hub() as hub:
        hub.others[NAME] = model_files(Path(folder) / "base")
        work = Path(folder) / "work"
        work.mkdir()
        write_text(work)
        begun = time.monotonic()
        print(run(TUTORIAL, dist, work, environment=os.environ | hub.env))
        print(f"{time.monotonic() - begun:.0f} s, typed lines: {TUTORIAL.typed_lines}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
