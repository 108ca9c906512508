"""From a batch to its results: cut into micro-batches, called, streamed, joined again."""
