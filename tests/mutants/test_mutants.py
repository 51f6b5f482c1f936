"""Planted bugs are found: each by a seed of the simulator, or by a test of the part."""

from pathlib import Path

import pytest

from mutants.__main__ import main
from mutants.mutant import BySeed, ByTest, Mutant, run_mutant
from mutants.planted import MUTANTS


def is_quick(mutant: Mutant) -> bool:
    """A run of pytest takes longer than some seeds: only two are in the default run."""
    return isinstance(mutant.killer, BySeed) or mutant.name in (
        "a report of plans that cannot be over is believed",
        "a hit is found although its window is gone",
    )


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.name, marks=[] if is_quick(m) else [pytest.mark.slow])
        for m in MUTANTS
    ],
)
def test_it_is_found_that(mutant: Mutant, tmp_path: Path) -> None:
    verdict = run_mutant(mutant, tmp_path)
    assert verdict.killed_by, verdict.output


def test_the_command_tells_what_finds_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    name = "tokens are delivered with the index of the next ones"
    assert main([name]) == 0
    _, line, last = capsys.readouterr().out.splitlines()
    assert line.split("  ")[0] == name and line.split()[-2] == "seed"
    assert last.startswith("1 bugs planted") and last.endswith("0 not found")


def test_a_bug_that_nothing_finds_makes_the_command_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    killer = ByTest("kvcache/test_ageing.py")
    harmless = Mutant("nothing is wrong", "kvcache/ageing.py", "put right", "mended", killer)
    assert main([], (harmless,)) == 1
    out = capsys.readouterr().out
    assert "NOTHING" in out and out.splitlines()[-1].endswith("1 not found")


def test_a_bug_that_no_longer_fits_the_source_is_said_to_need_a_change(tmp_path: Path) -> None:
    outdated = Mutant("something is wrong", "kvcache/ageing.py", "what was there once", "")
    with pytest.raises(AssertionError, match="adapt 'something is wrong'"):
        run_mutant(outdated, tmp_path)
