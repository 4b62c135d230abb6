"""One small tokenizer for all tests of the studies; nothing is kept in the user's cache folder."""

import pytest

from experiments.traffic import corpus, tokenization
from experiments.traffic.tokenization import Encoder


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    texts = [corpus.source(path) for path in corpus.source_files()[:12]]
    return Encoder(tokenization._train(texts, 1531))


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
