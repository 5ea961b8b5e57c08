"""`python -m grpo_agents.train`, which also notes what a process holds after each update, in a file named after its rank."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from grpo_agents.run.command import run_command
from grpo_agents.train import main


def watch() -> None:
    from grpo_agents.trainer import Trainer

    save = Trainer.save

    def noting(self: Trainer) -> None:
        weights = hashlib.sha256()
        for parameter in self.agent.policy.trainable_parameters():
            weights.update(parameter.detach().numpy().tobytes())
        held = {
            "weights": weights.hexdigest(),
            "env_steps": self.state.env_steps,
            "starts": self.state.starts,
            "best": [self.state.best_update, self.state.best_return],
            "pool": [seed for seed, _ in self.pool.state()],
        }
        with Path(f"process_{self.accelerator.process_index}.jsonl").open("a") as file:
            file.write(json.dumps(held) + "\n")
        save(self)

    Trainer.save = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    if "group.size=1" not in sys.argv:  # a wrong setting is found before anything heavy is imported
        watch()
    sys.exit(run_command(main))
