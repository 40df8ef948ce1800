"""Converts checkpoints between DCP, safetensors, torch.save and numpy for `vescale_ckpt.convert`, in bounded memory.

A *source* knows the tensors of a checkpoint and reads boxes of them; a *plan* says which tensors come out and of what
they are made; a *sink* writes them to files. A *pipeline* moves tensors from a source to a sink in batches: one is read
while the one before is converted and the one before that is written.
"""

from .formats import Format
from .run import ConvertReport, Objects, convert

__all__ = ["ConvertReport", "Format", "Objects", "convert"]
