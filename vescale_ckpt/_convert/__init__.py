"""Converts checkpoints between DCP, safetensors and torch.save for `vescale_ckpt.convert`, in bounded memory.

A *source* lists the tensors of a checkpoint and reads boxes of them. A *plan* lists the tensors to write and what each
is made from. A *layout* places them in a file. A *pipeline* moves tensors from source to file in batches: one batch is
read while the one before it is converted and the one before that is written.
"""
