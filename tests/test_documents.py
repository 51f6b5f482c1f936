"""Documents must not fall behind the tree: their links and the options that they name."""

import re
from pathlib import Path

import pytest

from tidegate.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Of pip, the simulator and the benchmarks.
OTHERS_OPTIONS = frozenset({"--no-deps", "--quick", "--seeds", "--jobs", "--trace"})


def known_options() -> set[str]:
    """Every option of every command, as the help texts tell them."""
    parser = build_parser()
    commands = (
        "serve",
        "scheduler",
        "worker",
        "proxy",
        "plan",
        "models",
        "inspect",
        "logs story",
        "logs summary",
        "logs why",
    )
    texts = [parser.parse_args(_least(command)).parser.format_help() for command in commands]
    return set(OPTION.findall("\n".join(texts)))


def _least(command: str) -> list[str]:
    needed = {
        "worker": ["--role", "both"],
        "logs story": ["id"],
        "logs why": ["id"],
        "inspect": ["m"],
    }
    return [*command.split(), *needed.get(command, [])]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = [document.parent / path for path, _ in LINK.findall(text) if path]
    assert not [str(target) for target in targets if not target.exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_options_that_are_named_exist(document: Path) -> None:
    named = set(OPTION.findall(document.read_text(encoding="utf-8")))
    assert not named - known_options() - OTHERS_OPTIONS


def test_readme_has_links_and_options() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(LINK.findall(text)) > 4
    assert len(OPTION.findall(text)) > 4
