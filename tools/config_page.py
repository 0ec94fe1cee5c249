"""docs/config.md, made from the keys' own declarations; a test compares the page with this
program's output.

python -m tools.config_page > docs/config.md
"""

import sys

from zaya_jax.config.page import groups

INTRODUCTION = """\
<!-- Made by `python -m tools.config_page > docs/config.md`; edit zaya_jax/config/keys.py. -->

# The config

A config file is Python with `get_config()`, which starts from `zaya_jax.config.default()` and changes some keys
(`experiments/configs`). On the command line each key except phases is `--config.KEY=VALUE`.

A value outside its row's range, a NaN or an infinity ends the command with a line that names the key, before anything
is compiled or written. If a key differs from its default and has no effect beside the others, such as `run.beta`
without `run.preference=dpo`, a note names it: at a run's start, by `--describe`, and in the pages of `experiments.plan`
and `experiments.compile`.
"""


def page() -> str:
    """docs/config.md."""
    parts = [INTRODUCTION]
    for title, about, rows in groups():
        parts.append(
            f"\n## {title}\n\n{about}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n"
        )
        for *row, meaning in rows:
            key, default, allowed = (f"`{text}`" if text else "" for text in row)
            parts.append(f"| {key} | {default} | {allowed} | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
