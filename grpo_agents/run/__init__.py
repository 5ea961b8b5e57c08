"""What a run reads and writes down: settings, seeds, metrics, checkpoints, pictures."""
