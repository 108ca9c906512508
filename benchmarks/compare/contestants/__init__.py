"""Those that take turns: Stageline, torch.distributed.pipelining, torchgpipe and plain loops."""
