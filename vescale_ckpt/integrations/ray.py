"""`report` and `restore` save and load the state of a Ray Train run, for training functions of Ray's workers.

All workers write one checkpoint straight into the run's storage, a folder or an object store, so nothing is copied
there. Ray registers it when it is durable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from .. import SaveHandle, api
from ..errors import CheckpointError
from ._versions import check_version, hook

__all__ = ["report", "restore"]

check_version("ray", ("2.60", "2.61"))

_train_report: Any = hook("ray.train", "report")
_get_context: Any = hook("ray.train", "get_context")
_get_checkpoint: Any = hook("ray.train", "get_checkpoint")
_Checkpoint: Any = hook("ray.train", "Checkpoint")
_UploadMode: Any = hook("ray.train", "CheckpointUploadMode")  # absent where Ray Train V2 is switched off
_FileSelector: Any = hook("pyarrow.fs", "FileSelector")
#: What URLs begin with here, by the names that pyarrow has for its file systems.
_URL_OF = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "az://"}


def report(
    metrics: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    step: int,
    async_checkpoint: bool = True,
) -> SaveHandle:
    """Saves `state` as `step-N` in the run's storage, and reports it to Ray with `metrics`. All workers call it.

    Args:
        metrics: those of `ray.train.report`; Ray keeps those of rank 0.
        async_checkpoint: whether the call returns before the checkpoint is durable. Ray hears of the checkpoint when it
            is durable. If the save fails, Ray ends the training with its error.

    Raises `CheckpointError` if the run's storage is no directory that all workers see, and no object store that this
    package knows. If Ray does not find there what was saved, the training ends with an error.
    """
    storage = _get_context().get_storage()
    name = f"step-{step}"
    path = os.path.join(storage.experiment_fs_path, name)
    url = _url(storage.storage_filesystem, path)
    handle = api.save(url, state, async_checkpoint=async_checkpoint)

    def durable(checkpoint: Any, _: str) -> Any:
        handle.result()
        if not checkpoint.filesystem.get_file_info(_FileSelector(path, allow_not_found=True)):
            raise CheckpointError(
                f"{url} was saved, and Ray does not find it in its storage: name the same endpoint and account in the "
                "environment (AWS_ENDPOINT_URL, for one) and in RunConfig(storage_path=)",
                path=url,
            )
        return checkpoint

    _train_report(
        dict(metrics),
        checkpoint=_Checkpoint(path, filesystem=storage.storage_filesystem),
        checkpoint_dir_name=name,
        checkpoint_upload_mode=_UploadMode.ASYNC if async_checkpoint else _UploadMode.SYNC,
        delete_local_checkpoint_after_upload=False,
        checkpoint_upload_fn=durable,
    )
    return handle


def restore(state: dict[str, Any], *, weights_only: bool = True) -> int | None:
    """Loads the checkpoint that Ray names into `state`, and returns its step; None if there is none yet.

    That is the checkpoint reported last, or the one a run was given. All workers call it; their number may differ from
    that of the save.
    """
    checkpoint = _get_checkpoint()
    if checkpoint is None:
        return None
    found = re.fullmatch(r"step-(\d+)", os.path.basename(checkpoint.path))
    if found is None:
        raise CheckpointError(f"{checkpoint.path} was not reported by vescale_ckpt.integrations.ray.report")
    url = _url(checkpoint.filesystem, checkpoint.path)
    api.load(url, state, weights_only=weights_only)
    return int(found[1])


def _url(file_system: Any, path: str) -> str:
    """The path or URL by which this package knows a path of a file system of pyarrow."""
    if (begin := _URL_OF.get(file_system.type_name)) is None:
        raise CheckpointError(
            f"the run's storage is a file system {file_system.type_name!r}: vescale_ckpt writes to a directory that "
            "all workers see, or to s3://, gs:// and az://. Give RunConfig(storage_path=) one"
        )
    return begin + path
