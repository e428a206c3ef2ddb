"""The example that trains an LSTM: its data, its learning, and its repeatability."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import asyncflow as af
from examples import character_lstm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SOURCE = b'''
"""Short.

A sentence that goes on for longer than thirty letters,
over two lines.

    code = that_is(left, out)  # because it is no sentence."""

class Thing:
    def method(self):
        """What a method does is told in a sentence as well."""

text = """A string that is no documentation of anything at all."""
'''


def small_text() -> character_lstm.Text:
    return character_lstm.read_text(most_files=25)


def teach(text: character_lstm.Text, devices: tuple[str, ...] = character_lstm.DEVICES) -> character_lstm.Outcome:
    return af.run(character_lstm.teach(text, steps=10, batch=8, hidden=16, devices=devices, seed=0))


def test_it_learns_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps are enough to know which letters are frequent."""
    folder = tmp_path / "new" / "folder"
    small = ["--batch", "8", "--hidden", "16", "--files", "25", "--output", str(folder)]
    assert character_lstm.main([*small, "--steps", "12", "--target", "5.5"]) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed
    assert {file.name for file in folder.iterdir()} == {f"character_lstm.{kind}" for kind in ("html", "json.gz", "png")}
    for file in folder.iterdir():
        assert str(file) in printed
        assert file.stat().st_size > 1000
    assert character_lstm.main([*small, "--steps", "1", "--target", "5.5"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_loss_falls_and_all_is_the_same_again() -> None:
    """Equal seeds give equal losses and letters, to the last bit, whatever runs beside what."""
    text = small_text()
    first, second = teach(text), teach(text)
    assert first.losses[0] == pytest.approx(math.log(len(text.alphabet)), rel=0.05)
    assert min(first.losses[-3:]) < first.losses[0] - 0.5
    assert first.losses == second.losses
    assert first.held_out == second.held_out
    assert first.written == second.written
    assert all(len(written) <= character_lstm.LONGEST for written in first.written)


def test_two_devices_train_as_one_does() -> None:
    """The same paragraphs in two halves: the same loss, but for rounding."""
    text = small_text()
    alone, together = teach(text, ("cpu:0",)), teach(text)
    np.testing.assert_allclose(alone.losses[:3], together.losses[:3], rtol=1e-4)
    assert {firing.device for firing in together.trace.firings} == {"cpu:0", "cpu:1"}


def test_paragraphs_are_sentences_of_docstrings() -> None:
    assert list(character_lstm.paragraphs(SOURCE)) == [
        "A sentence that goes on for longer than thirty letters, over two lines.",
        "What a method does is told in a sentence as well.",
    ]


def test_batches() -> None:
    """A zero before and behind each paragraph, and zeros where it has ended."""
    text = character_lstm.Text("\0abc", ["abc"], ["c"])
    letters, lengths = text.batch(["abc", "c"])
    np.testing.assert_array_equal(letters.T, [[0, 1, 2, 3, 0], [0, 3, 0, 0, 0]])
    np.testing.assert_array_equal(lengths, [4, 2])


def test_held_out_text_is_not_learned_from() -> None:
    text = small_text()
    assert not set(text.train) & set(text.held_out)
    assert set("".join(text.train + text.held_out)) | {"\0"} == set(text.alphabet)


def test_cost_of_letter_pairs() -> None:
    """A certain pair costs next to nothing; of two pairs that are equally frequent, each costs a bit."""
    certain = character_lstm.Text("\0ab", ["ab"] * 1000, ["ab"])
    assert character_lstm.bits(character_lstm.loss_of_pairs(certain)) == pytest.approx(0, abs=1e-3)
    either = character_lstm.Text("\0ab", ["a", "b"] * 1000, ["a"])
    assert character_lstm.bits(character_lstm.loss_of_pairs(either)) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "argument --steps: 0 is no number from 1"),
        (["--steps", "-3"], "argument --steps: -3 is no number from 1"),
        (["--hidden", "0"], "argument --hidden: 0 is no number from 1"),
        (["--files", "-1"], "argument --files: -1 is no number from 1"),
        (["--batch", "0"], "argument --batch: 0 is no number from 1"),
        (["--batch", "few"], "argument --batch: few is no number from 1"),
        (["--batch", "1"], "argument --batch: 2 devices read one paragraph each, or more"),
        (["--batch", "100000", "--files", "25"], "argument --batch: there are no more than"),
        (["--output", __file__], "test_character_lstm.py is no folder"),
        (["--output", f"{__file__}/new/folder"], "test_character_lstm.py is no folder"),
    ],
    ids=lambda value: value[0] + value[1][-7:] if isinstance(value, list) else "",
)
def test_options_that_make_no_sense(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The options are refused before anything is trained, with the usage and status 2."""
    with pytest.raises(SystemExit) as caught:
        character_lstm.main(options)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "training" not in printed.out


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And the status that shells give for it."""

    async def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(character_lstm, "train", interrupted)
    assert character_lstm.main(["--files", "25", "--hidden", "4"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_too_little_to_read() -> None:
    with pytest.raises(SystemExit, match="too little documentation"):
        character_lstm.read_text(most_files=0)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with character_lstm.progress(20) as report:
        for number in range(1, 21):
            report(number, 5.0)
    assert "bits a letter" in capsys.readouterr().out
