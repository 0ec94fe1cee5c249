"""Small corpora and configs for the tests of text."""

from data_helpers import corpus, in_process  # noqa: F401, fixtures
