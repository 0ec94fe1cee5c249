"""Runs a command as several nodes of a network whose links have a chosen bandwidth, on this machine.

    python -m tools.network --nodes=4 --rate=100 [--delay=5] -- COMMAND...

Each node is a process in a network namespace of its own, with one link to a switch: `--rate` is its
bandwidth each way in Mbit/s (0: not limited), `--delay` the milliseconds from one node to another.
Nodes have the addresses 10.0.0.1 and so on, and the variables by which this project's programs find
each other (docs/clusters.md). A node's host name is its address: gloo listens where the host's name
leads, and programs that count hosts see one a node.

All of this lies in namespaces that the program's own processes hold, so the machine's network is
not changed, and the kernel takes everything away when the program ends or is killed. The exit code
is the first that is not 0, after which the other nodes are killed; 77 where the machine does not
allow such a network.
"""

import argparse
import collections
import ctypes
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from zaya_jax import cli

FORBIDDEN = 77
PROGRAMS = ("setpriv", "unshare", "mount", "ip", "tc")  # of util-linux and iproute2
PORT = 9876  # of JAX's coordinator, which has node 0's addresses to itself
BURST = 0.002  # seconds at full rate that pass unlimited after a silence
QUEUE = "64mb"  # that may wait for a link: more than all senders' windows, so that none is dropped
ETHTOOL, SET_CHECKSUMS = 0x8946, 0x17
OUTGOING = 4  # the mark of a frame that this end sent

# All that is made lives in these namespaces, and they end with the processes in them. setpriv and
# --kill-child kill the first process when this program ends, and the kernel then kills the others.
ENTER = (
    "setpriv --pdeathsig=KILL unshare --net --pid --mount --uts --fork --kill-child --mount-proc"
)


def address(node: int) -> str:
    """Where a node listens."""
    return f"10.0.0.{node + 1}"


def execute(command: str) -> None:
    """Runs ip, tc or mount; CalledProcessError has their message."""
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


def lay(nodes: int, rate: float, has_relay: bool) -> None:
    """Makes the nodes' namespaces, the switch, which a relay replaces, and the links."""
    execute("mount -t tmpfs tmpfs /run")  # where ip keeps the names of namespaces: only ours now
    execute("ip link add name switch type bridge")
    execute("ip link set switch up")
    for node in range(nodes):
        name, port = f"node{node}", f"port{node}"
        execute(f"ip netns add {name}")
        execute(f"ip link add name {port} type veth peer name eth0 netns {name}")
        execute(f"ip -n {name} link set eth0 address 02:00:00:00:00:{node:02x} up")
        execute(f"ip -n {name} address add {address(node)}/24 dev eth0")
        execute(f"ip -n {name} link set lo up")
        execute(f"ip link set {port} up" if has_relay else f"ip link set {port} master switch up")
        if rate:
            burst = max(3000, round(BURST * rate * 1e6 / 8))
            limit = f"root tbf rate {rate}mbit burst {burst} limit {QUEUE}"
            execute(f"tc qdisc add dev {port} {limit}")
            execute(f"tc -n {name} qdisc add dev eth0 {limit}")


def start_node(
    node: int, nodes: int, command: Sequence[str], has_relay: bool
) -> subprocess.Popen[bytes]:
    """Starts the command in a node's namespace."""

    def enter() -> None:
        os.setns(os.open(f"/run/netns/node{node}", os.O_RDONLY | os.O_CLOEXEC), os.CLONE_NEWNET)
        os.unshare(os.CLONE_NEWUTS)
        socket.sethostname(address(node))
        if has_relay:
            fill_in_checksums()

    variables = {
        "JAX_COORDINATOR_ADDRESS": f"{address(0)}:{PORT}",
        "JAX_NUM_PROCESSES": str(nodes),
        "JAX_PROCESS_ID": str(node),
    }
    return subprocess.Popen(command, env=os.environ | variables, preexec_fn=enter)


def fill_in_checksums() -> None:
    """Has the system compute the checksums of what this node sends, as `ethtool -K eth0 tx off`.

    veth leaves them to the receiver's system, which does not ask for those of its own frames; those
    that a relay passes on are strange to it.
    """
    off = ctypes.create_string_buffer(struct.pack("II", SET_CHECKSUMS, 0))
    with socket.socket() as asking:
        fcntl.ioctl(asking, ETHTOOL, struct.pack("16sP", b"eth0", ctypes.addressof(off)))


def relay(ports: Sequence[socket.socket], delay: float) -> None:
    """Passes frames on from node to node, each `delay` seconds after it came."""
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], patience)[0]:
            frame, origin = port.recvfrom(1 << 16)
            if origin[2] != OUTGOING:
                waiting.append((time.monotonic() + delay, ports.index(port), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, sender, frame = waiting.popleft()
            to_all = frame[0] & 1
            for node, port in enumerate(ports):
                if node == frame[5] or (to_all and node != sender):
                    port.send(frame)


def port_of(node: int) -> socket.socket:
    """The switch's end of a node's link, for the relay."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(socket.ETH_P_ALL))
    port.bind((f"port{node}", 0))
    return port


def run_nodes(args: argparse.Namespace) -> int:
    """Lays the network in the namespaces that this process was started in, and runs the nodes."""
    has_relay = args.delay > 0
    try:
        lay(args.nodes, args.rate, has_relay)
    except subprocess.CalledProcessError as error:
        return refuse(f"{' '.join(error.cmd)}: {error.stderr}")
    if has_relay:
        ports = [port_of(node) for node in range(args.nodes)]
        threading.Thread(target=relay, args=(ports, args.delay / 1e3), daemon=True).start()
    nodes = [start_node(node, args.nodes, args.command, has_relay) for node in range(args.nodes)]
    running = {process.pid for process in nodes}
    while running:
        pid, status = os.wait()  # this is their init, so orphans of theirs come here too
        code = os.waitstatus_to_exitcode(status)
        if pid in running and code:
            return code if code > 0 else 128 - code
        running.discard(pid)
    return 0


def refuse(reason: str) -> int:
    """Says why there is no network."""
    line = " ".join(reason.split())
    print(f"tools.network: skipped: this machine allows no such network ({line})", file=sys.stderr)
    return FORBIDDEN


def main() -> int:
    """Enters the namespaces, and runs this program again in them."""
    parser = argparse.ArgumentParser(prog="python -m tools.network", description=__doc__)
    add = parser.add_argument
    add("--nodes", type=cli.number(int, 1, 200), default=4, metavar="N", help="how many; 4")
    add("--rate", type=cli.number(float, 0), default=0.0, metavar="MBITS", help="Mbit/s of a link")
    add("--delay", type=cli.number(float, 0), default=0.0, metavar="MS", help="between two nodes")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    add("command", nargs="+", metavar="COMMAND", help="what each node runs, behind --")
    args = parser.parse_args()
    if shutil.which(args.command[0]) is None:
        parser.error(f"no program {args.command[0]!r}: give what each node runs, behind --")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all without a traceback
    if args.inside:
        return run_nodes(args)
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return refuse(f"it has no program {program}")
    enter = ENTER.split() + ([] if os.geteuid() == 0 else ["--map-root-user"])
    try:
        subprocess.run([*enter, "true"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return refuse(error.stderr)
    again = [sys.executable, "-m", "tools.network", "--inside", *sys.argv[1:]]
    code = subprocess.run([*enter, *again], check=False).returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
