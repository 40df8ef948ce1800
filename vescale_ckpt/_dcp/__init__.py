"""Implements the plug points of torch.distributed.checkpoint: storage writer and reader, planners, stager."""
