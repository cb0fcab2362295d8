"""Settings come from four sources in a fixed order; an error names the setting, its value and its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import pytest
from click.testing import CliRunner
from pydantic import ValidationError, model_validator

from serving.server import ServerSettings
from serving.settings import Section, Settings, SettingsError, environment_name, leaves, load, setting, settings_options
from serving.tls import TlsSettings


class Pool(Section):
    size: int = setting(2, "Instances.", ge=1)
    names: list[str] = setting([], "Names of the instances.")
    picker: Literal["score", "random"] = setting("score", "How an instance is picked.")
    model: str = setting("any", "Name of the model.")
    options: dict[str, int | bool] = setting({}, "Options of the picker.")
    verify: bool = setting(True, "Verify what arrives.")
    folder: Path | None = setting(None, "Folder of the store.")
    wait_s: float = setting(1.5, "Seconds to wait.", gt=0)


class Example(Settings):
    server: ServerSettings = ServerSettings()
    pool: Pool = Pool()
    of_other_programs = frozenset({("pool", "depth_m")})

    @model_validator(mode="after")
    def _has_instances(self) -> Self:
        if self.pool.names == ["none"]:
            raise ValueError("pool.names needs instances")
        return self


class Encrypted(Settings):
    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tandem.yaml"
    path.write_text("server: {port: 1}\npool:\n  size: 10\n  wait_s: 0.5\n  names: [a, b]\n")
    return path


def test_flags_beat_the_environment_beats_the_file_beats_the_defaults(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_SERVER__PORT", "2")
    monkeypatch.setenv("TANDEM_POOL__SIZE", "20")
    settings = load(Example, config=config, flags={("server", "port"): 3})
    assert settings.server.port == 3
    assert settings.pool.size == 20
    assert settings.pool.wait_s == 0.5
    assert settings.pool.names == ["a", "b"]
    assert settings.pool.picker == "score"


def test_the_environment_takes_lists_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_POOL__NAMES", '["x", "y"]')
    assert load(Example).pool.names == ["x", "y"]
    monkeypatch.setenv("TANDEM_POOL__NAMES", "x, y")
    with pytest.raises(SettingsError, match="written as JSON"):
        load(Example)


def test_a_path_that_is_set_to_nothing_is_an_error(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the working directory."""
    config.write_text('pool: {folder: ""}\n')
    with pytest.raises(
        SettingsError, match=r"pool\.folder = '' \(from .*tandem\.yaml\): .*must be a path, or left out"
    ):
        load(Example, config=config)
    monkeypatch.setenv("TANDEM_POOL__FOLDER", "")
    with pytest.raises(SettingsError, match=r"pool\.folder = '' \(from TANDEM_POOL__FOLDER\): .*must be a path"):
        load(Example)
    given: list[Path | None] = []
    command = settings_options(Example)(lambda settings: given.append(settings.pool.folder))
    result = CliRunner().invoke(command, ["--pool-folder", ""])
    assert "pool.folder = '' (from flags): Value error, must be a path" in result.output
    monkeypatch.delenv("TANDEM_POOL__FOLDER")
    assert CliRunner().invoke(command, ["--pool-folder", "."]).exit_code == 0
    assert given == [Path(".")]


def test_an_integer_that_no_message_has_is_an_error() -> None:
    assert load(Example, flags={("pool", "size"): 2**63 - 1}).pool.size == 2**63 - 1
    with pytest.raises(
        SettingsError, match=r"pool\.size = 9223372036854775808 \(from flags\): .*at most 92233720368547"
    ):
        load(Example, flags={("pool", "size"): 2**63})


def test_settings_are_frozen() -> None:
    settings = load(Example)
    with pytest.raises(ValidationError):
        settings.pool.size = 3


def test_an_unknown_key_in_the_file_suggests_the_right_one(config: Path) -> None:
    config.write_text("pool: {sise: 3}\nsever: {port: 1}\n")
    with pytest.raises(SettingsError) as caught:
        load(Example, config=config)
    assert "unknown setting pool.sise; did you mean pool.size?" in str(caught.value)
    assert "unknown setting sever; did you mean server?" in str(caught.value)


