"""One small model of fresh weights for all that scores here."""

import pytest
from small_models import settings

import zaya_jax as zj
from zaya_jax.text import tokenizers


@pytest.fixture(scope="session")
def model():
    """On one device."""
    return zj.create(settings())


@pytest.fixture(scope="session")
def tokenizer():
    return tokenizers.load("bytes")


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory):
    """The model as a run's folder."""
    return model.save(tmp_path_factory.mktemp("runs") / "small")
