"""The dress rehearsal: all that a run of ZAYA1 goes through, small, with accidents, in one command.

    python -m tools.rehearse --out=DIR [--minutes=40] [--seed=0]

Seven stations, each by the public programs, whose commands and output are in DIR/log: a corpus from
what this machine has, sizing, four phases with accidents and again without, a lost node,
fine-tuning and a cool-down, evaluation after each phase, ways out. DIR/rehearsal.html tells the
story; the program ends with 1 if a promise was not kept. `--minutes` sets the length of training;
6, the shortest, took 9 minutes of two CPU cores in all. The recipe is
tools/rehearse/recipe.py, from which a model of your own can start.
"""

import functools
import importlib.util
import itertools
import json
import os
import random
import shlex
import signal
import time
from pathlib import Path

from tools import chaos, faults
from tools.rehearse import corpus as texts_of_machine
from tools.rehearse import recipe
from tools.rehearse.story import Failed, Story, arrow, figures
from zaya_jax import cli, config, schedule
from zaya_jax.report.document import Table
from zaya_jax.report.svg import Chart, Curve

RECIPE = recipe.__file__
PROCESSES, DEVICES = 2, 4  # of the run, and of each of them
SHORTEST = 6.0  # minutes
TEXTS = ("web", "code", "math", "chat", f"reasoning_{recipe.CONTEXTS[2]}")
# The promises: (phase, figure, least improvement over the phase before it), in nats of held-out
# loss. Said before training, for the shortest length; the first phase is compared with a guess
# among all ids.
PROMISES = (
    ("pretrain 1", "web", 1.0),
    ("pretrain 2", "math", 0.02),
    ("midtrain", f"reasoning_{recipe.CONTEXTS[2]}", 0.1),
    ("sft", "chat", 0.5),
)


PLAIN = """
import sys
from orbax.checkpoint import v1 as ocp
state = ocp.load_checkpointables(sys.argv[1])["state"]
import jax
leaves = jax.tree.leaves(state)
assert "zaya_jax" not in sys.modules
print(len(leaves), sum(leaf.size for leaf in leaves))
"""
EQUAL = """
import sys
import numpy as np, torch, transformers
import zaya_jax as zj
ids = np.arange(8, 72)[None]
theirs = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    wanted = theirs(torch.tensor(ids)).logits.numpy()
got = np.asarray(zj.load(sys.argv[1]).logits(ids), np.float32)
print(float(np.abs(got - wanted).max()))
"""


class Rehearsal(Story):
    """The folders of a rehearsal."""

    def __init__(self, out: Path, minutes: float, seed: int):
        super().__init__(out)
        self.minutes, self.random = minutes, random.Random(seed)
        self.data, self.run = out / "data", out / "phases" / "hurt"
        length = f"{minutes / 10:g}"
        self.training = [f"--config={RECIPE}:{length}", f"--config.data.path={self.data}"]
        plan = schedule.make_plan(config.check(recipe.get_config(length)))
        self.ends = {
            segment.phase.name: segment.first_step + segment.num_steps - 1
            for segment in plan.segments
        }
        self.last = plan.last_step


