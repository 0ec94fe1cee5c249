"""Small corpora and configs for the tests of data."""

from data_helpers import corpus, in_process, make_config, prepare_text  # noqa: F401, fixtures
