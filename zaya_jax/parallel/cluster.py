"""Where a process stands among those of its run, read from flags, variables or Slurm; and the roll call at the start.

    place = find_place(os.environ)      None for a process alone
    roll_call(place, seconds)           returns when all are there; LostProcess names those who are not

JAX's own start gives up with SIGABRT and says of nobody who is missing, and its Slurm detection takes one GPU per
task for granted; hence a roll call over plain TCP before it, on the port that JAX's coordinator then takes over.
"""

import dataclasses
import json
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from zaya_jax.config import UserError

# What each of the three is called as a flag and as a variable.
NAMES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
POD_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes gives it to every pod of an indexed Job, a JobSet's included
VISIBLE_DEVICES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class LostProcess(RuntimeError):
    """A process of the run that did not come, or is gone: one line, exit code 1; starting again may help."""


@dataclasses.dataclass(frozen=True)
class Place:
    """One process among `count`: the `index`-th; `devices` are the local ones it takes, () for all it sees."""

    coordinator: str
    count: int
    index: int
    devices: tuple[int, ...] = ()


def find_place(environ: Mapping[str, str], given: Mapping[str, Any] | None = None) -> Place | None:
    """The place that flags (`given`), JAX_ variables or Slurm name, in this order; None where there is one process.

    The index may also be that of a pod. UserError where what is given is incomplete or contradicts itself.
    """
    found = {name: value for name, value in (given or {}).items() if value not in (None, "")}
    found |= {n: environ[v] for n, v in NAMES.items() if n not in found and environ.get(v)}
    started = dict(found)
    if all(name in environ for name in SLURM_STEP):
        slurm = {
            "coordinator": _slurm_address(environ),
            "num_processes": environ["SLURM_NTASKS"],
            "process_id": environ["SLURM_PROCID"],
        }
        found = slurm | found
    elif (
        not found
        and _number("SLURM_NTASKS", environ.get("SLURM_NTASKS", "1")) > 1
        and "SLURM_PROCID" in environ
    ):
        unset = next(name for name in SLURM_STEP if name not in environ)
        raise UserError(
            f"this is a job of {environ['SLURM_NTASKS']} Slurm tasks, but srun did not start this one ({unset} is "
            "not set); start the program with srun, as launch/slurm.sbatch does, or ask for one task"
        )
    if POD_INDEX in environ:
        if not found:
            raise UserError(
                f"{POD_INDEX}={environ[POD_INDEX]} says that this is a pod of an indexed Job, but neither "
                "JAX_COORDINATOR_ADDRESS nor JAX_NUM_PROCESSES is set; set both, as launch/jobset.yaml does, or "
                "JAX_NUM_PROCESSES=1 for a pod alone"
            )
        found.setdefault("process_id", environ[POD_INDEX])
    if not found:
        return None
    if "num_processes" in found and _number("num_processes", found["num_processes"]) == 1:
        return None
    missing = [name for name in NAMES if name not in found]
    if missing:
        raise UserError(
            f"{_named(next(iter(found)))} is given, but not {' and '.join(map(_named, missing))}; "
            "several processes need all three, one needs none"
        )
    count, index = (_number(name, found[name]) for name in ("num_processes", "process_id"))
    if count < 1 or not 0 <= index < count:
        raise UserError(
            f"process_id={index} of num_processes={count} is no process; indices go from 0 to num_processes - 1"
        )
    coordinator = str(found["coordinator"])
    if not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise UserError(f"{_named('coordinator')} is {coordinator!r}; give host:port of process 0")
    return Place(coordinator, count, index, () if "process_id" in started else _slurm_devices(environ))


def _named(name: str) -> str:
    return f"--{name} ({NAMES[name]})"


def _number(name: str, text: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} is no whole number; see docs/clusters.md for what to set") from None


def _slurm_address(environ: Mapping[str, str]) -> str:
    """First host of the step's list (a1,a2 or a[01-16,20]-ib), and a port that differs from job to job."""
    first = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", environ["SLURM_STEP_NODELIST"])
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']!r} names no host")
    port = (
        environ.get("JAX_COORDINATOR_PORT") or 61440 + _number("SLURM_JOB_ID", environ["SLURM_JOB_ID"]) % 4096
    )
    return f"{''.join(part or '' for part in first.groups())}:{port}"


