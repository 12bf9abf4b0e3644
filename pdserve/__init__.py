"""pdserve: serve large language models with prefill and decode on separate nodes."""

__version__ = "0.1.0"
