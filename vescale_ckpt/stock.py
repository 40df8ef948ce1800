"""Every private name of torch that this package uses, in one place, so that a new torch is checked by reading one file.

`_StorageInfo` must be torch's own class: it is what plain `dcp.load` unpickles.
"""

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

__all__ = ["CURRENT_DCP_VERSION", "DEFAULT_SUFFIX", "MemoryFormatEncoding", "StorageInfo", "set_element"]

StorageInfo = _StorageInfo
MemoryFormatEncoding = _MEM_FORMAT_ENCODING
