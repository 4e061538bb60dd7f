"""Run a tutorial of docs/tutorials in an empty folder, as a newcomer would.

    python scripts/try_tutorial.py dist

runs the commands and the script of ``your-own-model.md`` as they are written, with the wheel in
``dist``, and prints the seconds after each command. The local S3 gets free ports. Exit status: that
of the commands.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(
    r"^Save this as `(\w+\.py)`.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
_S3_PORT = 8333
_SERVERS = ("master", "volume", "filer", "s3", "admin")
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Tutorial:
    """A page with commands, and with scripts to save (*Save this as `name.py`*)."""

    page: Path

    @property
    def text(self) -> str:
        return self.page.read_text()

    @property
    def scripts(self) -> dict[str, str]:
        """The scripts by file name."""
        return dict(_SCRIPT.findall(self.text))

    @property
    def commands(self) -> list[str]:
        """The lines that a newcomer types into the shell."""
        return [line for block in _BLOCK.findall(self.text) for line in block.splitlines()]

    @property
    def typed_lines(self) -> int:
        """The number of lines of commands and of the scripts, without empty ones."""
        script_lines = [line for text in self.scripts.values() for line in text.splitlines()]
        return len(self.commands) + sum(bool(line) for line in script_lines)

    def shell_program(self, ports: Mapping[str, int], *, after_first: str = "") -> str:
        """Return the commands as a program of bash. ``after_first`` is inserted after the command
        that creates the virtual environment."""
        first, *others = [_with_ports(line, ports) for line in self.commands]
        lines = ["set -e", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
        for line in [first, after_first, *others] if after_first else [first, *others]:
            # The end of a process in the background counts too, but not that of a server.
            wait = ["wait $!"] if re.search(r" & \w", line) else []
            lines += [line, *wait, f'echo "[$SECONDS s] "{_quoted(line)}']
        return "\n".join(lines) + "\n"


OWN_MODEL = Tutorial(Path(__file__).resolve().parent.parent / "docs/tutorials/your-own-model.md")


def _with_ports(line: str, ports: Mapping[str, int]) -> str:
    line = line.replace(f":{_S3_PORT}", f":{ports['s3.port']}")
    options = [*(f"-{name}={port}" for name, port in ports.items()), "-webdav=false"]
    options += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    return line.replace("weed mini ", f"weed mini {' '.join(options)} ")


def _quoted(line: str) -> str:
    return "'" + line.replace("'", "'\\''") + "'"


def free_ports() -> dict[str, int]:
    """Return a free port for each option of SeaweedFS that takes one."""
    names = [f"{server}.port{kind}" for server in _SERVERS for kind in ("", ".grpc")]
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in names]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}


def run(
    tutorial: Tutorial,
    dist: Path,
    folder: Path,
    *,
    after_first: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run the tutorial in ``folder`` with the wheel in ``dist``; return the output.

    Raises :class:`subprocess.CalledProcessError` with the output if a command fails.
    """
    shutil.copytree(dist, folder / "dist")
    for name, text in tutorial.scripts.items():
        (folder / name).write_text(text)
    given = dict(os.environ if environment is None else environment)
    given.pop("REPLICA_RANK", None)
    command = ["bash", "-c", tutorial.shell_program(free_ports(), after_first=after_first)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "the tutorial", output)
    return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="folder with the wheel")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(run(OWN_MODEL, arguments.dist, Path(folder)), end="")
        except subprocess.CalledProcessError as error:
            print(f"{error.output}error: expected status 0, found {error.returncode}")
            return 1
    print(f"typed lines: {OWN_MODEL.typed_lines}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
