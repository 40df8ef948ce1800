"""Lists the commands of `vescale-ckpt` with their arguments, help texts and examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """A required argument of a command, or an option, which begins with dashes."""

    name: str
    how: dict[str, Any]  #: keywords of `argparse.ArgumentParser.add_argument`


def value(name: str, help: str, **how: Any) -> Argument:
    """Returns an argument or option with a value. Its help includes the choices and the default."""
    if "choices" in how:
        how["metavar"] = name.lstrip("-").replace("-", "_").upper()
        help += f" ({', '.join(how['choices'])})"
    if how.get("default"):
        help += f" [default: {how['default']}]"
    return Argument(name, {"help": help, **how})


def flag(name: str, help: str) -> Argument:
    return Argument(name, {"help": help, "action": "store_true"})


@dataclass(frozen=True)
class Command:
    """A command. Its code is imported when it runs, so that `--help` does not wait for torch."""

    name: str
    about: str  #: one line
    run: str  #: "module:function" below `vescale_ckpt.cli`; the function takes the options and returns the exit status
    arguments: tuple[Argument, ...]  #: without --json
    description: str  #: paragraphs
    examples: tuple[str, ...]  #: command lines
    json: str  #: the fields of the document that --json prints, for docs/commands.md

    @property
    def all_arguments(self) -> tuple[Argument, ...]:
        return *self.arguments, flag("--json", "print one JSON document")


_ALL = flag("--all", "print long lists whole")
_QUIET = flag("-q, --quiet", "print errors only: the exit status tells the rest")
_KEYS = value(
    "--keys",
    "keys to select: a name, a prefix up to a dot, or a pattern; with a leading !, keys to exclude",
    metavar="PATTERN",
    action="append",
)
_PATH = value("path", "a checkpoint: a directory, or a file of safetensors or torch.save", metavar="PATH")
_DTYPE = value("--dtype", "convert floating-point tensors to this dtype", metavar="[PATTERN=]DTYPE", action="append")
_OVERWRITE = flag("--overwrite", "replace an existing DST")
_RENAME = value("--rename", "a name, or a prefix up to a dot", metavar="OLD=NEW", action="append")
_DIRECTORY = value("directory", "the directory of a CheckpointManager, which contains step-N", metavar="DIR")
_BEST = value("--best", "the metric that ranks checkpoints", metavar="METRIC")
_BEST_MODE = value("--best-mode", "whether a better metric is greater or less", choices=("max", "min"))

COMMANDS = (
    Command(
        "inspect",
        "show the contents of a checkpoint, without reading tensors",
        "show_keys:inspect",
        (
            _PATH,
            _KEYS,
            value("--depth", "levels of the tree to show; 0: every key", type=int, default=2, metavar="N"),
            _ALL,
        ),
        "Reads DCP checkpoints (of this package and of stock DCP), safetensors and files of torch.save. Runs no code "
        "of the checkpoint. Shows the values of numbers, strings and short lists (in a DCP checkpoint, of the first "
        "200 objects), when, by how many ranks and with which versions this package saved it, and its fingerprint.",
        (
            "vescale-ckpt inspect checkpoints/step-1000",
            "vescale-ckpt inspect model.safetensors --keys 'model.layers.0.*' --depth 0",
        ),
        json=(
            "`path`, `format`, `writer`, `save_id`, `bytes` (of tensors), `file_bytes`, `tensors` (by key: "
            "`shape`, `dtype`, `bytes`, `chunks`, each with `offsets`, `sizes`, `file`, `offset`, `bytes`), "
            "`objects` (by key: `file`, `offset`, `bytes`, `value`; null: not plain), `aliases` (other names of "
            "tensors), `files` (length by name; -1: missing), `is_node_part` (whether other machines may have what is "
            "missing), `saved_by` (`time`, `ranks`, `torch`, `vescale_ckpt`; null: not recorded), `fingerprint` "
            "(null: not kept)"
        ),
    ),
    Command(
        "verify",
        "verify every byte of a checkpoint against its checksums",
        "verify_compare:verify",
        (_PATH, flag("--quick", "check metadata and the lengths of files only"), _ALL, _QUIET),
        "Exit status 1 if a load would raise; 2 if no damage was found, but something could not be read; 3 if all is "
        "readable, and has no checksums.",
        ("vescale-ckpt verify checkpoints/step-1000", "vescale-ckpt verify --quick checkpoints/step-1000"),
        json=(
            "`ok`, `path`, `quick`, `keys`, `files`, `bytes`, `unverified_bytes`, `damaged`, `refused`, `unreadable` "
            "and `harmless` (lists of key, file, offset, reason), `unchecked`, `indexed`"
        ),
    ),
    Command(
        "diff",
        "compare two checkpoints, of any format",
        "verify_compare:diff",
        (
            value("a", "a checkpoint", metavar="A"),
            value("b", "another one", metavar="B"),
            flag("--values", "read and compare values, in bounded memory: -0.0 equals 0.0, NaN equals NaN"),
            flag("--bits", "like --values, but compare bit by bit"),
            flag("--fingerprints", "compare the fingerprints that saves have kept, of two checkpoints or of two runs"),
            _KEYS,
            _RENAME,
            _ALL,
            _QUIET,
        ),
        "Compares keys, shapes, dtypes and objects, and the stored checksums of tensors, without reading their data. "
        "Exit status 1 if anything differs, even -0.0 and 0.0; 3 if nothing does, but some values were not compared: "
        "only checkpoints of this package have checksums per tensor, and shards that are cut otherwise have others. "
        "With --values, all data is read, and numbers are compared as numbers; the parts of a complex number count "
        "separately, and objects must have the same type. With --bits, every bit must be equal. With --rename, --keys "
        "selects keys of A, and all of B is compared with them.\n\nWith --fingerprints, A and B may be directories of "
        "a CheckpointManager: their common steps are compared in ascending order, up to the first that differs. Only "
        "fingerprints are read, which saves with fingerprint=True keep. Exit status 1 if a step differs; 3 if none "
        "does, but a step is missing in one run, or has no fingerprint, or holds values for each rank of another "
        "number of ranks.",
        (
            "vescale-ckpt diff step-1000 step-2000",
            "vescale-ckpt diff --fingerprints runs/before-upgrade runs/after-upgrade",
            "vescale-ckpt diff --values step-1000 exported.safetensors --keys model --rename model=",
        ),
        json=(
            "`equal`, `only_a`, `only_b`, `kinds` (by key: the kind in A and in B), `objects`, `values` (of "
            "tensors that differ: `key`, `elements`, `different`, `max_abs`, `max_rel`, `not_finite_a`, "
            "`not_finite_b`, `unknown`), `checksums` (tensors whose bytes differ), `not_compared`, `compared`, "
            "`compared_bytes`; with --fingerprints, the schema `diff-fingerprints/1`: `equal`, `step` (the first that "
            "differs; null: none, or two checkpoints), `different` (how, by key), `equal_steps`, `steps_without` (a "
            "fingerprint), `only_a`, `only_b` (steps), `not_compared` (keys)"
        ),
    ),
    Command(
        "list",
        "list the checkpoints of a manager: when they were saved, how large, their metrics, whether they are complete",
        "manager_commands:list_steps",
        (value("directories", "directories of a CheckpointManager: of its tiers, say", metavar="DIR", nargs="+"),),
        "Checks names and lengths, and reads no tensor. Exit status 1 if one is damaged, 2 if there is none.",
        ("vescale-ckpt list checkpoints", "vescale-ckpt list /nvme/run s3://bucket/run"),
        json=(
            "`steps`, each with `step`, `saved` (when it was committed; null: not known), `saved_by` (as in inspect), "
            "`bytes` (of data files), `metrics`, "
            "`state` (complete; damaged; refused; or not all is here: of one machine, or unreadable now), `reason`, "
            "`last` (whether it was saved last), `directory`"
        ),
    ),
    Command(
        "latest",
        "print the path of the newest sound checkpoint of a manager",
        "manager_commands:latest",
        (
            _DIRECTORY,
            flag("--full", "verify every byte, not only lengths"),
            _BEST,
            _BEST_MODE,
        ),
        "With --best: of the undamaged one with the best metric. Exit status 1 if all are damaged, 2 if there is none.",
        ("vescale-ckpt latest checkpoints", "vescale-ckpt latest checkpoints --best loss --best-mode min"),
        json=("`step`, `path` (null if there is none), `passed_over` (by step: why)"),
    ),
    Command(
        "prune",
        "remove old checkpoints of a manager by a rule",
        "manager_commands:prune",
        (
            _DIRECTORY,
            value("--keep", "how many to keep: those saved last, or with --best the best ones", type=int, metavar="N"),
            value("--keep-period", "keep steps that are multiples of N permanently", type=int, metavar="N"),
            _BEST,
            _BEST_MODE,
            flag("--dry-run", "remove nothing, print what would be removed"),
            _QUIET,
        ),
        "A checkpoint in use is kept, and so is at least one undamaged checkpoint.",
        ("vescale-ckpt prune checkpoints --keep 3 --dry-run",),
        json=("`removed`, `kept` (steps), `dry_run`"),
    ),
    Command(
        "repair",
        "remove what saves, exports and copies that died have left, write copies of extra files that are missing",
        "manager_commands:repair",
        (
            value(
                "directory", "a checkpoint's directory, that of a CheckpointManager, or one with exports", metavar="DIR"
            ),
            flag("--dry-run", "remove nothing, print what would be removed"),
            _QUIET,
        ),
        "Files of a running save, export or copy are kept. If an unfinished copy is removed, it starts from scratch. "
        "Damaged data cannot be repaired: see verify.",
        ("vescale-ckpt repair checkpoints --dry-run",),
        json="`removed` (paths), `written` (paths), `dry_run`",
    ),
    Command(
        "copy",
        "copy a checkpoint, with verification, resumable after a kill",
        "write_copies:copy",
        (
            value("src", "the directory of a checkpoint of any format", metavar="SRC"),
            value("dst", "the path of the copy", metavar="DST"),
            flag("--overwrite", "replace an existing checkpoint"),
            _QUIET,
        ),
        "What was written is read back and compared. DST appears atomically. After a kill or Ctrl-C, the same command "
        "continues with the missing files. In an object store, `--overwrite` replaces files beside the old checkpoint, "
        "such as `config.json`, after the copy has replaced the checkpoint: a kill between the two leaves the old "
        "files until the same command is run again. Exit status 1 if SRC is damaged: then nothing is written at DST.",
        ("vescale-ckpt copy checkpoints/step-1000 /backup/step-1000",),
        json=(
            "`path`, `seconds`, `files`, `bytes`, `resumed_files` and `resumed_bytes` (of these: complete when the "
            "copy began), `unverified_bytes` (without checksums in SRC), `left_out` (names that do not belong to the "
            "checkpoint)"
        ),
    ),
    Command(
        "convert",
        "write a checkpoint in another format",
        "write_copies:convert",
        (
            value("src", "the checkpoint to convert; its format is detected from the files", metavar="SRC"),
            value("dst", "a directory or file", metavar="DST"),
            value(
                "--format",
                "format of DST; by default, determined by its name",
                choices=("dcp", "safetensors", "torch"),
            ),
            _KEYS,
            _RENAME,
            _DTYPE,
            value(
                "--stack",
                "stack layers.*.w=layers.w, split layers.w=layers.*.w, or concatenate q,k,v=qkv",
                metavar="OLD=NEW",
                action="append",
            ),
            value("--max-shard-size", "maximum size of a safetensors file", default="5GB", metavar="SIZE"),
            value(
                "--on-objects",
                "what to do with values that are not tensors, if the format cannot hold them",
                default="warn",
                choices=("warn", "drop", "error"),
            ),
            _OVERWRITE,
            _QUIET,
        ),
        "Converts DCP checkpoints, safetensors and files of torch.save, and verifies what it reads; between DCP and "
        "safetensors, in bounded memory. Under torchrun, the ranks share the work.",
        (
            "vescale-ckpt convert checkpoints/step-1000 model.pt",
            "vescale-ckpt convert checkpoints/step-1000 hf --format safetensors --keys model --rename model= "
            "--dtype bfloat16",
        ),
        json=("`seconds`, `tensors`, `objects`, `bytes`, `files`, `left_out`"),
    ),
    Command(
        "export",
        "write the weights of a model as a Hugging Face folder",
        "write_copies:export",
        (
            value("src", "a training checkpoint of any format", metavar="SRC"),
            value("dst", "a directory; or one file, if it ends in .safetensors", metavar="DST"),
            value(
                "--key",
                "the name of the model in the checkpoint, which is removed from the names of its tensors",
                default="model",
                metavar="NAME",
            ),
            _DTYPE,
            value("--max-shard-size", "maximum size of a file", default="5GB", metavar="SIZE"),
            value("--config", "the model folder from which to copy config.json and the tokenizer", metavar="FOLDER"),
            _OVERWRITE,
            _QUIET,
        ),
        "Writes model.safetensors, or numbered files and their index. For other names, or parts of the model, use "
        "convert. With --config, files of FOLDER that end in .json, .txt, .model, .jinja or .py are copied beside the "
        "weights, except indexes of weights.",
        (
            "vescale-ckpt export checkpoints/step-1000 hf --dtype bfloat16 --config pretrained",
            "vescale-ckpt export checkpoints/step-1000 model.safetensors --key state.ema",
        ),
        json=("`seconds`, `tensors`, `objects`, `bytes`, `files`, `left_out` (values that are not tensors)"),
    ),
)
