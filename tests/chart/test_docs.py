"""docs/kubernetes/*.md: every values file renders, every value that is named is there, and every command of helm,
kubectl and docker has options that exist and names what the chart makes."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmError

from helm.rendering import CHART, Manifest, read_values, render
from tests.chart import kubectl
from tests.chart.fake_kube.kinds import KINDS
from tests.chart.rendered import EXAMPLES, component_of, deployment, of_kind
from tests.test_docs import commands

ROOT = CHART.parents[1]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "kubernetes").glob("*.md"))}
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES = read_values(CHART / "values.yaml")
OTHERS = re.compile(r".*\.md|tls\.(crt|key)|discovery\.k8s\.io")
"""Pages, keys in a Secret, an API group."""
RELEASE, NAMESPACE = "tandem", "llm"
MADE_BY: tuple[dict[str, Any], ...] = (
    {"autoscaling": {"mode": "builtin"}, "model": {"source": "hub", "hub": {"id": "a/b"}}},
    {"connector": {"name": "redis"}, "autoscaling": {"mode": "external", "keda": {"enabled": True}}},
    {"tls": {"enabled": True, "certManager": {"issuerRef": {"name": "a"}}}},
)
"""Values with which the pages' objects exist."""
_TOOLS = re.compile(r"\b(helm|kubectl|docker) ")
_WAITING = {"--wait": 0, "--timeout": 1, "--namespace": 1, "-n": 1}
_VALUES = {"--set": 1, "-f": 1, "--reset-then-reuse-values": 0, "--create-namespace": 0, "--server-side": 1}
HELM: dict[str, dict[str, int]] = {
    "install": {**_WAITING, **_VALUES},
    "upgrade": {**_WAITING, **_VALUES, "--install": 0},
    "rollback": _WAITING,
    "uninstall": _WAITING,
    "test": {**_WAITING, "--logs": 0},
    "get": _WAITING,
    "status": _WAITING,
    "show": {},
}
"""Options by command, and whether each has a value."""
KUBECTL: dict[str, dict[str, int]] = {
    "annotate": {},
    "auth": {"--subresource": 1, "--as": 1},
    "create": {"--from-literal": 1, "--from-file": 1},
    "describe": {"-l": 1},
    "exec": {},
    "get": {"-l": 1, "-o": 1, "--sort-by": 1},
    "logs": {"-l": 1, "-c": 1, "--previous": 0, "--tail": 1, "--since": 1, "--prefix": 0},
    "port-forward": {},
    "rollout": {},
    "scale": {"--replicas": 1},
}
KIND_NAMES = {name: kind.kind for kind in KINDS for name in (kind.plural, kind.kind.lower())}
KIND_NAMES["pvc"] = "PersistentVolumeClaim"


