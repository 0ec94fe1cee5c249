"""Events passed to a command: never waited for, failures counted."""

import json
import sys
import time

from zaya_jax.aegis.keeping import Hook
from zaya_jax.cluster.events import RunEvent

DIED = RunEvent(
    "died", 10.0, "distributed", "node3", 7, 1200, "SIGKILL", "disk full", "restart at once", 0.25
)


def script(tmp_path, text):
    path = tmp_path / "tell.py"
    path.write_text(text)
    return [sys.executable, path]


def test_a_command_gets_the_event(tmp_path):
    out = tmp_path / "out"
    text = (
        f"import os, sys\nopen({str(out)!r}, 'a').write(os.environ['ZAYA_TEXT'] + sys.stdin.read())"
    )
    hook = Hook(script(tmp_path, text))
    hook.tell(DIED)
    hook.close()
    words, _, body = out.read_text().partition("{")
    assert words == DIED.text()
    assert words == "died process 7 on node3 at step 1200: SIGKILL; disk full; restart at once"
    assert json.loads("{" + body)["kind"] == "died" and hook.failed == 0


def test_a_command_that_hangs_is_not_waited_for_and_one_that_fails_is_counted(tmp_path):
    hook = Hook(script(tmp_path, "import time; time.sleep(60)"), seconds=0.5)
    begin = time.monotonic()
    for _ in range(300):
        hook.tell(DIED)
    assert time.monotonic() - begin < 5
    assert hook.lost >= 199  # a hundred wait, one or so is being sent
    time.sleep(1.2)
    assert hook.failed >= 1
    failing = Hook(["/nowhere/at/all"])
    failing.tell(DIED)
    failing.close()
    assert failing.failed == 1
