"""Supervises a training run: a node's agent starts its processes, names the cause of each end or
hang, and goes on.

    python -m experiments.supervise [options] -- --config=FILE --workdir=DIR [...]      what follows -- is pretrain's
    python -m experiments.supervise report --workdir=DIR                               the history of a run
    python -m experiments.supervise check [--devices=N]                                the faults of this node

Start one agent per node. Several agents learn their ranks from --coordinator, --agents and --agent,
from JAX_COORDINATOR_ADDRESS, NODES and NODE, or from Slurm with one task a node. The agent of node
0 leads. Exit codes are pretrain's: 0 done; 2, 3 and 4 need a person; 75 saved as asked; others mean
that it could not continue. A second SIGTERM or SIGINT ends at once. docs/aegis.md lists its
responses.
"""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from zaya_jax import cli
from zaya_jax.config import UserError, fields

PATIENCE = 120.0  # seconds; a link that flaps is often back after a minute


def main() -> int:
    """Supervises, reports or checks, by the first word."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:cut])
    if args.what == "report":
        return report(args.workdir)
    if args.what == "check":
        return check(args.devices)
    return supervise(args, words[cut + 1 :])


def parser() -> cli.Parser:
    """The options."""
    options = cli.Parser(prog="python -m experiments.supervise", description=__doc__)
    add = options.add_argument
    whole = cli.number(int, 1, 2**20)
    add("--processes", type=whole, metavar="N", help="processes on this node; one per GPU, or 1")
    add("--nodes", type=whole, metavar="N", help="nodes that train; further agents are spares")
    add(
        "--min_nodes",
        type=whole,
        metavar="N",
        help="fewest nodes that may train after losses; --nodes",
    )
    add(
        "--restarts",
        type=cli.number(int, 0),
        default=5,
        metavar="N",
        help="restarts without a newer checkpoint; 5",
    )
    add(
        "--check",
        choices=("always", "never"),
        help="test nodes and links before each start; by default if there are GPUs",
    )
    add(
        "--patience",
        type=cli.number(float, 0, 3600),
        metavar="SECONDS",
        help="how long to wait for a broken link; 120 with several nodes, 0 with one",
    )
    add("--coordinator", metavar="HOST:PORT", help="address of node 0's agent")
    add("--agents", type=whole, metavar="N", help="number of agents")
    add("--agent", type=cli.number(int, 0), metavar="I", help="index of this agent, from 0")
    add(
        "--command",
        type=shlex.split,
        metavar="COMMAND",
        help="run this at each event, with the event as JSON on stdin",
    )
    what = options.add_subparsers(dest="what", metavar="report|check")
    report = what.add_parser(
        "report", help="the history of a run", description="The events of a run, by time."
    )
    report.add_argument(
        "--workdir", type=cli.path, required=True, metavar="DIR", help="the run's folder"
    )
    checked = what.add_parser(
        "check", help="the faults of this node", description="The check before a start."
    )
    checked.add_argument("--devices", type=whole, metavar="N", help="expected number of devices")
    return options


def supervise(args: argparse.Namespace, training: list[str]) -> int:
    """Runs the training under this node's agent."""
    # JAX comes with them, 1 s that --help does not need.
    from zaya_jax.aegis import machine
    from zaya_jax.aegis.agent import Agent
    from zaya_jax.aegis.decide import Rules
    from zaya_jax.aegis.node import SupervisorOptions
    from zaya_jax.checkpoint.run import claims
    from zaya_jax.cluster import multihost
    from zaya_jax.cluster.rank import find_agent_rank

    rank = find_agent_rank(os.environ, args.coordinator, args.agents, args.agent)
    agents = rank.count if rank else 1
    nodes = args.nodes or agents
    if nodes > agents:
        raise UserError(
            f"--nodes={nodes} exceeds the number of agents ({agents}); start one on each node"
        )
    if (args.min_nodes or nodes) > nodes:
        raise UserError(f"--min_nodes={args.min_nodes} is more than --nodes={nodes}")
    gpus = machine.gpu_numa_nodes(machine.root())
    processes = args.processes or len(gpus) or 1
    if len(gpus) % processes:
        raise UserError(
            f"--processes={processes} does not divide the node's {len(gpus)} GPUs: some would be"
            " idle; leave it out for one process a GPU"
        )
    workdir = workdir_of(training)
    if rank is None or rank.index == 0:  # a second agent would add its events to the run's
        claims.require_free(workdir)
    join = multihost.seconds_of(multihost.JOIN)
    check = args.check == "always" or (args.check is None and bool(gpus))
    rules = Rules(nodes, agents, args.min_nodes or nodes, args.restarts, join, processes, check)
    patience = args.patience if args.patience is not None else PATIENCE * (agents > 1)
    command = [sys.executable, "-m", "experiments.pretrain", *training]
    options = SupervisorOptions(rules, workdir, command, patience, args.command or ())
    return Agent(options, rank, multihost.seconds_of(multihost.HEARTBEAT)).run()


def workdir_of(training: list[str]) -> Path:
    """The --workdir among the training's options; the last one, as it is the training's."""
    options = cli.Parser(add_help=False)
    options.add_argument("--workdir")
    folder = options.parse_known_args(training)[0].workdir
    if folder is None:
        raise UserError(
            "--workdir=DIR is missing after --; give the training's options there, its folder among"
            " them"
        )
    fields.check_path("--workdir", folder)
    return Path(folder)


def report(workdir: Path) -> int:
    """Prints the events, and where the time went; makes the page anew."""
    from zaya_jax.aegis import accounts
    from zaya_jax.cluster import events
    from zaya_jax.report import write_report
    from zaya_jax.report.supervised import account_text

    history = events.read(workdir)
    if not history:
        raise UserError(
            f"--workdir={workdir} has no events; give the folder of a run that was supervised"
        )
    for event in history:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        seconds = f" ({event.seconds:.1f} s)" if event.seconds else ""
        if event.kind != "spent":
            print(f"{when}  {event.text()}{seconds}")
    print(f"\n{account_text(accounts.account_of(history))}\nReport: {write_report(workdir)}")
    return cli.DONE


def check(devices: int | None) -> int:
    """Prints the faults of this node."""
    from zaya_jax.aegis import preflight

    findings = preflight.check(devices)
    for finding in findings:
        device = f"{finding.device}: " if finding.device else ""
        print(f"{finding.action:<8}{device}{finding.name}: {finding.seen}")
    unfit = [finding for finding in findings if finding.action in ("exclude", "stop")]
    print(f"{len(findings)} findings, {len(unfit)} for which the node should not be used")
    return cli.HARDWARE if unfit else cli.DONE


if __name__ == "__main__":
    cli.leave(cli.exit_code(main))
