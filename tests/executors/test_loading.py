"""SDKs are imported before their first use; waiting for an import has its own timeout."""

from __future__ import annotations

import threading

from executors.loading import Loader

PATIENCE_S = 60.0


def test_waiting_for_an_import_has_its_own_timeout() -> None:
    go_on, loaded = threading.Event(), []

    def load(backend: str) -> None:
        assert go_on.wait(PATIENCE_S)
        loaded.append(backend)

    loader = Loader(load)
    assert loader.wait_loaded(["modal", "sagemaker"], patience_s=0.01) == {"modal", "sagemaker"}
    go_on.set()
    assert loader.wait_loaded(["modal", "sagemaker"], patience_s=PATIENCE_S) == set()
    assert loader.wait_loaded(["modal"], patience_s=0.0) == set()
    assert loaded == ["modal", "sagemaker"]  # each once


def test_awaited_backends_are_imported_first() -> None:
    begun, go_on = threading.Event(), threading.Event()
    loaded: list[str] = []

    def load(backend: str) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        loaded.append(backend)

    loader = Loader(load)
    loader.warm_up(["local", "modal", "kubernetes"])
    assert begun.wait(PATIENCE_S)
    assert loader.wait_loaded(["kubernetes"], patience_s=0.0) == {"kubernetes"}
    go_on.set()
    assert loader.wait_loaded(["modal", "kubernetes", "local"], patience_s=PATIENCE_S) == set()
    assert loaded == ["local", "kubernetes", "modal"]


def test_a_client_that_is_not_installed_counts_as_loaded() -> None:
    def load(backend: str) -> None:
        raise ImportError(f"no client of {backend}")

    loader = Loader(load)
    assert loader.wait_loaded(["modal", "unknown"], patience_s=PATIENCE_S) == set()


def test_threads_that_wait_share_one_import() -> None:
    loaded: list[str] = []
    loader = Loader(loaded.append)
    threads = [
        threading.Thread(target=loader.wait_loaded, args=(["modal"],), kwargs={"patience_s": 60.0})
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert loaded == ["modal"]
