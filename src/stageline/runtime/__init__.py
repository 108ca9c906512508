"""Programs carried out: stages, micro-batches, ranks and the messages between them."""
