"""The limits for hardware counters and levels, each with its reason.

docs/watching.md shows it, and a test holds that. A fault that only slows a node down, or needs a person some day, is a
note: a process that ends soon after has not ended for it.
"""

from typing import NamedTuple

HOUR = 3600.0


class Limit(NamedTuple):
    """So much of a counter within so many seconds, or such a level over so many looks, is a finding."""

    name: str  # of the finding
    at: float  # from this on
    within: float  # seconds, of a counter; looks in a row, of a level
    group: str
    action: str
    what: str  # the unit and the source
    why: str


LIMITS = (
    # GPUs
    Limit("gpu uncorrectable memory error", 1, HOUR, "critical", "exclude", "errors: umc `ue`, NVML volatile DRAM",
          "wrong data was read; the page is retired at the next reset at best"),
    Limit("gpu uncorrectable error", 1, HOUR, "critical", "exclude", "errors: `ue` of gfx, sdma, xgmi and other blocks",
          "the block computed or moved wrong data"),
    Limit("gpu deferred error", 1, HOUR, "critical", "warn", "errors: `de` of any block",
          "poisoned data, not used yet; using it is an uncorrectable error"),
    Limit("gpu correctable error rate", 100, HOUR, "critical", "note", "`ce` of a block, NVML volatile corrected",
          "single ones are normal; a hundred in an hour come from one cell or lane that wears out"),
    Limit("gpu wears out", 64, 24 * HOUR, "critical", "exclude", "pages or rows",
          "four to eight bad rows in a day will not stop there, and spare rows run out"),
    Limit("gpu page not retired", 1, 1, "critical", "exclude", "pages flagged F, NVML row remapping failed",
          "there is no spare left: the bad memory stays in use"),
    Limit("xgmi link error", 1, 1, "critical", "exclude", "`xgmi_error`, which each reading clears",
          "a transfer between GPUs was wrong; other readers of the file may have cleared errors"),
    Limit("nvlink error", 1, HOUR, "critical", "exclude", "recoveries, and links that were up and are down",
          "a recovery stalls the collective and comes back"),
    Limit("gpu hot", 1, 3, "critical", "warn", "share of the limit that the card names (critical, slowdown)",
          "from there on clocks fall, then the card turns itself off"),
    Limit("gpu throttled", 1, 3, "critical", "note", "NVML: hardware slowdown, thermal or power brake",
          "one slow GPU makes all wait; a power cap alone is normal and does not count"),
    Limit("gpu slow clock", 0.7, 6, "critical", "note", "share of the busy GPUs' median clock, at or below",
          "GPUs under one load clock within some 10 % of each other"),
    Limit("pcie link narrowed", 1, 2, "critical", "note", "fewer lanes than possible",
          "a bad contact: the host's copies and the network card behind it get slower"),
    Limit("gpu lost", 1, 2, "critical", "exclude", "cards that were there at the first look",
          "it has fallen off the bus; only a reset brings it back"),
    Limit("gpu does not answer", 10, 1, "critical", "exclude", "seconds that a reading takes",
          "the driver waits for a card whose firmware is stuck; the agent does not ask again"),
    # Network
    Limit("nic down", 1, 1, "distributed", "warn", "ports that were active at the first look",
          "a short flap is ridden out by the collectives' time-out; a long one ends the step by itself"),
    Limit("nic flaps", 3, HOUR, "distributed", "exclude", "`link_downed`, `carrier_changes` / 2",
          "a port that comes and goes costs a restart each time"),
    Limit("nic gone", 1, 2, "distributed", "exclude", "cards that were there at the first look",
          "its driver or firmware has given up"),
    Limit("nic slow", 1, 2, "distributed", "note", "a rate lower than before",
          "a cable that trained down; every ring through it goes at its rate"),
    Limit("nic symbol errors", 10, HOUR, "distributed", "note", "`symbol_error`",
          "the usual acceptance limit of InfiniBand cables is 10 an hour"),
    Limit("nic link errors", 10, HOUR, "distributed", "note",
          "`link_error_recovery`, `local_link_integrity_errors`, `port_rcv_errors`, CRC errors",
          "a clean link has none in a day"),
    Limit("nic time-outs", 10, 600, "distributed", "warn", "acknowledge time-outs, retries exceeded",
          "each stalls a queue pair for 4 µs · 2^NCCL_IB_TIMEOUT: packets are lost somewhere on the way"),
    Limit("nic retransmissions", 1000, 600, "distributed", "note", "sequence errors and other retransmissions",
          "adaptive routing causes some; so many cost bandwidth"),
    # The host
    Limit("host memory short", 0.03, 3, "critical", "warn", "share of memory that is available, at or below",
          "the OOM killer is next, and it takes the largest process"),
    Limit("oom killer", 1, HOUR, "critical", "warn", "`oom_kill` of /proc/vmstat or the cgroup",
          "the kernel's log names the process; a process of the run is missed at once"),
    Limit("host uncorrectable memory error", 1, HOUR, "critical", "exclude", "EDAC `ue_count`",
          "wrong data was read from the host's memory"),
    Limit("disk nearly full", 0.05, 1, "storage", "note", "share of blocks or inodes that is free, at or below",
          "the next checkpoints may not fit"),
    Limit("disk full", 0.005, 1, "storage", "warn", "share of blocks or inodes that is free, at or below",
          "saves fail; the training says so, keeps trying, and ends with 4 when it gives up"),
)  # fmt: skip
BY_NAME = {limit.name: limit for limit in LIMITS}
assert len(BY_NAME) == len(LIMITS)
