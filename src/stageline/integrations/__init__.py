"""Adapters for the training loops of others: transformers, Lightning and accelerate.

Each module imports its framework, which Stageline itself does not need. To these frameworks, every
process that a launcher has started is one more copy of the whole model. The processes of a pipeline
are its ranks, so `single_process` makes each of them the only one that the framework sees.
"""
