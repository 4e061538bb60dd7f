"""A forked child can use a store of its parent, although clients do not survive a fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.matrix import matrix

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, signal, sys
from diloco.store.fsspec import FsspecStore
from diloco.store.s3 import ObstoreStore
from diloco.store.remote import PerProcessStore
from diloco.store.open import open_store

def connect():
    return FsspecStore(sys.argv[1])

store = PerProcessStore(connect) if sys.argv[2] == "s3fs" else open_store(sys.argv[1])
engine = ObstoreStore if sys.argv[2] == "obstore" else FsspecStore
assert isinstance(store.inner, engine)
store.put("from/parent", b"1")
child = os.fork()
if not child:
    signal.alarm(60)  # a client that hangs ends the child
    code = 1
    try:
        assert store.get("from/parent") == b"1"
        store.put("from/child", b"2")
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0, "the child failed"
assert store.get("from/child") == b"2"
assert isinstance(store.inner, engine)
"""


@matrix("engine", ["obstore", "s3fs"], fast=1)
def test_forked_child_opens_a_new_client(s3_uri: str, engine: str) -> None:
    command = [sys.executable, "-c", SCRIPT, s3_uri, engine]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
