"""Collects every private name of torch that this package uses, so that a new torch is checked by reading one file.

`_StorageInfo` must be torch's own class: it is what plain `dcp.load` unpickles.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import _weights_only_unpickler
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store as default_store

from . import _C

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.checkpoint._async_process_executor import (
        _ProcessBasedAsyncCheckpointExecutor as AsyncProcessExecutor,
    )
    from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors as flatten_sharded_tensors
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [  # imported here for others
    "CURRENT_DCP_VERSION",
    "AsyncProcessExecutor",
    "MemoryFormatEncoding",
    "PrefixStore",
    "StorageInfo",
    "Store",
    "StridedShard",
    "default_store",
    "flatten_sharded_tensors",
]

_DCP = "torch.distributed.checkpoint"
#: {name here: (module, name there)} of what takes a second of CPU to import: it is imported at its first use.
_IMPORTED_IN_USE = {
    "AsyncProcessExecutor": (f"{_DCP}._async_process_executor", "_ProcessBasedAsyncCheckpointExecutor"),
    "CURRENT_DCP_VERSION": (f"{_DCP}.filesystem", "CURRENT_DCP_VERSION"),
    "MemoryFormatEncoding": (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    "StorageInfo": (f"{_DCP}.filesystem", "_StorageInfo"),
    "StridedShard": ("torch.distributed.tensor.placement_types", "_StridedShard"),
    "flatten_sharded_tensors": (f"{_DCP}._sharded_tensor_utils", "_flatten_sharded_tensors"),
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_IN_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, name_there = _IMPORTED_IN_USE[name]
    value = globals()[name] = getattr(import_module(module), name_there)
    return value


_SPEC_PATHS = [
    ("_spec", "placements"),
    ("_spec", "mesh"),
    ("_spec", "tensor_meta", "shape"),
    ("_spec", "shard_order"),
]
_SPEC = attrgetter(*(".".join(path) for path in _SPEC_PATHS))
_LOCAL, _VERSION = attrgetter("_local_tensor"), attrgetter("_version")


class DTensorLayout(NamedTuple):
    """The placement of a DTensor on its mesh."""

    placements: tuple[Placement, ...]
    mesh: DeviceMesh
    shape: torch.Size  #: the whole tensor's
    shard_order: Any = None  #: (tensor dim, mesh dims) pairs: which mesh dim cuts first. None: from left to right


_AS_LAYOUT = partial(tuple.__new__, DTensorLayout)  # faster than the constructor, which is a Python function


def dtensor_layouts(dtensors: list[DTensor], last: list[DTensorLayout] | None = None) -> list[DTensorLayout]:
    """The layouts, read without torch's dispatch, which takes microseconds a tensor. It is `last`, the same object, if
    these are the layouts."""
    if last is not None and _C.have_attributes(dtensors, _SPEC_PATHS, last):  # type: ignore[arg-type]
        return last
    return list(map(_AS_LAYOUT, map(_SPEC, dtensors)))


def chunk_of_layout(layout: DTensorLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size of what this rank holds of a DTensor, as the DTensor itself tells DCP, for any placements."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(layout.shape, layout.mesh, layout.placements)
    return tuple(offset), tuple(size)


def local_tensors(dtensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """The local tensor of each DTensor. Running collectives are not waited for."""
    return list(map(_LOCAL, dtensors))


def storage_identity(holder: torch.Tensor | torch.UntypedStorage) -> int:
    """A number that is equal for tensors of one storage, also on the meta device, where storages have no address."""
    storage = holder if isinstance(holder, torch.UntypedStorage) else holder.untyped_storage()
    return int(storage._cdata)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Torch's version counter of each tensor, which rises with every in-place change that torch knows. -1 for tensors
    of inference mode, which have none."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return tensor_facts(list(tensors))[0].tolist()


def tensor_facts(tensors: list[torch.Tensor]) -> tuple[array[int], bytes]:
    """The version counters as an array of 64-bit integers, and for each tensor whether it requires a gradient: 1 or
    0."""
    counters, flags = _C.tensor_facts(tensors)
    return array("q", counters), flags


def profiled(name: str) -> AbstractContextManager[object]:
    """A context that profiles of torch show under this name. Without a profile it costs next to nothing; torch's own
    would take 10 microseconds."""
    return record_function(name) if _profiler_enabled() else nullcontext()


def dtensor_over(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor with the layout of `like` and the local tensor `local`. Runs no collective."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, like._spec, requires_grad=like.requires_grad)  # type: ignore[no-untyped-call]


def sharded_tensor_over(shards: list[Shard], like: ShardedTensor) -> ShardedTensor:
    """A ShardedTensor with the layout of `like` and the local shards `shards`. Runs no collective."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, like.metadata(), like._process_group, like._init_rrefs
    )


