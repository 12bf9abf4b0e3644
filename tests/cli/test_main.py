"""The command line: lazy, strict, one line an error, exit status 0, 1 or 2."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pdserve import __version__
from pdserve.cli.flags import FLAGS
from pdserve.cli.main import clear_cause, main, one_line
from pdserve.config.fields import fields
from pdserve.errors import ConfigError, FabricError, ModelError


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli.main", *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"pdserve {__version__}\n"


def test_help_imports_no_command() -> None:
    program = (
        "import sys\nfrom pdserve.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('aiohttp', 'uvloop', 'torch')\n"
        "loaded = [m for m in sys.modules if m.startswith('pdserve.') or m in heavy]\n"
        "print(sorted(loaded), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "['pdserve.cli', 'pdserve.cli.main', 'pdserve.errors']\n"


def test_unknown_words_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown command 'sevre'; did you mean serve?" in refused(capsys, "sevre")
    assert "known: serve, up, doctor, trace, config, version" in refused(capsys, "xyzzy")
    assert "unknown option --page-siz; did you mean --page-size?" in refused(capsys, "serve", "--page-siz=8")
    # An abbreviation would change its meaning when an option is added.
    error = refused(capsys, "serve", "--max-num-s", "1")
    assert "unknown option --max-num-s; did you mean --max-num-seqs?" in error
    assert "unknown argument extra" in refused(capsys, "version", "extra")


def test_bad_configuration_is_one_line_and_status_2() -> None:
    status, out, error = run("serve", "--port", "http")
    assert (status, out) == (2, "")
    assert error == "pdserve: error: --port = 'http': expected an integer from 0 to 65535\n"


class TestConfigCheck:
    def test_prints_what_a_node_would_run_with(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "node.toml"
        file.write_text(
            '[engine]\nrole = "decode"\n[cluster]\nprefill_peers = ["http://127.0.0.1:8001"]\n'
            '[server]\napi_key = "sesame"\n'
        )
        assert main(["config", "check", str(file)]) == 0
        out, error = capsys.readouterr()
        assert 'prefill_peers = ["http://127.0.0.1:8001"]' in out
        assert "sesame" not in out
        assert "warning: no cluster.secret" in error

    def test_refuses_what_a_node_would_refuse(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "node.toml"
        file.write_text("[engine]\npage_sice = 1\n")
        assert main(["config", "check", str(file)]) == 2
        assert "did you mean 'page_size'?" in capsys.readouterr().err


def test_flags_are_fields_and_few_fields_are_not_flags() -> None:
    assert FLAGS.keys() <= fields().keys()
    assert fields().keys() - FLAGS.keys() == {
        "server.max_body_bytes",
        "engine.steps_in_flight",
        "cluster.secret",
        "cluster.handover",
        "cluster.heartbeat_s",
        "cluster.dead_s",
    }


def test_of_a_group_of_errors_the_clearest_is_shown() -> None:
    ours = ModelError("model.safetensors:\n tensor missing")
    group = BaseExceptionGroup(
        "", [KeyboardInterrupt(), ExceptionGroup("", [ValueError("x"), ours]), FabricError("lost")]
    )
    assert clear_cause(group) is ours
    assert one_line(ours) == "model.safetensors: tensor missing"
    assert one_line(KeyError("k")) == "KeyError: 'k'"
    assert isinstance(clear_cause(ConfigError("c")), ConfigError)


class Node(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/pd/v1/trace/chatcmpl-1"
        body = json.dumps(TRACE if known else {"error": {"message": "unknown"}}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


TRACE = {
    "request_id": "chatcmpl-1",
    "node": "decode-0",
    "role": "decode",
    "peer": "prefill-0",
    "steps": {"1_parsed": 10.0, "8_ready": 10.5},
    "marks": {"received": 9.9, "first_token": 10.6, "last_token": 10.7},
    "layers": [
        {"chunk": 0, "layer": 0, "ready": 10.1, "posted": 10.11, "runs": 3, "counted": 10.12},
        {"chunk": 0, "layer": 1, "ready": 10.2, "posted": 10.21, "runs": 3, "counted": 10.22},
    ],
    "progress": [[10.12, 3], [10.22, 6]],
    "prompt_tokens": 20,
    "output_tokens": 3,
    "kv_bytes": 1000,
    "kv_pages": 2,
    "runs": 6,
}


class TestTrace:
    @pytest.fixture
    def url(self) -> Iterator[str]:
        with HTTPServer(("127.0.0.1", 0), Node) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    def test_shows_steps_layers_and_sums(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["trace", "chatcmpl-1", "--url", url]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0] == "request chatcmpl-1 on decode-0 (decode)"
        assert out[1] == "prefilled by prefill-0"
        assert [line.split()[-1] for line in out[2:7]] == [
            "received",
            "1_parsed",
            "8_ready",
            "first_token",
            "last_token",
        ]
        assert out[7] == (
            "chunk 0: 2 layers, ready 200.00 to 300.00 ms, posted 210.00 to 310.00 ms, "
            "counted 220.00 to 320.00 ms"
        )
        assert "  ttft_ms = 700" in out

    def test_as_json(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["trace", "chatcmpl-1", "--url", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == TRACE

    def test_what_cannot_be_had_is_one_line(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["trace", "x/../y", "--url", url]) == 1
        assert "knows no request x/../y" in capsys.readouterr().err
        assert main(["trace", "x", "--url", "file:///etc/passwd"]) == 1
        assert "expected http://HOST:PORT" in capsys.readouterr().err
        assert main(["trace", "x", "--url", "http://127.0.0.1:1"]) == 1
        assert "refused" in capsys.readouterr().err
