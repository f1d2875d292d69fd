"""The documents: their command lines parse, their links lead somewhere, they name no place of one machine."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from support.command_lines import COMMANDS, parse_command

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md")])
README = (ROOT / "README.md").read_text()


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


SHELL_LINES = [
    line for block in _blocks(README, "sh") for line in block.replace("\\\n", " ").splitlines() if line.strip()
]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("line", SHELL_LINES)
def test_every_command_of_the_readme_exists(line: str) -> None:
    program, *argv = words = shlex.split(line, comments=True)
    if program in COMMANDS:
        parse_command(words)
    elif program == "make":
        assert set(argv) <= TARGETS
    else:
        assert program == "curl"


def test_the_readme_uses_every_command() -> None:
    assert {shlex.split(line)[0] for line in SHELL_LINES} >= {"make", "prefill-node", "decode-node", "router", "curl"}


def test_python_examples_are_python() -> None:
    blocks = _blocks(README, "python")
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_flags_that_the_readme_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    helps = ""
    for words in (
        ["prefill-node"],
        ["decode-node"],
        ["router"],
        ["pdserve"],
        ["pdserve", "serve"],
        ["pdserve", "node", "status"],
    ):
        with pytest.raises(SystemExit):
            parse_command([*words, "--help"])
        helps += capsys.readouterr().out
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)):
        assert flag in helps, flag


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_a_place_of_one_machine(page: Path) -> None:
    assert not re.search(r"/(home|root|work|tmp|Users)/", page.read_text())


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE):
        room = None
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", row):
            if "/" in name.rstrip("/"):
                room, _, name = name.partition("/")
            elif name.endswith("/"):
                room, name = name.rstrip("/"), ""
            assert (ROOT / str(room) / f"pdserve_{room}" / name).exists(), f"{room}/{name}"
