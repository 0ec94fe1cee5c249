"""Shows the >>> examples of docstrings as code: Markdown would take them for three nested
quotations."""

import re

import griffe

EXAMPLE = re.compile(r"(?:^ *>>> .*\n?(?:^ *(?!>>>)\S.*\n?|^ *>>> .*\n?)*)", re.M)


class Examples(griffe.Extension):
    """Puts examples into fences."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for each object as it is read."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match) -> str:
    lines = match[0].rstrip("\n").splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(["", "```python", *(line[indent:] for line in lines), "```", ""])
