"""The commands that need torch."""

from __future__ import annotations

from typer.testing import CliRunner

from lora_trainer.cli import app


def test_a_tiny_model_is_written_where_asked(tmp_path):
    result = CliRunner().invoke(app, ["make-tiny", "--arch", "zimage", str(tmp_path / "z")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "z" / "model_index.json").is_file()


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path):
    result = CliRunner().invoke(app, ["make-tiny", "--arch", "zimege", str(tmp_path / "z")])
    assert result.exit_code == 64
    assert "zimage" in result.output
