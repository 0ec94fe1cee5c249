"""Watchers on recorded trees: each fault is named, a healthy hour gives nothing, and nothing is an
exception."""

import random
import re
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import watched

from zaya_jax.aegis import accounts, limits, log_rules, watch


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A healthy node of MI300X, watched; `node.poll(seconds)` looks after so many."""
    return Node(watched.lay(tmp_path, "mi300x"), None, monkeypatch)


class Node:
    """One whose module pynvml is `nvml`; None: it is not installed."""

    def __init__(self, root, nvml, monkeypatch):
        self.root, self.now = root, 1000.0
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        self.watchers = watch.Watchers(root)

    def poll(self, seconds=5.0):
        self.now += seconds
        return self.watchers.poll()

    def looks(self, count=8):
        """The findings of several looks."""
        return [found for _ in range(count) for found in self.poll()]


UMC = "sys/class/drm/card2/device/ras/umc_err_count"
FAULTS = {  # a tree, and its only finding
    "uncorrectable": ("gpu uncorrectable memory error", "card2", "exclude"),
    "uncorrectable-gfx": ("gpu uncorrectable error", "card2", "exclude"),
    "not-retired": ("gpu page not retired", "card5", "exclude"),
    "slow-clock": ("gpu slow clock", "card1", "note"),
    "nic-down": ("nic down", "mlx5_2/1", "warn"),
    "nic-flaps": ("nic flaps", "mlx5_0/1", "exclude"),
    "nic-symbol": ("nic link errors", "mlx5_1/1", "note"),
    "nic-retransmit": ("nic time-outs", "mlx5_3/1", "warn"),
    "oom": ("oom killer", "proc/vmstat", "warn"),
    "host-ecc": ("host uncorrectable memory error", "mc1", "exclude"),
}
# It was taken for zero: after a driver's change of format all memory errors went unseen.
FORMS = {  # of a card's counts, and the source that is said to be none
    "ue: {}\r\nce: 7\r\nde: 0\r\n": "",
    "ue: {}, ce: 7, de: 0": "",
    "  ue: {}\n  ce: 7": "",
    "ue: 0x{}\nce: 7": f"{UMC} ue",
    "ue: many, {}\nce: 7": f"{UMC} ue",
    "uncorrected {}": UMC,
    "\0\0{}\0": UMC,
}
# What happens in turn: looks, a tree that is laid over the node's, a file with its text (None:
# a folder that vanishes); and all that is found.
HISTORIES = {
    "the first look only remembers counters": (
        ["uncorrectable", "nic-symbol", "not-retired", 6],
        [("gpu page not retired", "card5", "exclude")],
    ),
    "and says nothing yet of a state": (["not-retired", 1], []),
    "a state that comes again is reported again": (
        [2, "nic-down", 3, "mi300x", 3, "nic-down", 3],
        [("nic down", "mlx5_2/1", "warn")] * 2,
    ),
    "cards and ports that vanish": (
        [2, ("sys/class/drm/card7", None), ("sys/class/infiniband/mlx5_1", None), 4],
        [("gpu lost", "card7", "exclude"), ("nic gone", "mlx5_1/1", "exclude")],
    ),
    **{fault: ([3, fault, 14], [found]) for fault, found in FAULTS.items()},
    **{
        form: (
            [(UMC, form.format(0)), 2, (UMC, form.format(3)), 2],
            [("not readable", source, "note") if source else FAULTS["uncorrectable"]],
        )
        for form, source in FORMS.items()
    },
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_gives_its_findings_alone(node, name):
    steps, expected = HISTORIES[name]
    found = []
    for step in steps:
        match step:
            case int(looks):
                found += node.looks(looks)
            case str(tree):
                watched.lay(node.root, tree)
            case (folder, None):
                shutil.rmtree(node.root / folder)
            case (file, text):
                (node.root / file).write_bytes(text.encode())
    # A note has no device, but a source.
    assert [(f.name, f.device or f.seen.partition(": ")[0], f.action) for f in found] == expected
    assert all(f.seen for f in found)


def set_counters(root, rng, minute):
    """A healthy node's counters over an hour: below every limit, and never still."""
    for card in range(8):
        place = root / f"sys/class/drm/card{card}/device"
        (place / "ras/umc_err_count").write_text(f"ue: 0\nce: {7 + card * minute // 8}\nde: 0")
        clock = int(1650 * rng.uniform(0.88, 1.08))
        (place / "pp_dpm_sclk").write_text(f"0: 132Mhz\n1: {clock}Mhz *\n2: 2100Mhz")
        (place / "gpu_busy_percent").write_text(str(rng.choice([100, 99, 40])))
    for port in range(4):
        place = root / f"sys/class/infiniband/mlx5_{port}/ports/1"
        (place / "counters/symbol_error").write_text(str(minute // 10))
        (place / "counters/port_xmit_wait").write_text(str(10**7 * minute))
        (place / "hw_counters/packet_seq_err").write_text(str(4 + 20 * minute))
        (place / "hw_counters/out_of_sequence").write_text(str(10**6 * minute))
        (place / "hw_counters/local_ack_timeout_err").write_text(str(minute // 6))


def test_a_healthy_hour_of_mi300x_gives_nothing(node):
    rng = random.Random(0)
    node.looks(1)
    found = []
    for minute in range(0, 60, 4):
        set_counters(node.root, rng, minute)
        found += node.poll(240)
    assert found == []


H200 = {
    "gpu uncorrectable memory error": lambda card: card["errors"].update({(1, 0): 1}),
    "gpu page not retired": lambda card: card.update(rows=(0, 0, 0, 1)),
    "gpu slow clock": lambda card: card.update(clock=500),
    "gpu lost": lambda card: card.update(lost=True),
}


@pytest.mark.parametrize("fault", H200)
def test_faults_by_nvml(tmp_path, monkeypatch, fault):
    nvml = watched.Nvml()
    node = Node(tmp_path, nvml, monkeypatch)
    assert node.poll() == node.poll() == []
    H200[fault](nvml.cards[3])
    found = [(f.name, f.device, f.action) for f in node.looks() if f.group != "note"]
    assert found == [(fault, "gpu3", limits.BY_NAME[fault].action)]


def test_a_driver_that_is_not_loaded_is_said_once(tmp_path, monkeypatch):
    nvml = watched.Nvml()
    nvml.loaded = False
    (found,) = Node(tmp_path, nvml, monkeypatch).looks()
    assert (found.action, found.seen) == ("note", "pynvml: Driver Not Loaded")


def test_garbage_is_said_once_and_no_exception(node):
    node.looks(2)
    rng = random.Random(1)
    files = [path for path in node.root.rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(
            rng.choice(
                [b"", b"\xff\xfe\x00", b"nan", b"1e400", b"-", b"9" * 400, b": : :", b"full x"]
            )
        )
    found = node.looks(6)
    assert {f.name for f in found} <= {
        "not readable",
        "gpu lost",
        "nic down",
        "oom killer",
        "nic gone",
    }
    assert any(f.name == "not readable" for f in found)
    assert node.looks(6) == []  # all of it was said
    assert not any("Error" in f.seen for f in found)  # no watcher failed


def test_counters_that_wrap_begin_anew(node):
    place = node.root / "sys/class/infiniband/mlx5_1/ports/1/counters/symbol_error"
    place.write_text(str(2**32 - 3))
    node.looks(2)
    for value in ("2", "11"):  # nine more
        place.write_text(value)
        assert node.looks(2) == []
    place.write_text("30")
    (found,) = node.looks(2)
    assert found.name == "nic link errors"
    assert "symbol_error: 2 -> 30 in 20 s; limit 10 in 60 min" in found.seen
    for hour in range(1, 30):  # a slow growth over many windows is none
        place.write_text(str(30 + 9 * hour))
        assert node.poll(3600) == []


def test_a_driver_that_hangs_is_a_finding_and_holds_up_nobody(tmp_path, monkeypatch):
    nvml, gate = watched.Nvml(), threading.Event()
    node = Node(tmp_path, nvml, monkeypatch)
    node.watchers._patience = 0.2
    node.looks(2)
    before = nvml.cards[0]["errors"]

    class Hanging(dict):
        def __getitem__(self, key):
            gate.wait(20)
            return before[key]

    nvml.cards[0]["errors"] = Hanging()
    threads = threading.active_count()
    (found,) = node.looks(4)
    assert (found.name, found.action) == ("gpu does not answer", "exclude")
    assert threading.active_count() <= threads + 1  # it is not asked again
    gate.set()
    node.watchers._patience = 10.0
    assert node.looks(2) == []


def test_the_page_has_each_rule_and_limit_and_use_of_time():
    page = (Path(watch.__file__).parents[2] / "docs" / "watching.md").read_text()
    row = r"^\| ([^|]+) \|(?: [^|]+ \|)? (\w+) \| (note|warn|restart|exclude|stop) \|"
    rules = [rule for kind in log_rules.KINDS for rule in log_rules.load(kind)]
    judged = [(x.name, x.group, x.action) for x in [*rules, *limits.LIMITS]]
    assert sorted(re.findall(row, page, re.M)) == sorted(judged)
    for limit in limits.LIMITS:
        spans = {1: "", 600: " in 10 min", limits.HOUR: " in 1 h"}
        span = spans.get(limit.within, f", {limit.within:g} readings")
        assert f"\n| {limit.name} | {limit.least:g}{span} | {limit.group} |" in page
    for use in accounts.USES:
        assert f"\n| {accounts.LABELS[use]} | " in page, use
