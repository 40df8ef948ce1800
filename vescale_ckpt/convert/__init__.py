"""From one format of checkpoints to another, in bounded memory: DCP, safetensors, torch.save, numpy.

A *source* knows the tensors of a checkpoint and reads boxes of them; a *plan* says which tensors come out and of what
they are made; a *sink* writes them to files. Between the two, *waves* of tensors travel: one is read while the one
before is converted and the one before that is written.
"""

from .formats import Format
from .run import ConvertReport, Objects, convert

__all__ = ["ConvertReport", "Format", "Objects", "convert"]
