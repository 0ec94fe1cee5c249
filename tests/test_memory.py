"""A program's memory on a CPU: kept from step to step, in huge pages, and not growing."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# A program with 128 MiB of temporaries, asked for again before its last result is looked at, as a training loop does.
PROGRAM = """
import json, resource, sys
from zaya_jax.hardware import host
if sys.argv[1] == "kept":
    host.keep_memory()
import jax, jax.numpy as jnp

@jax.jit
def step(x):
    rows = jax.lax.optimization_barrier(jnp.broadcast_to(x, (16, *x.shape)) + 1)
    return jax.lax.optimization_barrier(rows.at[0].set(x)).sum(0) / 16

x, counts = jnp.ones((1024, 2048)), []
for _ in range(12):
    for _ in range(3):
        x = step(x)
    x.block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
huge = sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages"))
print(json.dumps({"faults": [b - a for a, b in zip(counts, counts[1:])], "huge_mib": huge // 1024}))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be set to keep memory")
def test_steps_take_no_new_pages():
    def run(how):
        environment = os.environ | {"XLA_FLAGS": ""}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], env=environment, check=True, capture_output=True, text=True
        )
        return json.loads(done.stdout)

    kept, plain = run("kept"), run("plain")
    three_steps = 3 * 2**27 // os.sysconf("SC_PAGE_SIZE")
    assert min(plain["faults"]) > three_steps / 2  # else this measures nothing
    assert sum(kept["faults"][3:]) < three_steps / 10
    if HUGE_PAGES.is_file() and "[never]" not in HUGE_PAGES.read_text():
        assert kept["huge_mib"] >= 100