def _slurm_devices(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The device of this task, unless it has the node for itself or sees only its own already."""
    visible = [environ[name] for name in VISIBLE_DEVICES if environ.get(name)]
    bound = any("," not in devices for devices in visible)
    alone = re.fullmatch(r"1(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if bound or alone or "SLURM_LOCALID" not in environ:
        return ()
    return (_number("SLURM_LOCALID", environ["SLURM_LOCALID"]),)


def roll_call(place: Place, seconds: float) -> None:
    """Returns on every process when all have called; LostProcess names those who did not within `seconds`."""
    deadline = time.monotonic() + seconds
    host, port = place.coordinator.rsplit(":", 1)
    if place.index == 0:
        _call_the_roll(int(port), place.count, deadline, seconds)
    else:
        _answer(host, int(port), place, deadline, seconds)


def _call_the_roll(port: int, count: int, deadline: float, seconds: float) -> None:
    here: dict[int, str] = {0: socket.gethostname()}
    lines = []
    refusal: Exception | None = None
    dual = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=1024
        )
    except OSError as error:
        raise UserError(
            f"the coordinator's port {port} cannot be opened ({error.strerror}); give another, as JAX_COORDINATOR_PORT "
            "or in the coordinator's address"
        ) from None
    with server:
        while len(here) < count and refusal is None:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                line, _ = server.accept()
            except TimeoutError:
                absent = [i for i in range(count) if i not in here]
                refusal = LostProcess(
                    f"{name_processes(absent)} of {count} did not come within {seconds:.0f} s"
                )
                continue
            try:
                line.settimeout(10)
                with line.makefile() as reader:
                    index, told, host = json.loads(reader.readline())
            except (OSError, ValueError, TypeError):  # somebody else's connection
                line.close()
                continue
            if told != count:
                refusal = UserError(
                    f"process {index} on {host} counts {told} processes, process 0 counts {count}"
                )
            elif index in here:
                refusal = UserError(f"process {index} is there twice, on {here[index]} and on {host}")
            here[index] = host
            lines.append(line)
        answer = [isinstance(refusal, UserError), str(refusal or "")]
        for line in lines:
            _send(line, answer)
        for line in lines:  # they hang up first, else the port would not be free at once
            _wait_for_end(line)
    if refusal:
        raise refusal


def _answer(host: str, port: int, place: Place, deadline: float, seconds: float) -> None:
    why: Any = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=10) as line:
                line.settimeout(max(deadline + 10 - time.monotonic(), 1))  # process 0 may have begun later
                _send(line, [place.index, place.count, socket.gethostname()])
                with line.makefile() as reader:
                    answer = reader.readline()
            if answer:
                break
            why = "it hung up"
        except OSError as error:
            why = error.strerror or error
        time.sleep(0.2)
    else:
        raise LostProcess(
            f"process {place.index}: process 0 does not answer at {place.coordinator} within {seconds:.0f} s ({why}); "
            "see its log, and whether the address can be reached from here"
        )
    bad_input, refusal = json.loads(answer)
    if refusal:
        raise UserError(refusal) if bad_input else LostProcess(refusal)


def _send(line: socket.socket, message: list) -> None:
    try:
        line.sendall((json.dumps(message) + "\n").encode())
    except OSError:
        return  # the other end notices


def _wait_for_end(line: socket.socket) -> None:
    with line:
        try:
            line.recv(1)
        except OSError:
            return


def name_processes(indices: list[int]) -> str:
    """process 3; processes 1, 4 and 5; beyond sixteen only how many more."""
    names = [str(i) for i in indices[:16]]
    if len(indices) > 16:
        names.append(f"{len(indices) - 16} more")
    if len(names) == 1:
        return f"process {names[0]}"
    return f"processes {', '.join(names[:-1])} and {names[-1]}"
