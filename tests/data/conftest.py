"""Small corpora and configs for the tests of data."""

from data_helpers import corpus, in_process, prepare_text  # noqa: F401, fixtures
