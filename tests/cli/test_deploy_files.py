"""The files of deploy/, without Docker: their command lines parse, what they copy and install exists."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdserve_protocol.timing import DRAIN_TIMEOUT_S
from support.command_lines import parse_command

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "ARG", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "CMD"}


def _instructions(dockerfile: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", dockerfile.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_one_of_each() -> None:
    assert [service["command"][0] for service in SERVICES.values()] == ["prefill-node", "decode-node", "router"]
    assert len(DOCKERFILES) == 2


@pytest.mark.parametrize("name", SERVICES)
def test_command_lines_are_those_of_the_commands(name: str) -> None:
    parse_command(SERVICES[name]["command"])
    how, *check = SERVICES[name]["healthcheck"]["test"]
    assert how == "CMD"
    if check[0] == "python":
        compile(check[2], "healthcheck", "exec")
    else:
        parse_command(check)


def test_health_checks_ask_the_port_that_the_node_listens_on() -> None:
    for name in ("prefill", "decode"):
        port = parse_command(SERVICES[name]["command"]).port
        assert f"127.0.0.1:{port}" in SERVICES[name]["healthcheck"]["test"]


def test_nodes_are_not_open_to_the_world() -> None:
    assert COMPOSE["networks"]["nodes"] == {"internal": True}
    for name in ("prefill", "decode"):
        service = SERVICES[name]
        assert service["networks"] == ["nodes"]
        assert "ports" not in service
        assert "--insecure" not in service["command"]
        assert service["environment"]["PDSERVE_CLUSTER_KEY"].startswith("${PDSERVE_CLUSTER_KEY:?")
        assert service["environment"]["UCX_TLS"] == "tcp"
    assert SERVICES["router"]["environment"]["PDSERVE_CLUSTER_KEY"].startswith("${PDSERVE_CLUSTER_KEY:?")
    assert SERVICES["router"]["ports"] == ["127.0.0.1:8000:8000"]


def test_the_router_finds_the_nodes_under_the_names_they_advertise() -> None:
    router = parse_command(SERVICES["router"]["command"])
    assert [address.host for address in (*router.prefill, *router.decode)] == ["prefill", "decode"]
    for name in ("prefill", "decode"):
        assert parse_command(SERVICES[name]["command"]).advertise_host == name


def test_grace_is_longer_than_draining() -> None:
    for service in SERVICES.values():
        assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_TIMEOUT_S


def test_services_are_built_from_the_files_that_are_here() -> None:
    for service in SERVICES.values():
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_dockerfile(dockerfile: Path) -> None:
    instructions = _instructions(dockerfile)
    assert {name for name, _ in instructions} <= INSTRUCTIONS
    assert instructions[0][0] == "FROM"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = set()
    for name, rest in instructions:
        if name == "COPY":
            *sources, _ = shlex.split(rest)
            copied.update(sources)
    assert all((ROOT / source).exists() for source in copied)
    assert "." in copied, "the build stage has every room"
    runs = " ".join(rest for name, rest in instructions if name == "RUN")
    for extra in re.findall(r"\[(\w+)\]", runs):
        assert extra in project["project"]["optional-dependencies"]
    known = (ROOT / "constraints.txt").read_text() + (ROOT / "Makefile").read_text()
    for pin in re.findall(r"[\w-]+==[\w.]+", runs):
        assert pin in known
    users = [rest for name, rest in instructions if name == "USER"]
    assert users == ["pdserve"]
    command = next(json.loads(rest) for name, rest in instructions if name == "CMD")
    assert command[0] in project["project"]["scripts"]


def test_only_the_node_installs_torch() -> None:
    assert "torch==" in (DEPLOY / "Dockerfile.node").read_text()
    assert "torch==" not in (DEPLOY / "Dockerfile.router").read_text()


def test_what_is_built_reaches_the_build_and_what_is_local_does_not() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split("\n"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {".git", ".venv"} <= ignored
    assert not ignored & {*project["tool"]["setuptools"]["packages"]["find"]["where"], "pyproject.toml", "README.md"}