def corpus(story: Rehearsal) -> None:
    """Text from this machine, a tokenizer, shards for each context; one record is damaged on
    purpose."""
    texts = story.out / "texts"
    texts_of_machine.make(texts, min(8.0, 1 + story.minutes / 5), recipe.CONTEXTS)
    prepare = "experiments.prepare_data"
    every = [f"--input={path}" for path in sorted(texts.glob("*.jsonl"))]
    story.program(prepare, *every, "--train_bpe=1024", f"--out={story.out / 'sample'}")
    story.data.mkdir()
    (story.out / "sample" / "tokenizer").rename(story.data / "tokenizer")
    tokenizer = f"--tokenizer={story.data / 'tokenizer'}"
    for name in ("web", "code", "math"):
        story.program(
            prepare, f"--input={texts / name}.jsonl", tokenizer, f"--out={story.data / name}"
        )
    chats = [("reasoning", context, f"reasoning_{context}") for context in recipe.CONTEXTS]
    for name, context, folder in [*chats, ("chat", recipe.CONTEXTS[2], "chat")]:
        options = [
            f"--input={texts / name}.jsonl",
            f"--context={context}",
            f"--out={story.data / folder}",
        ]
        story.program(prepare, tokenizer, *options)
    story.program(
        "experiments.characterize",
        "storage",
        f"--data={story.data / 'web'}",
        f"--out={story.out / 'storage'}",
        "--seconds=1",
    )
    rows = []
    for file in sorted(story.data.glob("*/manifest.json")):
        manifest = json.loads(file.read_text())
        train, held_out = manifest["totals"]["train"], manifest["totals"]["held_out"]
        fitted = ", ".join(f"{n:,} {word}" for word, n in manifest["counts"].items())
        rows.append(
            [file.parent.name, f"{train['tokens']:,}", f"{held_out['tokens']:,}", fitted or "–"]
        )
    faults.flip(min((story.data / "web").glob("train-*.tokens")))
    verified = story.program("experiments.prepare_data", f"--verify={story.data / 'web'}", ok=(4,))
    story.promise(
        "a flipped bit in the prepared data is found",
        "damaged" in verified,
        verified.splitlines()[0],
    )
    head = ("data", "training tokens", "held-out tokens", "chats")
    story.tell(
        "Corpus",
        "Made from this machine's texts, and generated.",
        tables=[Table("Prepared", head, rows)],
    )


def sizing(story: Rehearsal) -> None:
    """This host is measured; the plan of the real cluster, the program of this one."""
    story.program(
        "experiments.characterize", "matmul", f"--out={story.out / 'host'}", "--seconds=0.02"
    )
    story.program("experiments.plan", f"--out={story.out / 'plan'}")
    story.program(
        "experiments.compile",
        *story.training,
        "--devices=8",
        "--phase=midtrain",
        f"--out={story.out / 'compile'}",
    )
    note = "All figures are in plan/plan.html, compile/compile.html and host/matmul.html."
    story.tell("Sizing", "", notes=[note])


def phases(story: Rehearsal) -> None:
    """The run with accidents on a schedule from the seed, and then without."""
    by_name = {fault.name: fault for fault in chaos.FAULTS}
    wanted = [
        "a process is killed",
        "a process is stopped (SIGSTOP)",
        "a dead remote store",
        "a full disk",
    ]
    if story.minutes < 20:
        wanted = wanted[:2]
    accidents = [chaos.DAMAGED, *(by_name[name] for name in wanted)]
    last = story.last
    story.random.shuffle(accidents)
    # second: the first phase is long enough then, and a spike is one after 64 steps of a phase
    if story.minutes >= 20:
        accidents.insert(1, by_name["corrupt data"])
    first = 25  # two checkpoints: one to damage, one to go back to
    between = (last - first) / len(accidents)
    plan = []
    for i, accident in enumerate(accidents):
        step = first + round(between * (i + story.random.uniform(0, 0.5)))
        plan.append((step, accident))
    run = chaos.Chaos(story.out / "phases", 0, story.say, PROCESSES, story.training, DEVICES)
    code = run.run_plan(plan)
    if code:
        raise Failed(f"the run with accidents ended with {code}, in {run.folder / 'hurt.log'}")
    code = run.run_calm()
    same = code == 0 and chaos.bits(run.workdir, last) == chaos.bits(run.folder / "calm", last)
    for outcome in run.outcomes:
        story.promise(
            f"{outcome.fault}: found, and the run went on",
            outcome.found >= 0 and outcome.recovered >= 0,
            outcome.cause,
        )
    story.promise(
        "the last checkpoint has the bits of the run without accidents", same, f"step {last}"
    )
    losses = {name: figures(run.folder / name, "loss") for name in ("hurt", "calm")}
    lines = [Curve("with accidents", losses["hurt"], 0), Curve("without", losses["calm"], 1)]
    marks = [outcome.step for outcome in run.outcomes]
    picture = Chart("Training loss", lines, bad_steps=marks, bad="an accident", zero=True)
    rows = [
        [o.fault, o.step, f"{o.found:.1f} s", f"{o.recovered:.1f} s", o.cause] for o in run.outcomes
    ]
    head = ("accident", "step", "found after", "went on after", "the agent's words")
    ends = [f"{step} ({name})" for name, step in story.ends.items()]
    story.tell(
        "Four phases",
        f"Phases end at steps {', '.join(ends)}.",
        tables=[Table("Accidents", head, rows, "code")],
        pictures=picture.draw(),
    )
    story.program("experiments.supervise", "report", f"--workdir={run.workdir}")


