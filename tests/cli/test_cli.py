"""The command line as a user meets it: tables, mistakes, exit codes."""

import subprocess
import sys

from benchmarks.lib.command_line import zerotune


def test_memory_of_a_file_shows_its_parameters(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(
        '{"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}'
    )
    assert "1.56 billion" in " ".join(zerotune("advise", str(path), "--memory").out.split())


def test_output_that_cannot_be_written_is_named():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zerotune.tuner.cli", "fabrics"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert "/dev/full" in done.stderr
    assert done.stderr.startswith("zerotune: ")
