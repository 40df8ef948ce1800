"""What gpu_check.sh runs: three calls, each of which ends within nine minutes, with a list of steps.

A machine with a GPU may be lent for half an hour, and for ten minutes a call. So what decides whether the rest can work
comes first, and what is likely to hang comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_machine import Machine, memory_folder, on_gpu, with_cuda_headers, with_sanitizer
from gpu_two_ranks import TWO_ON_ONE

BUDGET = 530.0  #: seconds for the steps of a call; the report is written after them
BATCHES = "raw-batches"  #: the step whose failure turns batches of copies off in all that follow
NO_BATCHES = {"VESCALE_CKPT_COPY_BATCHES": "0"}


@dataclass(frozen=True)
class Step:
    """A process with a limit of time."""

    name: str
    what: str
    limit: float  #: seconds
    command: tuple[str, ...]  #: after the Python
    missing: Callable[[Machine], str] = on_gpu  #: why it cannot run; empty if it can
    environment: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ("build",)  #: steps that must not have failed
    beside: bool = False  #: it runs at the same time as the step before it
    has_all_time: bool = False  #: without it nothing else can run, so that its limit is what is left of the call


@dataclass(frozen=True)
class Call:
    name: str
    what: str
    steps: tuple[Step, ...]


def groups(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps that run at the same time, group after group."""
    group: list[Step] = []
    for step in steps:
        if group and not step.beside:
            yield group
            group = []
        group.append(step)
    if group:
        yield group


def seconds_of(steps: Sequence[Step]) -> float:
    """The sum of their limits."""
    return sum(max(step.limit for step in group) for group in groups(steps))


def limit_now(group: Sequence[Step], later: Sequence[Step], left: float) -> dict[str, float]:
    """The seconds that each step of a group may take if so many are left: its limit, and as much again if the steps
    before have left so much that all `later` ones can have theirs."""
    spare = max(0.0, left - seconds_of([*group, *later]))
    return {step.name: left if step.has_all_time else min(step.limit + min(step.limit, spare), left) for step in group}


# --- Kinds of steps


PYTEST = (
    "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-rs", "-m", "gpu",
)  # fmt: skip
SUBSET = "come_back or tensors_of_all_kinds or behind_what_the_current_stream or a_gate_guards or loads_come_after"
#: Files with steps of their own, by their names. All other tests of the folder are in the step `tests`.
OWN = ("ranks", "loads", "safetensors", "memory", "gate", "check")
RANKS = "tests/gpu/test_gpu_ranks.py"


def tests(name: str, what: str, limit: float, *, beside: bool = False) -> Step:
    """The tests of the file `name`, or of all files that have no step of their own."""
    words = f"test_gpu_{name}" if name else f"not ({' or '.join(f'test_gpu_{own}' for own in OWN)})"
    command = (*PYTEST, "-k", words, "tests/gpu")
    return Step(f"tests-{name}" if name else "tests", what, limit, command, beside=beside)


def subset(name: str, variable: str, value: str, *, beside: bool = True) -> Step:
    command = (*PYTEST, "-k", SUBSET, "tests/gpu/test_gpu.py")
    return Step(f"tests-{name}", f"{variable}={value}", 45, command, environment={variable: value}, beside=beside)


def decide(name: str, what: str, limit: float, *, beside: bool = False) -> Step:
    return Step(name, what, limit, ("scripts/gpu_decide.py", name.replace("-", "_")), beside=beside)


def figures(name: str, what: str, limit: float, *options: str) -> Step:
    """Measured where files lie in memory, unless the options say how large the state is: then on the disk."""
    folder, gib = memory_folder()
    return Step(
        name, what, limit,
        ("-m", "benchmarks.gpu", "--sections", name, *(options or (f"--gib={gib:g}", "--dir", folder)), "--rounds=3"),
    )  # fmt: skip


def sanitized(tool: str, *, beside: bool = True) -> Step:
    what = f"compute-sanitizer {tool} on the kernels"
    return Step(f"sanitizer-{tool}", what, 120, ("scripts/gpu_steps.py", tool), with_sanitizer, beside=beside)


#: 1.6 GB of state, and steps so long that ten of them write it at 1.3 GB/s.
STEP_TIME = ("--width=2048", "--rows=32768", "--rounds=2")

