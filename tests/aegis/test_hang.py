"""A process that hangs is found in time and named; one that is only slow is left alone."""

import collections
import random

import pytest

from zaya_jax.aegis.hang import FLOORS, STOPPED, Hangs, View

EVERY = 0.25  # seconds between looks


class Run:
    """Processes on a clock of their own, which tell where they are as agents would."""

    def __init__(self, count):
        self.now, self.count, self.hangs = 100.0, count, Hangs()
        self.where = dict.fromkeys(range(count), ("start", 0, "", self.now))
        self.pulse = dict.fromkeys(range(count), self.now)
        self.state = dict.fromkeys(range(count), "S")
        self.laps = collections.defaultdict(list)
        self.silent: set[int] = set()
        self.unheard: set[int] = set()  # whose agents say nothing

    def at(self, section, step, mark="", of=None):
        for p in range(self.count) if of is None else of:
            self.where[p] = (section, step, mark, self.now)

    def look(self):
        views = []
        for p, (section, step, mark, since) in self.where.items():
            if p not in self.silent:
                self.pulse[p] = self.now
            if p not in self.unheard:
                ages = self.now - since, self.now - self.pulse[p]
                views.append(
                    View(p, section, step, mark, *ages, self.state[p], self.laps.pop(p, []))
                )
        self.hangs.take_views(views, self.now)
        return self.hangs.find(self.now)

    def wait(self, seconds):
        """No process moves; the hang that is found, or None."""
        until = self.now + seconds
        while self.now < until:
            self.now += EVERY
            found = self.look()
            if found:
                return found
        return None

    def step(self, number, seconds, data=0.0):
        """A whole step of all, in which no hang is found."""
        begun = self.now
        for mark, part in (("fetch", data), ("dispatch", 0.1 * seconds), ("wait", 0.9 * seconds)):
            self.at("step", number, mark)
            assert self.wait(part) is None, number
        for p in range(self.count):
            self.laps[p].append((number, self.now - begun, 0.1 * seconds, data))


def steady(run, seconds=2.0, steps=20):
    for number in range(1, steps + 1):
        run.step(number, seconds)
    return steps + 1


@pytest.mark.parametrize("seconds", [0.25, 1.0, 2.5, 10.0])
def test_is_found_within_three_steps_or_five_seconds(seconds):
    run = Run(4)
    number = steady(run, seconds)
    run.at("step", number, "wait")
    run.at("step", number, "dispatch", of=[2])
    begun = run.now
    found = run.wait(100)
    assert found.process == 2 and found.concluded == "process 2 stopped first; 3 wait for it"
    assert run.now - begun <= max(3 * seconds + 2 * EVERY, 5.0)


WAITS = ("step", 21, "wait")
# Where the processes stand, the silent ones, states other than S; who is named, whether it is not
# clear that it stopped first, whether all wait in one program, as when a link is away.
STANDING = {
    "alike": ([WAITS] * 3, [], {}, (0, True, True)),
    "alike, but in no program": ([("save", 21)] * 3, [], {}, (0, True, False)),
    "alike, but between programs": ([("step", 21, "fetch")] * 3, [], {}, (0, True, False)),
    "all are silent": ([WAITS] * 3, [0, 1, 2], {}, (0, True, False)),
    "all wait for a disk": ([WAITS] * 3, [], dict.fromkeys(range(3), "D"), (0, True, False)),
    "one is silent": ([WAITS] * 3, [1], {}, (1, False, False)),
    "one is stopped": ([WAITS] * 3, [], {1: "T"}, (1, False, False)),
    "one waits for a disk": ([WAITS] * 3, [], {2: "D"}, (2, False, False)),
    "one is silent and one waits": ([WAITS] * 3, [1], {2: "D"}, (1, False, False)),
    "one is a mark behind": ([WAITS, ("step", 21, "fetch"), WAITS], [], {}, (1, False, False)),
    "of two the one that came least far": (
        [WAITS, ("step", 21, "fetch"), WAITS, ("step", 21, "figures")],
        [],
        {},
        (1, False, False),
    ),
    "one is a step behind": (
        [("step", 20, "figures"), *[("step", 21, "dispatch")] * 3],
        [],
        {},
        (0, False, False),
    ),
}


@pytest.mark.parametrize("name", STANDING)
def test_who_is_named_of_those_that_stand(name):
    places, silent, states, expected = STANDING[name]
    run = Run(len(places))
    steady(run)
    for process, place in enumerate(places):
        run.at(*place, of=[process])
    run.silent |= {*silent}
    run.state |= states
    found = run.wait(2000)
    assert (found.process, "not clear which" in found.concluded, found.all_wait) == expected


