"""Connects frameworks that save through DCP, or through a checkpoint class of their own, to this package.

`dcp_defaults` serves every host that ends in `dcp.save` and `dcp.load`. The other modules are imported by their names,
each needs its framework: `vescale_ckpt.integrations.lightning`, say.
"""

from .dcp import Defaults, dcp_defaults, enable

__all__ = ["Defaults", "dcp_defaults", "enable"]