def blocks() -> list[dict[str, Any]]:
    """Every YAML block of the pages."""
    return [yaml.safe_load(one) for text in PAGES.values() for one in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def shown() -> list[dict[str, Any]]:
    """Those that are values."""
    return [one for one in blocks() if one.keys() <= VALUES.keys()]


def named() -> set[str]:
    """Every path below one of the chart's values, in prose and in `--set`."""
    first = "|".join(VALUES)
    found = re.findall(rf"(?<![\w./-])((?:{first})(?:\.[A-Za-z]\w*)+)", "\n".join(PAGES.values()))
    return {path for path in found if not OTHERS.fullmatch(path)}


def accepted(path: str) -> bool:
    """Whether the schema has such a value."""
    schema = SCHEMA
    for key in path.split("."):
        while "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        if key not in schema.get("properties", {}):
            return schema.get("type") == "object" and "properties" not in schema
        schema = schema["properties"][key]
    return True


def _paths(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{above}{key}.")


@pytest.mark.parametrize("number", range(len(shown())))
def test_values_that_are_shown_render(number: int) -> None:
    assert render(shown()[number])


def test_what_is_shown_and_is_no_values_file_is_an_overlay_that_kubectl_builds(tmp_path: Path) -> None:
    (overlay,) = [one for one in blocks() if not one.keys() <= VALUES.keys()]
    shutil.copytree(ROOT / "kustomize" / "base", tmp_path / "base")
    folder = tmp_path / "overlays" / "llm"
    folder.mkdir(parents=True)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    (folder / "key").write_text("00")
    command = [kubectl.program(), "kustomize", str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert built.returncode == 0, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    assert {one["metadata"]["namespace"] for one in objects} == {"llm"}
    decode = deployment(objects, "decode")["spec"]
    assert decode["replicas"] == overlay["replicas"][0]["count"]
    assert decode["template"]["spec"]["containers"][0]["image"] == "REGISTRY/tandem:0.1.0"
    (secret,) = of_kind(objects, "Secret")
    volumes = [one for one in decode["template"]["spec"]["volumes"] if "secret" in one]
    assert [one["secret"]["secretName"] for one in volumes] == [secret["metadata"]["name"]]


def test_values_that_are_named_are_there() -> None:
    assert len(shown()) >= 15
    assert len(named()) > 80
    assert sorted(path for path in named() if not accepted(path)) == []


def test_a_value_that_is_not_there_is_seen() -> None:
    assert all(accepted(path) for path in _paths(VALUES))
    assert not accepted("tls.existingSecrets")
    assert not accepted("instance.settings.engine.kv_cache_byte")


def test_every_example_is_in_the_page_of_the_install() -> None:
    assert set(re.findall(r"^\| `([\w-]+)\.yaml` \|", PAGES["install.md"], re.MULTILINE)) == EXAMPLES.keys()
    for path in set(re.findall(r"helm/tandem/[\w/-]+\.yaml", "\n".join(PAGES.values()))):
        assert (ROOT / path).is_file(), path


# Commands


def called() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(page, words) of every command of helm, kubectl and docker: in console blocks, and whole ones in prose."""
    for name, text in PAGES.items():
        text = re.sub(r"\$\([^()]*\)", "VALUE", text)
        lines = [shlex.split(one) for one in re.findall(r"`((?:helm|kubectl -n) [^`\n…]+)`", text)]
        for words in (*commands(text, _TOOLS), *(one for one in lines if len(one) > 2)):
            if _TOOLS.match(f"{words[0]} "):
                yield name, tuple(words)


def options_of(words: list[str], known: dict[str, int]) -> tuple[list[str], dict[str, list[str]]]:
    """The arguments, and each option's values. Raises AssertionError for one that is not known."""
    arguments: list[str] = []
    found: dict[str, list[str]] = {}
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if word == "--":
            break
        if not word.startswith("-"):
            arguments.append(word)
        else:
            assert option in known, f"no option {option}"
            found.setdefault(option, []).append(value if equals else next(rest) if known[option] else "")
    return arguments, found


def as_values(assignments: str) -> dict[str, Any]:
    """Of `--set`."""
    values: dict[str, Any] = {}
    for one in re.split(r"(?<!\\),", assignments):
        path, _, value = one.replace("\\,", ",").partition("=")
        *above, key = path.split(".")
        here = values
        for name in above:
            here = here.setdefault(name, {})
        here[key] = yaml.safe_load(value)
    return values


def connectors_of_the_migration() -> list[str]:
    """What migrate.md sets connector.name to, in its order; it begins with the bundled Redis alone."""
    found = [words for page, words in called() if page == "migrate.md" and "connector.name" in " ".join(words)]
    names = [as_values(words[words.index("--set") + 1])["connector"]["name"] for words in found]
    return ["redis", *dict.fromkeys(names)]


def test_the_bundled_redis_stays_while_pods_hand_over_by_it() -> None:
    """Helm removes what a release no longer has before the pods of the earlier one have ended."""
    names = connectors_of_the_migration()
    assert names[-1] == "nixl"
    for earlier, later in itertools.pairwise(names):
        before, after = (
            [one for one in render({"connector": {"name": name}}) if component_of(one) == "redis"]
            for name in (earlier, later)
        )
        if earlier.split(",")[0] == "redis":
            assert _unkept(after) == _unkept(before) != []
        elif "redis" not in later.split(","):
            assert after == []


def _unkept(objects: list[Manifest]) -> list[Manifest]:
    """Without the random password, which an upgrade keeps."""
    return [{**one, "data": None} if one["kind"] == "Secret" else one for one in objects]


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(first[key], second[key]) for key in first.keys() & second.keys() if isinstance(second[key], dict)
    }
    return {**first, **second, **both}


def check_helm(words: list[str]) -> None:
    verb, *rest = words
    arguments, options = options_of(rest, HELM[verb])
    charts = [one for one in arguments if "/" in one]
    assert charts in ([], ["helm/tandem"])
    if charts and verb in ("install", "upgrade"):
        files = [read_values(ROOT / path) for path in options.get("-f", []) if path != "my-values.yaml"]
        values: dict[str, Any] = {}
        for one in (*files, *map(as_values, options.get("--set", []))):
            values = merged(values, one)
        assert render(values, release=arguments[0], namespace=NAMESPACE)


@cache
def made() -> dict[tuple[str, str], list[Manifest]]:
    """Objects by kind and name, and a Certificate's Secret with it."""
    found: dict[tuple[str, str], list[Manifest]] = {}
    for one in (one for values in MADE_BY for one in render(values, release=RELEASE, namespace=NAMESPACE)):
        found.setdefault((one["kind"], one["metadata"]["name"]), []).append(one)
        if one["kind"] == "Certificate":
            found["Secret", one["spec"]["secretName"]] = [one]
    return found


def check_kubectl(words: list[str]) -> None:
    words = [word for index, word in enumerate(words) if "-n" not in words[max(index - 1, 0) : index + 1]]
    verb, *rest = words
    arguments, options = options_of(rest, KUBECTL[verb])
    if verb in ("auth", "rollout"):
        assert arguments[0] in ("can-i", "status", "restart", "pause", "resume")
        arguments = arguments[2 if verb == "auth" else 1 :]
    if verb == "create":
        assert arguments[:2] == ["secret", "generic"]
        return
    kinds, *names = arguments[0].split("/") if arguments else ["pods"]
    if verb == "logs" and arguments and not names:
        kinds, names = "pod", arguments[:1]
    assert all(kind in KIND_NAMES for kind in kinds.split(",")), kinds
    if not names and len(arguments) > 1:
        names = arguments[1:2]
    for name in names:
        check_made(KIND_NAMES[kinds], name, options, arguments[-1] if verb == "port-forward" else "")
    for label in options.get("-l", []):
        key, _, value = label.partition("=")
        labels = [one["metadata"]["labels"] for found in made().values() for one in found]
        assert any(one.get(key) == value for one in labels), label


def check_made(kind: str, name: str, options: dict[str, list[str]], port: str) -> None:
    """It is an object of the chart, with the containers and ports that are named."""
    found = json.dumps(made()[kind, name])
    for container in options.get("-c", []):
        assert f'"name": "{container}"' in found
    assert not port or re.search(rf"\b{port}\b", found + VALUES["router"]["adminListen"])


def check_docker(words: list[str]) -> None:
    known = {"-t": 1, "-f": 1, "--target": 1, "--build-arg": 1}
    arguments, options = options_of(words[1:], known if words[0] == "build" else {})
    dockerfile = (ROOT / options.get("-f", ["Dockerfile"])[0]).read_text()
    assert words[0] in ("build", "push")
    assert len(arguments) == 1
    for target in options.get("--target", []):
        assert re.search(rf"^FROM .* AS {target}$", dockerfile, re.MULTILINE | re.IGNORECASE)
    for argument in options.get("--build-arg", []):
        assert re.search(rf"^ARG {argument.partition('=')[0]}\b", dockerfile, re.MULTILINE)


CHECKS = {"helm": check_helm, "kubectl": check_kubectl, "docker": check_docker}


def test_commands_have_options_that_exist_and_name_what_the_chart_makes() -> None:
    found = sorted(set(called()))
    assert len(found) > 50
    for page, (tool, *words) in found:
        try:
            CHECKS[tool](words)
        except Exception as error:
            raise AssertionError(f"{page}: {tool} {shlex.join(words)}: {error!r}") from error


@pytest.mark.parametrize(
    ("tool", "command"),
    [
        ("helm", "upgrade tandem helm/tandem -n llm --set autoscaling.mode=hpa"),
        ("helm", "upgrade tandem helm/tandem --waits"),
        ("helm", "upgrade tandem helm/tandem --reuse-values"),  # with a later chart its new values would be missing
        ("kubectl", "-n llm get lease tandem-scaler"),
        ("kubectl", "-n llm get podz"),
        ("kubectl", "-n llm logs deployment/tandem-decode -c models"),
        ("kubectl", "-n llm port-forward service/tandem-router 5005"),
        ("kubectl", "-n llm get pods -l app.kubernetes.io/component=decoder"),
        ("docker", "build --target gpu ."),
    ],
)
def test_a_wrong_command_is_seen(tool: str, command: str) -> None:
    """Or the check above proves nothing."""
    with pytest.raises((AssertionError, KeyError, HelmError)):
        CHECKS[tool](shlex.split(command))