def clone_of(store: Any) -> Store:
    """The same store by a new connection, so that a call that blocks does not block the other's calls."""
    clone: Store = store.clone()
    return clone


def gloo_of_addresses(
    rank: int, size: int, timeout: timedelta
) -> tuple[dist.ProcessGroupGloo, bytes, Callable[[int, bytes], None]]:
    """A group of gloo that connects this rank to another one when the first message between them is begun, and blocks
    the caller until then, at most `timeout`.

    Returns the group; this rank's address; and a function that tells the group another rank's address, which it must
    have before that message. It takes the first interface of GLOO_SOCKET_IFNAME, as torch does for the first messages.
    """
    gloo: Any = dist.ProcessGroupGloo
    addresses: Any = dist.HashStore()  # type: ignore[attr-defined]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    device = gloo.create_device(interface=interface, lazy_init=True) if interface else gloo.create_default_device(True)
    options = gloo._Options()
    # gloo waits five times its timeout for a connection (`waitUntil` in its `tcp/pair.h`).
    options._devices, options._timeout, options._threads = [device], max(timeout / 5, timedelta(milliseconds=1)), 2
    group = gloo(addresses, rank, size, options)

    def tell(of: int, address: bytes) -> None:
        addresses.set(f"0/{of}", address)

    return group, bytes(addresses.get(f"0/{rank}")), tell


def shut_down_connections(own: bytes, others: Iterable[bytes]) -> None:
    """Shuts down the connections of a group of `gloo_of_addresses` with other ranks. `own`, `others`: addresses, as it
    gave them.

    `abort` of torch's gloo group does nothing in torch 2.11 to 2.14 (`Backend.hpp`). A wait that ends closes all pairs,
    also one that is still connecting, and gloo ends the process if that connection comes later.
    """
    mine, listeners = _listener_of(own), {_listener_of(address) for address in others}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.getpeername()[:2] in listeners or found.getsockname()[:2] == mine:
                    found.shutdown(socket.SHUT_RDWR)


def _listener_of(address: bytes) -> tuple[str, int]:
    """Host and port of an address of gloo: the length of a name, the name, the length of what follows, and there a
    `sockaddr_storage` (`Rank::bytes` in its `tcp/context.cc`)."""
    name_bytes = int.from_bytes(address[:8], sys.byteorder)
    found = address[16 + name_bytes :]
    family, port = int.from_bytes(found[:2], sys.byteorder), int.from_bytes(found[2:4], "big")
    host = found[4:8] if family == socket.AF_INET else found[8:24]
    return socket.inet_ntop(family, host), port


def ranks_of_dcp_save() -> tuple[int, ...] | None:
    """The ranks, as the default group numbers them, of the `dcp.save` whose planner calls this. DCP does not tell
    planners the process group, and only the frame of its function knows it. (): one rank alone. None: no such frame is
    found."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.utils import _DistWrapper

    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == "local_step" and frame.f_globals is vars(state_dict_saver):
            wrapper = frame.f_locals.get("distW")
            if not isinstance(wrapper, _DistWrapper):
                return None
            if not wrapper.use_dist or wrapper.get_world_size() == 1:
                return ()
            return tuple(dist.get_process_group_ranks(wrapper.group or dist.group.WORLD))
        frame = frame.f_back
    return None


def weights_only_globals() -> dict[str, Any]:
    """The globals that torch's restricted unpickler allows, by name."""
    allowed: dict[str, Any] = _weights_only_unpickler._get_allowed_globals()
    return allowed