MACHINE = Step("machine", "what is there", 25, ("scripts/gpu_steps.py", "machine"), lambda machine: "", after=())


def build(limit: float) -> Step:
    what = "the engine in place, with the kernel"
    return Step("build", what, limit, ("scripts/gpu_steps.py", "build"), after=(), has_all_time=True)


HEADERS = Step(
    "headers", "what we declare of CUDA against its headers", 20, ("scripts/gpu_steps.py", "headers"), with_cuda_headers
)

# --- The calls

CALLS = (
    Call(
        "A",
        "whether it works at all",
        (
            MACHINE,
            build(160),
            HEADERS,
            decide(BATCHES, "many copies in a call: no crash, no hang", 45),
            decide("raw-across-allocations", "what CUDA says to a copy over two allocations", 15),
            decide("raw-wrong-address", "whether the error of a wrong address sticks", 15),
            tests("loads", "loads to devices, into many allocations", 60),
            tests("safetensors", "safetensors files to devices", 60, beside=True),
            tests("memory", "freed, full and unlocked memory, errors that stick", 60),  # alone: it fills the device
            tests("", "all other tests marked gpu", 120),
            tests("gate", "gates with compiled models and optimizers", 120, beside=True),
        ),
    ),
    Call(
        "B",
        "how fast it is",
        (
            MACHINE,
            build(20),
            subset("expandable", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", beside=False),
            subset("async-allocator", "PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
            subset("blocking", "CUDA_LAUNCH_BLOCKING", "1"),
            subset("one-connection", "CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            figures("ceilings", "the bus's ceilings", 20, "--gib=4"),
            figures("copies", "copies of many and of strided tensors", 80, "--gib=4"),
            decide("raw-bandwidth", "copies by memory, alignment and size, in batches and one by one", 25),
            decide("raw-page-tables", "device memory that locked memory takes", 20),
            decide("launches-beside-locks", "launches while memory is locked", 20),
            decide("first-call-costs", "the first saves after prepare", 20),
            decide("raw-pageable-batch", "batches of unlocked memory", 12),
            decide("direct-into-pinned", "direct I/O into torch's pinned memory", 12),
            figures("first", "the first save of a process and steady ones", 30),
            figures("prepared", "the same after prepare", 30),
            figures("gated", "saves behind a gate, launches beside them", 30),
            figures("both-ways", "synchronous saves and loads, device and host", 45),
            figures("small-loads", "loads of 20,000 small tensors", 30),
            figures(
                "safetensors",
                "loads of safetensors files, ours and the library's",
                20,
                "--gib=1",
                "--dir",
                memory_folder()[0],
            ),
            figures("odd", "rare dtypes, offsets and strides beyond 4 GiB", 15),
            figures("growth", "200 asynchronous saves", 20),
        ),
    ),
    Call(
        "C",
        "ranks, sanitizers, training",
        (
            MACHINE,
            build(30),
            decide("nccl-speed", "two ranks on one device over NCCL", 45),
            Step(
                "nccl-one-gpu",
                "loads of two ranks on one device",
                75,
                (*PYTEST, "-rA", RANKS),
                environment=TWO_ON_ONE,
                after=("build", "nccl-speed"),
            ),
            decide("nccl-absent", "a rank that never connects", 45),
            decide("nccl-death", "a rank that dies", 60, beside=True),
            sanitized("memcheck", beside=False),
            sanitized("racecheck"),
            sanitized("initcheck"),
            Step(
                "train",
                "FSDP2: train, save, kill, resume, losses bit for bit",
                120,
                ("-m", "benchmarks.gpu_train"),
                beside=True,
            ),
            Step(
                "step-time",
                "bf16 FSDP2: what saves every 10 steps cost training",
                65,
                ("-m", "benchmarks.gpu_step_time", *STEP_TIME, "--dir", memory_folder()[0]),
            ),
            figures("disk", "the disk's ceiling", 25, "--gib=1"),
            figures("stock", "beside stock DCP, on the disk", 40, "--gib=0.5"),
            figures("pack-sizes", "many small tensors by VESCALE_CKPT_PACK_BYTES", 35, "--gib=4"),
        ),
    ),
)
