"""`tandem generate`: mistakes in its options."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tandem.cli import main
from tests.tandem.commands.background import Background


def generate(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ("generate", "Once", *arguments))
    return result.exit_code, result.output


def test_a_request_that_is_late_names_the_option(stack: Background) -> None:
    status, output = generate("--address", stack.address, "--timeout", "1e-6")
    assert status == 1
    assert output.startswith("Error: "), "nothing precedes it"
    assert output.strip().endswith("(--timeout 1e-06: seconds for the whole request)")


@pytest.mark.parametrize("option", ["--json-schema", "--token-file"])
def test_a_missing_file_is_named_once(stack: Background, option: str) -> None:
    status, output = generate("--address", stack.address, option, "none.json")
    assert status > 0
    assert output.rstrip().endswith(": No such file or directory")


def test_no_time_at_all_is_a_mistake() -> None:
    status, output = generate("--timeout", "0")
    assert status == 2
    assert "'0'; allowed: a number, above 0" in output
