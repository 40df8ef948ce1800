"""Trains torchtitan's smallest Llama on the CPU, and resumes. Arguments: folder of the job, then its own flags.

torchtitan runs on accelerators with a torch newer than its release. What it lacks here is given to it first.
"""

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compilation would take minutes

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

torch._utils._get_available_device_type = lambda: "cpu"  # 1: else it takes CUDA
torch.cpu.device_count, torch.cpu.current_device = lambda: 64, lambda: 0
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group=None: None  # 2: of a newer torch
_divide = _fsdp_collectives._get_gradient_divide_factors


def _sum_alone(scattering, reducing, dtype, device="", factor=None, _=False):
    return _divide(scattering, reducing, dtype, device, factor, True)


_fsdp_collectives._get_gradient_divide_factors = _sum_alone  # 3: gloo has no PREMUL_SUM

from datasets import Dataset  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402
from torchtitan.train import main  # noqa: E402


class Letters(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config=None, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text, add_bos=False, add_eos=False):
        return [ord(letter) % 256 for letter in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    def get_vocab_size(self):
        return 256


def _plain_attention(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, **_):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
    made = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=True)
    return made.transpose(1, 2)


attention.FlexAttention.forward = _plain_attention  # 4: FlexAttention has no backward on CPUs
_debugmodel = config_registry.llama3_debugmodel


def small(layers):
    config = _debugmodel()
    config.tokenizer = Letters.Config()
    config.training.seq_len, config.training.local_batch_size = 16, 4 // int(os.environ["WORLD_SIZE"])
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]  # of six
    config.activation_checkpoint = None
    return config


def log(self, step, global_avg_loss, *_, **__):
    if dist.get_rank() == 0:
        print(f"step {step} loss {float(global_avg_loss).hex()}", flush=True)


def prepare(folder, *flags, layers=1, stock=False):
    """Sets what torchtitan's `main` reads: a model of some layers, a text, and the command line."""
    texts = [" ".join(str(number * 7 % 101) for number in range(line, line + 40)) for line in range(200)]
    text_datasets.DATASETS["c4_test"] = DatasetConfig(
        path="", loader=lambda path: Dataset.from_dict({"text": texts}), sample_processor=lambda sample: sample["text"]
    )
    config_registry.llama3_debugmodel = lambda: small(layers)
    metrics.MetricsProcessor.log = log
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="cpu", reset_peak_stats=lambda: None, get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6)
    )
    sys.argv[1:] = [
        "--module", "llama3", "--config", "llama3_debugmodel", "--dump_folder", folder,
        "--training.steps", "8", "--debug.seed", "1",
        "--parallelism.spmd_backend", "full_dtensor",  # 5: spmd_types wants a newer torch
        "--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last_save_model_only",
        *flags,
    ]  # fmt: skip
    if not stock:
        sys.argv += [
            "--override.imports",
            f"vescale_ckpt.integrations.torchtitan.vescale{os.environ.get('OPTIONS', '')}",
        ]


if __name__ == "__main__":
    prepare(*sys.argv[1:], stock="STOCK" in os.environ)
    main()