def node(story: Rehearsal) -> None:
    """Two agents; one is killed with its process, and the other goes on alone."""
    workdir, steps = story.out / "node", 40
    address = f"localhost:{random.randrange(20_000, 30_000)}"
    keys = [
        "--config.checkpoint.every_steps=5",
        f"--config.run.num_steps={steps}",
        "--config.eval.windows=0",
    ]
    options = [
        "--agents=2",
        "--nodes=2",
        "--min_nodes=1",
        "--patience=5",
        f"--coordinator={address}",
    ]
    end = ["--", *story.training, f"--workdir={workdir}", *keys]
    start = functools.partial(story.start, "experiments.supervise", devices=DEVICES)
    agents = [start(*options, f"--agent={i}", *end) for i in range(2)]
    try:
        until = time.monotonic() + 300
        while not (workdir / "checkpoints" / "5").exists() and time.monotonic() < until:
            time.sleep(0.2)
        for pid in [
            agents[1].pid,
            *(victim.pid for victim in faults.processes_of(agents[1].pid).values()),
        ]:
            os.kill(pid, signal.SIGKILL)
        code = agents[0].wait(400)
    finally:
        for agent in agents:
            agent.kill()
    story.program("experiments.supervise", "report", f"--workdir={workdir}")
    reached = max((step for step, _ in figures(workdir, "loss")), default=0)
    story.promise(
        "a lost node: the other goes on to the end",
        code == 0 and reached == steps,
        f"step {reached}",
    )
    story.tell("A lost node", "", notes=["node/report.html accounts for every second of it."])


def tuning(story: Rehearsal) -> None:
    """The run learns chats at the long context; another decays from the stable part."""
    steps = max(10, round(story.minutes * 2))
    tuned = story.out / "tuned"
    story.program(
        "experiments.pretrain",
        f"--config=experiments/configs/finetune.py:{story.run}",
        f"--workdir={tuned}",
        f"--config.data.path={story.data / f'reasoning_{recipe.CONTEXTS[2]}'}",
        "--config.data.global_batch=4",
        f"--config.run.num_steps={steps}",
        f"--config.eval.every={steps // 4}",
        "--config.log.sample_tokens=0",
    )
    losses = figures(tuned, "eval/loss")
    story.promise(
        "fine-tuning improves its held-out loss", losses[-1][1] < losses[0][1], arrow(losses)
    )
    end = story.ends["pretrain 1"]
    stable, cooled = (end - 5) // 10 * 10, story.out / "cooled"
    story.program(
        "experiments.pretrain",
        f"{story.training[0]},1",
        *story.training[1:],
        f"--workdir={cooled}",
        f"--config.run.fork={story.run}@{stable}",
        f"--config.schedule.decay_steps={end - stable}",
        "--config.log.sample_tokens=0",
        devices=PROCESSES * DEVICES,
    )
    rates = figures(cooled, "lr")
    story.promise(
        "a cool-down from the stable part ends at rate 0",
        rates[-1][1] < 0.1 * rates[0][1],
        arrow(rates),
    )
    notes = ["Their reports are tuned/report.html and cooled/report.html."]
    story.tell("Fine-tuning and cool-down", "", notes=notes)