@pytest.mark.parametrize("section", ["", "start", "compile", "evaluate", "save"])
def test_a_stopped_process_is_found_wherever_it_is(section):
    run = Run(2)
    run.at(section, 0)
    run.state[1], run.silent, begun = "T", {1}, run.now
    found = run.wait(100)
    assert found.process == 1 and "stopped (state T)" in found.seen
    assert run.now - begun <= STOPPED + 2 * EVERY


def test_one_that_says_nothing_yet_has_the_time_of_a_start_up():
    run = Run(2)
    run.at("start", 0)
    run.at("", 0, of=[1])
    assert run.wait(FLOORS["start"] - 1) is None
    assert run.wait(2).process == 1


@pytest.mark.parametrize("section", ["start", "compile", "evaluate", "save", "end"])
def test_long_sections_have_long_floors_and_learn_longer_ones(section):
    run = Run(2)
    if section != "start":
        steady(run)
    run.at(section, 20)
    floor = FLOORS[section]
    assert run.wait(floor - 1) is None
    assert run.wait(2) is not None
    run = Run(2)
    run.at(section, 20)
    assert run.wait(floor - 1) is None
    run.at("step", 20)
    run.look()
    run.hangs.begin()  # what one start has learned the next knows
    run.at(section, 20)
    assert run.wait(3 * (floor - 1) - 1) is None and run.wait(3) is not None


def test_step_times_that_vary_threefold_are_no_hang():
    rng, run = random.Random(0), Run(4)
    for number in range(1, 401):
        run.step(number, rng.choice((2.0, 2.0, 2.5, 4.0, 6.0)))
    run = Run(4)
    number = steady(run, 4.0, 60)
    run.step(number, 12.0)  # once


def test_slow_data_first_steps_and_other_programs_are_no_hang():
    run = Run(4)
    run.at("compile", 0)
    assert run.wait(900) is None
    run.step(1, 300.0)  # it compiles in there
    for number in range(2, 20):
        run.step(number, 2.0)
    run.step(20, 2.0, data=25.0)
    run.at("compile", 21)  # another phase's program
    assert run.wait(100) is None
    for number in range(21, 30):
        run.step(number, 30.0)


def test_a_machine_that_slept_blames_nobody():
    run = Run(4)
    run.at("step", steady(run), "wait")
    run.now += 8 * 3600
    run.hangs.woke(run.now)
    assert run.look() is None and run.wait(3) is None
    run.at("step", 22, "wait")
    assert run.wait(3) is None


@pytest.mark.parametrize("seconds", [0.05, 0.6, 2.0])
@pytest.mark.parametrize("unheard", [{1}, {0, 2}, {0, 1, 2}])
def test_silent_agents_blame_nobody_while_the_run_goes_on(seconds, unheard):
    """A pause of an agent, or of its line: its processes compute on, and the others' steps, an
    evaluation and a save show it. Where no agent is heard nothing is known."""
    run = Run(3)
    number = steady(run, seconds)
    run.unheard = unheard
    for _ in range(int(20 / seconds)):
        run.step(number, seconds)
        number += 1
    for section in ("evaluate", "save"):
        run.at(section, number)
        assert run.wait(20) is None
    run.step(number + 1, seconds)
    run.unheard = set()
    run.step(number + 2, seconds)


@pytest.mark.parametrize(
    ("ahead", "mark", "first"),
    [(0, "wait", 1), (1, "wait", 1), (9, "wait", 1), (1, "dispatch", 2), (9, "dispatch", 2)],
)
def test_a_run_that_stands_while_an_agent_is_silent_hangs_as_soon_as_before(ahead, mark, first):
    """The others stand too, at the same step or at those that they came to meanwhile. If one of
    them is known to be behind, it stopped before the silent one, which came to their step too."""
    run = Run(3)
    number = steady(run, 0.5)
    run.at("step", number, "dispatch")
    run.look()
    run.unheard = {1}
    for later in range(number, number + ahead):
        run.step(later, 0.5)
    run.at("step", number + ahead, "wait")
    run.at("step", number + ahead, mark, of=[2])
    run.at("step", number, "dispatch", of=[1])
    begun = run.now
    found = run.wait(100)
    assert found.process == first and ("without a sign of life" in found.seen) == (first == 1)
    assert run.now - begun <= 5.0


def test_a_first_step_of_minutes_may_be_followed_by_another():
    """Steps over a minute were taken for hanging at each start, which then learnt nothing."""
    run = Run(2)
    for _ in range(2):  # starts
        run.hangs.begin()
        for number in range(1, 9):
            run.step(number, 100.0)
