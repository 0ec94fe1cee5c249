"""Small corpora and configs for the tests of text."""

from data_helpers import corpus, in_process, make_config  # noqa: F401, fixtures
