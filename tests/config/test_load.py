"""Precedence, names, types and ranges: what `load_config` takes and how it refuses the rest."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import NodeConfig, Setting, load_config, render
from pdserve.config.fields import fields
from pdserve.errors import ConfigError


def write(directory: Path, text: str, name: str = "node.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def flag(key: str, value: object, source: str = "--flag") -> Setting:
    return Setting(key, value, source, text=True)


def refusal(file: Path | None = None, env: dict[str, str] | None = None, *flags: Setting) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, env, flags)
    return caught.value.message


def test_defaults_alone_are_a_valid_configuration() -> None:
    assert load_config() == NodeConfig()


def test_later_places_win(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\npage_size = 32\nmax_num_seqs = 8\n[server]\nport = 1\n")
    env = {"PDSERVE_ENGINE_PAGE_SIZE": "64", "PDSERVE_SERVER_PORT": "2"}
    config = load_config(file, env, [flag("server.port", "3")])
    assert (config.engine.max_num_seqs, config.engine.page_size, config.server.port) == (8, 64, 3)


def test_unknown_key_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\npagesize = 32\n")
    assert refusal(file) == f"{file}: unknown key 'engine.pagesize'; did you mean 'page_size'?"


def test_key_of_another_section_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nprefill_peers = []\n")
    assert "did you mean 'cluster.prefill_peers'?" in refusal(file)


def test_unknown_section_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = write(tmp_path, "[sever]\nport = 1\n")
    assert refusal(file) == f"{file}: unknown section 'sever'; did you mean 'server'?"


def test_name_outside_a_section_is_refused(tmp_path: Path) -> None:
    assert "unknown name outside a section 'port'" in refusal(write(tmp_path, "port = 1\n"))
    assert "expected a section [server]" in refusal(write(tmp_path, "server = 1\n"))


def test_unknown_variable_is_refused_with_the_nearest_name() -> None:
    message = refusal(None, {"PDSERVE_ENGINE_PAGE_SIZ": "1"})
    assert message == (
        "unknown environment variable PDSERVE_ENGINE_PAGE_SIZ; did you mean 'PDSERVE_ENGINE_PAGE_SIZE'?"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('engine.page_size = "16"', "expected an integer from 1 to 1024"),
        ("engine.page_size = 0", "expected an integer from 1 to 1024"),
        ("engine.page_size = 1.5", "expected an integer from 1 to 1024"),
        ("engine.page_size = true", "expected an integer from 1 to 1024"),
        ("engine.page_size = []", "expected an integer from 1 to 1024"),
        ('engine.role = "both!"', "expected one of both, decode, prefill"),
        ("engine.batch_invariant = 1", "expected true or false"),
        ("server.shutdown_timeout = nan", "expected a number from 0 to 3600"),
        ("server.shutdown_timeout = -1", "expected a number from 0 to 3600"),
        ("cluster.heartbeat_s = 0", "expected a number above 0 to 86400"),
        ('cluster.prefill_peers = "http://127.0.0.1:8001"', "expected a list of strings"),
        ("engine.kv_cache_memory_bytes = -5", "expected a size in bytes"),
        ('engine.kv_cache_memory_bytes = "1 parsec"', "expected a size in bytes"),
        ('engine.cpus = "3-1"', "expected a list of CPU numbers"),
        ("engine.cpus = []", "expected a list of CPU numbers"),
        ('cluster.handover = "hidden"', "expected one of token"),
        ("model.seed = 99999999999999999999", "expected an integer from 0 to"),
    ],
)
def test_wrong_value_names_source_value_and_limit(tmp_path: Path, text: str, expected: str) -> None:
    key, value = text.split(" = ")
    section, name = key.split(".")
    file = write(tmp_path, f"[{section}]\n{name} = {value}\n")
    message = refusal(file)
    assert message.startswith(f"{file}: {key} = ")
    assert expected in message


def test_wrong_value_of_a_variable_and_of_a_flag_name_them() -> None:
    assert refusal(None, {"PDSERVE_SERVER_PORT": "65536"}) == (
        "PDSERVE_SERVER_PORT = '65536': expected an integer from 0 to 65535"
    )
    assert refusal(None, None, flag("server.port", "http", "--port")).startswith("--port = 'http': expected")


def test_text_places_spell_values_out() -> None:
    env = {
        "PDSERVE_ENGINE_BATCH_INVARIANT": "true",
        "PDSERVE_ENGINE_CPUS": "0-2,5",
        "PDSERVE_ENGINE_KV_CACHE_MEMORY_BYTES": "1.5GiB",
        "PDSERVE_MODEL_MAX_MODEL_LEN": "none",
        "PDSERVE_SERVER_SERVED_MODEL_NAME": "a, b",
    }
    config = load_config(None, env)
    assert config.engine.batch_invariant is True
    assert config.engine.cpus == (0, 1, 2, 5)
    assert config.engine.kv_cache_memory_bytes == 3 << 29
    assert config.model.max_model_len is None
    assert config.server.served_model_name == ("a", "b")


def test_unreadable_and_malformed_files(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "none.toml")
    assert "not TOML" in refusal(write(tmp_path, "[engine\n"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "not TOML" in refusal(tmp_path / "bytes.toml")


def test_render_is_a_file_that_loads_to_the_same_configuration(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '[server]\nhost = "::1"\nserved_model_name = ["a\\"b", "c"]\n[engine]\ncpus = [1, 0]\n',
    )
    config = load_config(file)
    assert load_config(write(tmp_path, render(config), "again.toml")) == config


def test_render_redacts_every_secret() -> None:
    secrets = [flag("server.api_key", "k" * 20), flag("cluster.secret", "s" * 20)]
    config = load_config(None, None, secrets)
    text = render(config)
    assert "kkk" not in text
    assert "sss" not in text
    assert text.count("<redacted>") == 2


def test_bad_secret_is_not_shown() -> None:
    message = refusal(None, {"PDSERVE_CLUSTER_SECRET": "tooshort"})
    assert "tooshort" not in message
    assert "16 to 4096 characters" in message


class TestSecretFile:
    def test_is_read_relative_to_the_file_that_names_it(self, tmp_path: Path) -> None:
        write(tmp_path, "  " + "x" * 32 + "\nsecond line\n", "secret")
        file = write(tmp_path, '[cluster]\nsecret_file = "secret"\n')
        assert load_config(file).cluster.secret == "x" * 32

    def test_missing_short_or_binary_is_refused(self, tmp_path: Path) -> None:
        file = write(tmp_path, '[cluster]\nsecret_file = "secret"\n')
        assert "cannot be read" in refusal(file)
        write(tmp_path, "tiny!", "secret")
        message = refusal(file)
        assert "16 to 4096 characters" in message
        assert "tiny!" not in message
        (tmp_path / "secret").write_bytes(b"\xff" * 40)
        assert "is not text" in refusal(file)

    def test_clashes_with_a_secret_given_directly(self, tmp_path: Path) -> None:
        file = write(tmp_path, '[cluster]\nsecret_file = "secret"\n')
        message = refusal(file, {"PDSERVE_CLUSTER_SECRET": "s" * 20})
        assert "are both set" in message
        assert "PDSERVE_CLUSTER_SECRET" in message


def test_every_field_has_a_description_and_a_default_within_its_own_limits() -> None:
    for field in fields().values():
        assert field.description, field.key
        assert msgspec.convert(field.default, field.annotation) == field.default, field.key


@given(st.text(max_size=20), st.sampled_from(sorted(fields().keys() - {"cluster.secret_file"})))
def test_any_text_gives_a_value_or_a_config_error(text: str, key: str) -> None:
    with contextlib.suppress(ConfigError):
        load_config(None, None, [flag(key, text)])
