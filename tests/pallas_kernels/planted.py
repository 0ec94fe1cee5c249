"""The child of `tune` with planted faults: `python -m tests.pallas_kernels.planted
OPERATOR=FAULT[@CASE] ..`.

OPERATOR's own kernels have the FAULT (kills or hangs), in all cases or
in those whose label begins with CASE. Each kernel has as many other tiles as `tiles=` says.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels import chip, trying


def with_faults(case: trying.TriedCall, fault: str, dtype: Any) -> Callable:
    plain = case.call(dtype)
    what, _, where = fault.partition("@")

    def run(arguments, sums):
        if case.operator in chip.current().kernels and case.label.startswith(where):
            # while it is traced
            if what == "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hangs":
                time.sleep(1e4)
        return plain(arguments, sums)

    return run


def main() -> int:
    faults = dict(argument.split("=") for argument in sys.argv[1:])
    request_cases, tiles_to_measure = trying.request_cases, trying.candidates.tiles_to_measure

    def planted(request: Mapping[str, Any], operator: str) -> list[trying.TriedCall]:
        fault = faults.get(operator, "")
        return [
            case._replace(call=functools.partial(with_faults, case, fault))
            for case in request_cases(request, operator)
        ]

    trying.request_cases = planted
    trying.candidates.tiles_to_measure = lambda *given: tiles_to_measure(*given)[
        : int(faults.get("tiles", 0))
    ]
    trying.SAMPLES = 1e-3
    trying.timing.LEAST = 2
    return trying.main()


if __name__ == "__main__":
    sys.exit(main())
