"""The parts of `experiments/bench_cartpole.py`."""
