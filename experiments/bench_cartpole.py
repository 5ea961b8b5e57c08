"""Measure CartPole-v1 from frames against its baselines: `python experiments/bench_cartpole.py`.

Each part is a process of its own: the default training command and variants of it, PPO of Stable-Baselines3 on the
state and on the frames (each for every seed), the sampler's throughput, and the cost of rendering. Results are kept in one
JSON file; a part that is there is not measured again unless `again=true`. The experiment page and its picture are written
anew after each part. What the parts print and write is in runs/bench-*.

    python experiments/bench_cartpole.py                        everything, one part after another
    python experiments/bench_cartpole.py jobs=2                 training runs two at a time, one thread each
    python experiments/bench_cartpole.py only=default-1,throughput again=true
    python experiments/bench_cartpole.py only=page              nothing but the page

Needs `pip install -c constraints.txt -e ".[bench]"`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from bench.figure import draw
from bench.page import write_page
from bench.results import Record, Results
from pydantic import Field, NonNegativeInt, PositiveInt

from grpo_agents.config import Section
from grpo_agents.errors import ConfigError
from grpo_agents.run.command import run_command
from grpo_agents.run.config import parse
from grpo_agents.run.metrics import MetricsLog

ROOT = Path(__file__).resolve().parent.parent
TRAINED: dict[str, list[str]] = {
    "default": [],
    "return_to_go": ["group.advantage=return_to_go"],
    "episode": ["group.advantage=episode"],
    "reset": ["group.start=reset"],
}
PPO = {"ppo-state": "state", "ppo-frames": "frames"}
ALONE = ("throughput", "rendering")
"""Parts that measure speed: they run by themselves, after all others."""
COLUMNS = ("env_steps", "return/mean", "validation/mean")


class BenchConfig(Section):
    """All settings of this script."""

    seeds: list[NonNegativeInt] = Field(default_factory=lambda: [0, 1, 2], description="seeds of every learner")
    only: list[str] = Field(
        default_factory=list, description="parts to measure: default, episode-1, ppo-state, throughput; default: all"
    )
    again: bool = Field(False, description="measure parts again whose results are there")
    jobs: PositiveInt = Field(1, description="learners at a time; above 1 each has one thread")
    env_steps: PositiveInt = Field(100_000, description="budget of the baselines")
    episodes: PositiveInt = Field(100, description="held-out episodes")
    settings: list[str] = Field(
        default_factory=list, description="more settings for all training runs, key=value; for a quick trial"
    )
    output: str = Field(str(ROOT / "experiments/results/cartpole.json"), description="file of results")
    page: str = Field(str(ROOT / "experiments/cartpole.md"), description="experiment page to write")
    figure: str = Field(str(ROOT / "assets/figures/cartpole.png"), description="picture to draw")


@dataclass(frozen=True)
class Part:
    """One measurement: a kind of run, and its seed where it has one."""

    family: str
    seed: int | None = None

    @property
    def name(self) -> str:
        return self.family if self.seed is None else f"{self.family}-{self.seed}"


def all_parts(seeds: list[int]) -> list[list[Part]]:
    """Parts in stages: PPO is also judged at the number of steps that the default run of its seed took."""
    training = [Part(family, seed) for family in TRAINED for seed in seeds]
    ppo = [Part(family, seed) for family in PPO for seed in seeds]
    return [training, ppo, *([Part(family)] for family in ALONE)]


def chosen_parts(config: BenchConfig, done: set[str]) -> list[list[Part]]:
    """The stages with what is asked for and not there yet.

    Raises:
        ConfigError: `only` names something that is no part.
    """
    stages = all_parts(config.seeds)
    known = {word for stage in stages for part in stage for word in (part.name, part.family)} | {"page"}
    unknown = sorted(set(config.only) - known)
    if unknown:
        raise ConfigError([f"only={','.join(unknown)}: no such part; there are {', '.join(sorted(known))}"])
    wanted = set(config.only or known)
    return [
        [part for part in stage if {part.name, part.family} & wanted and (config.again or part.name not in done)]
        for stage in stages
    ]


def command_of(part: Part, config: BenchConfig, attempt: str, steps: int | None) -> list[str]:
    """The words that measure a part.

    Args:
        part: what to measure.
        config: settings of the benchmark.
        attempt: name of the folder or file under runs/ that it writes.
        steps: environment steps of the default run of the same seed, if it is there.
    """
    if part.family in TRAINED:
        words = ["-m", "grpo_agents.train", "env=CartPole-v1", f"seed={part.seed}", *TRAINED[part.family]]
        if part.family != "default":
            words.append(f"env_steps={config.env_steps}")
        if config.episodes != BenchConfig().episodes:
            words.append(f"episodes={config.episodes}")
        return [*words, *config.settings, f"name={attempt}"]
    output = f"output=runs/{attempt}.json"
    if part.family not in PPO:
        return [f"experiments/bench/{part.family}.py", output]
    words = [f"observations={PPO[part.family]}", f"seed={part.seed}", f"env_steps={config.env_steps}"]
    if steps is not None:
        words.append(f"at={min(steps, config.env_steps)}")
    return ["experiments/bench/ppo.py", *words, f"episodes={config.episodes}", output]


def measure(part: Part, config: BenchConfig, results: Results) -> Record:
    """Run one part to its end, read what it wrote, and keep it in the results.

    Raises:
        RuntimeError: the process failed; the message has the end of what it printed.
    """
    jobs = 1 if part.family in ALONE else config.jobs
    environment = dict(os.environ)
    environment.pop("OMP_NUM_THREADS", None)
    if jobs > 1 or part.family in PPO:
        environment["OMP_NUM_THREADS"] = "1"
    attempt = f"bench-{part.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    default = results.parts.get(f"default-{part.seed}")
    words = command_of(part, config, attempt, default["summary"]["env_steps"] if default else None)
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    log = runs / f"{attempt}.log"
    print(f"{part.name}: python {shlex.join(words)}  > {log.relative_to(ROOT)}", flush=True)
    begin = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{part.name} ended with status {done.returncode}:\n{tail}")
    record = _read_run(runs / attempt) if part.family in TRAINED else json.loads((runs / f"{attempt}.json").read_text())
    about = {
        "command": f"python {shlex.join(words)}",
        "seed": part.seed,
        "env_steps": config.env_steps,
        "jobs": jobs,
        "process_s": round(time.perf_counter() - begin, 1),
    }
    threads = record.get("summary", record)["hardware"]["threads"]
    record = about | {"threads": threads} | record
    results.put(part.name, record)
    return record


def _read_run(folder: Path) -> Record:
    lines = MetricsLog.read(folder / "metrics.jsonl")
    timed = sorted({key for line in lines for key in line if key.startswith("time/")})
    curve = {key: [line.get(key) for line in lines] for key in (*COLUMNS, *timed)}
    return {"summary": json.loads((folder / "summary.json").read_text(encoding="utf-8")), "curve": curve}


def write_all(config: BenchConfig, results: Results) -> None:
    """Draw the picture and write the page from what is there."""
    if any("curve" in record for record in results.parts.values()):
        draw(results.parts, Path(config.figure))
    write_page(results.parts, Path(config.page), Path(config.figure))


def main(argv: list[str]) -> int:
    config = parse(BenchConfig, argv, prog="python experiments/bench_cartpole.py", summary=__doc__ or "")
    results = Results(Path(config.output))
    stages = chosen_parts(config, set(results.parts))
    failed = 0
    for stage in stages:
        with ThreadPoolExecutor(config.jobs) as pool:
            running = {pool.submit(measure, part, config, results): part for part in stage}
            try:
                for future in as_completed(running):
                    part = running[future]
                    try:
                        record = future.result()
                    except RuntimeError as error:
                        print(f"error: {error}", file=sys.stderr, flush=True)
                        failed += 1
                        continue
                    write_all(config, results)
                    print(f"{part.name}: done in {record['process_s']:.0f} s", flush=True)
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    write_all(config, results)
    print(f"results in {config.output}, page in {config.page}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