def test_an_unknown_variable_suggests_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SERVER__PROT", "1")
    with pytest.raises(SettingsError, match="unknown setting TANDEM_SERVER__PROT; did you mean TANDEM_SERVER__PORT"):
        load(Example)


def test_a_misspelt_section_in_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SERVR__PORT", "1")
    with pytest.raises(SettingsError, match="unknown section in TANDEM_SERVR__PORT; did you mean TANDEM_SERVER__"):
        load(Example)


def test_variables_of_kubernetes_and_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_PORT", "tcp://10.0.0.7:80")
    monkeypatch.setenv("TANDEM_SERVER_PORT", "tcp://10.0.0.8:80")
    monkeypatch.setenv("TANDEM_AUTOSCALER__INTERVAL_S", "3")
    monkeypatch.setenv("TANDEM_SERVER", "demo")  # compose.yaml has some like it: TANDEM_MODEL
    monkeypatch.setenv("TANDEM_POOL", '{"size": 7}')
    assert load(Example) == Example()


def test_an_invalid_value_is_reported_with_its_setting_and_origin(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("pool: {size: 0}\n")
    monkeypatch.setenv("TANDEM_SERVER__PORT", "many")
    with pytest.raises(SettingsError) as caught:
        load(Example, config=config)
    assert f"pool.size = 0 (from {config}): Input should be greater than or equal to 1" in str(caught.value)
    assert "server.port = 'many' (from TANDEM_SERVER__PORT): Input should be a valid integer" in str(caught.value)


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_a_number_that_is_not_finite_is_refused(config: Path, value: str) -> None:
    config.write_text(f"pool: {{wait_s: {value}}}\n")
    with pytest.raises(SettingsError, match=r"^pool\.wait_s = .* should be a finite number"):
        load(Example, config=config)


def test_a_problem_of_several_settings_names_no_source(config: Path) -> None:
    config.write_text("pool: {names: [none]}\n")
    with pytest.raises(SettingsError) as caught:
        load(Example, config=config, flags={("server", "port"): 1})
    assert str(caught.value) == "Value error, pool.names needs instances"


def test_a_problem_of_a_section_names_every_source_of_its_settings(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("tls: {cert_file: a}\n")
    monkeypatch.setenv("TANDEM_TLS__KEY_FILE", "b")
    with pytest.raises(SettingsError) as caught:
        load(Encrypted, config=config, flags={("server", "port"): 1})
    assert str(caught.value).startswith(f"tls (from {config}, environment): Value error, cert_file, key_file and")
    config.write_text("tls: 3\n")
    monkeypatch.delenv("TANDEM_TLS__KEY_FILE")
    with pytest.raises(SettingsError, match=r"^tls = 3 \(from .*tandem\.yaml\): Input should be"):
        load(Encrypted, config=config)


def test_a_problem_within_a_list_or_a_union_names_the_source_of_the_value(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("pool: {names: [a, [b]], options: {depth: deep}}\n")
    with pytest.raises(SettingsError) as caught:
        load(Example, config=config, flags={("pool", "size"): 1})
    names, *options = str(caught.value).splitlines()
    assert names == f"pool.names.1 = ['b'] (from {config}): Input should be a valid string"
    assert len(options) == 2
    assert all(line.startswith(f"pool.options.depth = 'deep' (from {config}): Input") for line in options)
    monkeypatch.setenv("TANDEM_POOL__NAMES", "[[1]]")
    with pytest.raises(SettingsError, match=r"pool\.names\.0 = \[1\] \(from TANDEM_POOL__NAMES\): Input"):
        load(Example, config=config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "model: null",
            'model = None (from FILE): Input should be a valid string; give a text, or "null" in quotes for',
        ),
        ("model: 1.10", "model = 1.1 (from FILE): Input should be a valid string; put it in quotes"),
        (
            "folder: 2026",
            "folder = 2026 (from FILE): Input is not a valid path for <class 'pathlib.Path'>; put it in quotes",
        ),
    ],
)
def test_a_text_that_yaml_reads_as_something_else_is_to_be_quoted(config: Path, content: str, message: str) -> None:
    config.write_text(f"pool: {{{content}}}\n")
    with pytest.raises(SettingsError) as caught:
        load(Example, config=config)
    assert "pool." + message.replace("FILE", str(config)) in str(caught.value)


def test_a_section_that_is_there_twice_is_reported(config: Path) -> None:
    config.write_text("pool: {size: 3}\nserver: {port: 1}\npool: {wait_s: 2}\n")
    with pytest.raises(SettingsError) as caught:
        load(Example, config=config)
    assert str(caught.value) == f"{config}: 'pool' is there twice, in lines 1 and 3: keep one of them"


def test_a_setting_that_another_program_has_in_the_section_is_ignored_in_the_environment_alone(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TANDEM_POOL__DEPTH_M", "not a number")
    assert load(Example) == Example()
    with caplog.at_level("DEBUG"):
        Example.log_ignored_variables()
    assert "other programs are ignored: TANDEM_POOL__DEPTH_M" in caplog.text
    config.write_text("pool: {depth_m: 3}\n")
    with pytest.raises(SettingsError, match=r"unknown setting pool\.depth_m"):
        load(Example, config=config)
    monkeypatch.setenv("TANDEM_POOL__DEPT_M", "3")
    with pytest.raises(SettingsError, match="unknown setting TANDEM_POOL__DEPT_M"):
        load(Example)


def test_a_section_whose_lines_are_comments_is_empty(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("server:\n#  port: 1\npool:\n")
    monkeypatch.setenv("TANDEM_POOL__SIZE", "5")
    assert load(Example, config=config) == Example(pool=Pool(size=5))


def test_an_empty_value_is_reported_with_its_file(config: Path) -> None:
    config.write_text("server:\n  port:\npool:\n  folder:\n")
    with pytest.raises(SettingsError) as caught:
        load(Example, config=config)
    assert str(caught.value) == f"server.port = None (from {config}): Input should be a valid integer"


@pytest.mark.parametrize("content", ["- a\n", "a: [\n", "pool: 3\n", "pool: []\n", "poool:\n"])
def test_a_file_without_sections_is_reported_with_its_name(config: Path, content: str) -> None:
    config.write_text(content)
    with pytest.raises(SettingsError, match=r"tandem\.yaml"):
        load(Example, config=config)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load(Example, config=tmp_path / "none.yaml")


def test_every_setting_says_what_it_does() -> None:
    for path, field in leaves(Example):
        assert field.description, path
    assert environment_name(("pool", "wait_s")) == "TANDEM_POOL__WAIT_S"


def test_a_setting_outside_any_section_is_refused() -> None:
    class Flat(Settings):
        port: int = setting(1, "A port.")

    with pytest.raises(TypeError, match=r"Flat\.port is not a Section"):
        list(leaves(Flat))


class TestFlags:
    def run(self, *arguments: str) -> tuple[int, str, Settings | None]:
        seen: list[Example] = []
        command = settings_options(Example)(seen.append)
        result = CliRunner().invoke(command, list(arguments), prog_name="example")
        return result.exit_code, result.output, seen[0] if seen else None

    def test_every_type_of_flag_arrives(self, config: Path) -> None:
        code, output, settings = self.run(
            *("--config", str(config), "--port", "7000", "--pool-size", "3", "--no-pool-verify"),
            *("--pool-names", "[x]", "--pool-picker", "random", "--pool-folder", "kv", "--pool-wait-s", "2"),
        )
        assert code == 0, output
        pool = Pool(size=3, names=["x"], picker="random", verify=False, folder=Path("kv"), wait_s=2.0)
        assert settings == Example(server=ServerSettings(port=7000), pool=pool)

    def test_the_long_flag_works_beside_the_short_one(self) -> None:
        _, _, settings = self.run("--server-port", "7001")
        assert isinstance(settings, Example)
        assert settings.server.port == 7001

    def test_help_teaches_defaults_units_and_variables(self) -> None:
        _, output, _ = self.run("--help")
        text = " ".join(output.split())
        assert "Seconds to wait. [default: 1.5; TANDEM_POOL__WAIT_S]" in text
        assert "[score|random]" in text

    def test_a_misspelt_flag_and_a_wrong_value_are_usage_errors(self) -> None:
        code, output, _ = self.run("--pool-sise", "3")
        assert code == 2
        assert "--pool-size" in output
        code, output, _ = self.run("--pool-size", "0")
        assert code == 2
        assert "greater than or equal to 1" in output
