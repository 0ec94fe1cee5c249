"""docs/config.md, made of the keys' own declarations; a test holds that the page is what this makes.

python -m tools.config_page > docs/config.md
"""

import sys

from zaya_jax.config.page import groups

INTRODUCTION = """\
<!-- Made by `python -m tools.config_page > docs/config.md`; edit zaya_jax/config/keys.py. -->

# The config

A config file is Python with `get_config()`, which starts from `zaya_jax.config.default()` and changes what it needs
(`experiments/configs`). On the command line each key is `--config.KEY=VALUE`, phases excepted. A value that is none of
what its row allows is refused by name, before anything is compiled or written; so are NaN and infinities, everywhere.
"""


def page() -> str:
    """docs/config.md."""
    parts = [INTRODUCTION]
    for title, about, rows in groups():
        parts.append(f"\n## {title}\n\n{about}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n")
        for row in rows:
            key, default, allowed = (f"`{text}`" if text else "" for text in row[:3])
            parts.append(f"| {key} | {default} | {allowed} | {row.meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