def evaluation(story: Rehearsal) -> None:
    """Each phase's end on every text and task."""
    tasks = story.out / "texts" / "tasks"
    names, notes = [], ["No tasks: lm-eval is not installed (make setup EXTRAS=eval)."]
    options = [f"--data={story.data / name}" for name in TEXTS]
    options += [f"--limit={8 if story.minutes < 20 else 60}", f"--context={recipe.CONTEXTS[2]}"]
    if importlib.util.find_spec("lm_eval"):
        notes = []
        names = sorted(path.stem for path in tasks.glob("*.yaml"))
        options += [f"--tasks={','.join(names)}", f"--include_path={tasks}"]
    figures_of: dict[str, dict[str, float]] = {}  # by phase
    for phase, step in story.ends.items():
        out = story.out / "evaluation" / phase.replace(" ", "_")
        model = f"--model={story.run}@{step}"
        story.program("experiments.evaluate", model, f"--out={out}", *options)
        result = json.loads((out / "evaluation.json").read_text())
        figures_of[phase] = {Path(name).name: row["loss"] for name, row in result["data"].items()}
        figures_of[phase] |= {task: row["acc"][0] for task, row in result["tasks"].items()}
    guess = {"": dict.fromkeys(TEXTS, 6.93)}  # ln 1024
    ends = itertools.pairwise([*guess.items(), *figures_of.items()])
    for (_, before), (phase, after) in ends:
        for _, name, least in [promise for promise in PROMISES if promise[0] == phase]:
            gained = before[name] - after[name]
            gain = f"{before[name]:.3f} → {after[name]:.3f}"
            story.promise(f"{phase} improves {name} by {least} nats", gained >= least, gain)
    rows, lines = [], list[Curve]()
    for name in (*TEXTS, *names):
        values = [figures[name] for figures in figures_of.values()]
        rows.append([name, *(f"{value:.3f}" for value in values)])
        if name in TEXTS:
            lines.append(Curve(name, [*enumerate(values)], len(lines)))
    ticks = [*enumerate(figures_of)]
    picture = Chart("Held-out loss after each phase", lines, zero=True, over="phase", named=ticks)
    text = "Losses in nats per token; tasks as shares of right answers among four."
    table = Table("After each phase", ("figure", *figures_of), rows)
    story.tell("Evaluation", text, tables=[table], pictures=picture.draw(), notes=notes)


def ways_out(story: Rehearsal) -> None:
    """Exports, readers of other projects, decoding over devices, a chat."""
    export = story.out / "export"
    story.program("experiments.checkpoint", "to_hf", f"--model={story.run}", f"--out={export}")
    notes = []
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        apart = float(story.program("-c", EQUAL, export).split()[-1])
        story.promise(
            "transformers computes the export's logits", apart < 1e-3, f"{apart:.1e} apart"
        )
    else:
        notes.append(
            "Not loaded by transformers: it is not installed (make setup EXTRAS=hf, and torch)."
        )
    plain = story.program("-c", PLAIN, story.run / "checkpoints" / str(story.last)).split()
    story.promise(
        "plain Orbax reads the last step",
        int(plain[1]) > 0,
        f"{plain[0]} arrays, {int(plain[1]):,} numbers",
    )
    generate = [
        "experiments.generate",
        f"--model={story.run}",
        "--num_tokens=24",
        "--prompt=The function returns",
    ]
    alone = story.program(*generate)
    together = story.program(*generate, "--mesh=context=8", devices=8)
    story.promise(
        "eight devices decode the text of one", alone == together, shlex.quote(alone.strip()[:60])
    )
    tuned = story.program(
        "experiments.generate",
        f"--model={story.out / 'tuned'}",
        "--chat",
        "--num_tokens=40",
        given="What is 3 + 5?\nHow warm is it in Oslo?\n",
    )
    story.promise("a chat answers", bool(tuned.strip()), shlex.quote(tuned.strip()[:80]))
    story.tell(
        "Ways out",
        "",
        notes=[*notes, f"It continues: {alone.strip()}", f"It answers: {tuned.strip()}"],
    )


STATIONS = (corpus, sizing, phases, node, tuning, evaluation, ways_out)


def main() -> int:
    """Visits the stations; the page is written even where one failed."""
    parser = cli.Parser(prog="python -m tools.rehearse", description=__doc__)
    parser.add_argument("--out", type=cli.path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--minutes", type=cli.number(float, SHORTEST), default=40.0, metavar="N", help="length; 40"
    )
    parser.add_argument(
        "--seed", type=cli.number(int, 0), default=0, metavar="N", help="of the accidents; 0"
    )
    args = parser.parse_args()
    out = Path(args.out).absolute()
    if out.exists() and any(out.iterdir()):
        raise config.UserError(f"--out={args.out} is not empty; give a new folder")
    about = f"{time.strftime('%Y-%m-%d')}, {args.minutes:g} minutes, seed {args.seed}"
    story = Rehearsal(out, args.minutes, args.seed)
    story.visit(STATIONS)
    return cli.DONE if story.written("The dress rehearsal", about) else 1


if __name__ == "__main__":
    cli.leave(cli.exit_code(main))
