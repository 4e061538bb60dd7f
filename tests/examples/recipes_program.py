"""Runs recipes, each with two replicas; see ``test_recipes.py``.

    python recipes_program.py FOLDER RECIPE ...

The libraries are imported once. Each replica, each rank and each plain script is a process forked
from this one, which writes its output to ``FOLDER/<recipe>.<name>.log``. ``FOLDER/exits.json`` has
the exit codes.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.emulators.serving import free_ports
from tests.torch_process import execute, wait

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
SHARED = {"tiny", "tiny_gpt", "plain", "demonstrate"}
NAMES = sorted({path.stem for path in RECIPES.glob("*.py")} - SHARED)
IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.trainer",
    "peft",
    "trl",
    "accelerate",
    "lightning.pytorch",
    "diloco.group",
)
RANKS = {"accelerate_loop": (2, 1), "fsdp2_loop": (2, 1)}
"""Ranks of replicas 0 and 1, if a replica has several."""


class Played:
    """Starts the processes of a recipe."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder, self.recipe = folder, recipe
        self.context = multiprocessing.get_context("fork")

    def fork(self, script: Path, name: str, **environment: str) -> BaseProcess:
        words = [str(script), f"{self.folder}/{self.recipe}.run", str(self.folder)]
        return self.fork_with(words, name, **environment)

    def fork_with(self, words: list[str], name: str, **environment: str) -> BaseProcess:
        log = self.folder / f"{self.recipe}.{name}.log"
        env = {**os.environ, **environment}
        process = self.context.Process(target=execute, args=(words, env, self.folder, log, log))
        process.start()
        return process

    def replicas(self) -> list[BaseProcess]:
        script, processes = RECIPES / f"{self.recipe}.py", []
        for replica, ranks in enumerate(RANKS.get(self.recipe, (1, 1))):
            port = str(free_ports(1)[0])
            for rank in range(ranks):
                environment = {"REPLICA_RANK": str(replica)}
                if ranks > 1:
                    environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
                    environment |= {"LOCAL_RANK": str(rank), "MASTER_PORT": port}
                    environment |= {"MASTER_ADDR": "127.0.0.1"}
                processes.append(self.fork(script, f"{replica}.{rank}", **environment))
        return processes

    def plain(self, steps: int) -> BaseProcess:
        from plain import plain

        script = self.folder / f"{self.recipe}.py"
        script.write_text(plain((RECIPES / f"{self.recipe}.py").read_text()))
        return self.fork(script, "plain", MAX_STEPS=str(steps))


def main(folder: Path, recipes: list[str]) -> None:
    sys.path.insert(0, str(RECIPES))
    for module in IMPORTED:
        importlib.import_module(module)
    tiny = [str(RECIPES / "tiny.py"), str(folder)]
    exits = {"tiny": wait([Played(folder, "tiny").fork_with(tiny, "base")])}
    for recipe in recipes:
        played = Played(folder, recipe)
        exits[recipe] = wait(played.replicas())
        exits[f"{recipe} plain"] = wait([played.plain(steps=3)])
    (folder / "exits.json").write_text(json.dumps(exits))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
