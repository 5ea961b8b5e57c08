"""Episode, group, advantages, batch, loss, update: the algorithm, free of any particular environment or model."""
