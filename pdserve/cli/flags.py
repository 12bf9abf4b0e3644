"""The flags of `serve` and `up`: names as vLLM has them, each a field of the configuration.

A flag has no type, range or default of its own: the text goes to `pdserve.config`, which checks it as it
checks a file. What has no flag here is set in a file or by its environment variable.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pdserve.config import Setting
from pdserve.config.fields import fields

FLAGS: dict[str, tuple[str, ...]] = {
    "engine.role": ("--role",),
    "model.model": ("--model",),
    "server.host": ("--host",),
    "server.port": ("--port",),
    "cluster.prefill_peers": ("--prefill-peer",),
    "cluster.secret_file": ("--secret-file",),
    "server.served_model_name": ("--served-model-name",),
    "server.api_key": ("--api-key",),
    "server.shutdown_timeout": ("--shutdown-timeout",),
    "model.dtype": ("--dtype",),
    "model.kv_cache_dtype": ("--kv-cache-dtype",),
    "model.max_model_len": ("--max-model-len",),
    "model.seed": ("--seed",),
    "engine.page_size": ("--page-size", "--block-size"),
    "engine.max_num_seqs": ("--max-num-seqs",),
    "engine.max_num_batched_tokens": ("--max-num-batched-tokens",),
    "engine.max_waiting": ("--max-waiting",),
    "engine.kv_cache_memory_bytes": ("--kv-cache-memory-bytes",),
    "engine.num_pages": ("--num-pages",),
    "engine.batch_invariant": ("--enable-batch-invariant",),
    "engine.threads": ("--threads",),
    "engine.cpus": ("--cpus",),
    "cluster.node_id": ("--node-id",),
    "cluster.segment_tokens": ("--segment-tokens",),
    "fabric.provider": ("--fabric-provider",),
    "fabric.host": ("--fabric-host",),
    "fabric.mode": ("--fabric-mode",),
    "fabric.library": ("--fabric-library",),
    "fabric.self_test": ("--fabric-self-test",),
    "observe.log_level": ("--log-level",),
    "observe.log_format": ("--log-format",),
}


def add_config_flags(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add `--config` and the flags of all fields but `without`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file; flags and PDSERVE_* win over it"
    )
    group = parser.add_argument_group("configuration")
    for key, names in FLAGS.items():
        if key in without:
            continue
        field = fields()[key]
        text = field.description.replace("%", "%%")
        if field.boolean:
            group.add_argument(*names, dest=key, action=argparse.BooleanOptionalAction, help=text)
        elif key == "server.served_model_name":
            group.add_argument(*names, dest=key, nargs="+", metavar="NAME", help=text)
        elif field.many and not field.form:
            group.add_argument(*names, dest=key, action="append", metavar="URL", help=text + " (repeatable)")
        else:
            default = "" if field.default is None else f" (default: {field.default})"
            group.add_argument(*names, dest=key, metavar=field.name.upper(), help=text + default)


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """The flags that were given, as settings that win over everything else."""
    given = []
    for key, names in FLAGS.items():
        value = getattr(arguments, key, None)
        if value is not None:
            given.append(Setting(key, value, names[0], text=True))
    return given
