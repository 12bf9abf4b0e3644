"""Configuration, parsed once into frozen structs: default < file < environment < flag."""

from pdserve.config.check import check, is_loopback, warnings
from pdserve.config.environment import cache_directory, notify_socket, variables, watchdog_interval
from pdserve.config.load import Setting, load_config, render, resolve, secret_variables
from pdserve.config.schema import (
    ClusterConfig,
    EngineConfig,
    FabricConfig,
    ModelConfig,
    NodeConfig,
    ObserveConfig,
    Role,
    ServerConfig,
)

__all__ = [
    "ClusterConfig",
    "EngineConfig",
    "FabricConfig",
    "ModelConfig",
    "NodeConfig",
    "ObserveConfig",
    "Role",
    "ServerConfig",
    "Setting",
    "cache_directory",
    "check",
    "is_loopback",
    "load_config",
    "notify_socket",
    "render",
    "resolve",
    "secret_variables",
    "variables",
    "warnings",
    "watchdog_interval",
]
