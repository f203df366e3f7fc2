"""Tables as they stand in a log, and what DtypeOverrider says in them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from dtype_hooks.core.override import OverrideHandle, OverrideRule
from dtype_hooks.report.overrides import COLUMNS, never_called_line, override_table, summary_line
from dtype_hooks.report.tables import render_table


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3)
        self.bn1 = nn.BatchNorm2d(width)


class Wide(nn.Module):
    """Names as long as those of a detector: backbone.layer1.0.conv1."""

    def __init__(self, layers: int = 4):
        super().__init__()
        self.backbone = nn.ModuleDict(
            {f"layer{i}": nn.Sequential(Block(4 * i), Block(4 * i)) for i in range(1, layers + 1)}
        )
        self.head = nn.Linear(8, 8)


def install(model: nn.Module, *patterns: str, **kwargs) -> OverrideHandle:
    return OverrideRule.make(list(patterns), name="DtypeOverrider", **kwargs).install(model)


def test_table_with_the_wide_models_names_is_readable_at_80_columns():
    text = override_table(install(Wide(layers=2), "conv1", "bn", r"^head$"), width=80)

    assert text == "\n".join(
        [
            "DtypeOverrider: methods that compute in float32",
            "in every row: method forward, computes in float32, stored in float32",
            "+-------------------------+-------------+-----------+------------+",
            "| module                  | class       | caught by | parameters |",
            "+-------------------------+-------------+-----------+------------+",
            "| backbone.layer1.0.conv1 | Conv2d      | conv1     |        148 |",
            "| backbone.layer1.0.bn1   | BatchNorm2d | bn        |          8 |",
            "| backbone.layer1.1.conv1 | Conv2d      | conv1     |        148 |",
            "| backbone.layer1.1.bn1   | BatchNorm2d | bn        |          8 |",
            "| backbone.layer2.0.conv1 | Conv2d      | conv1     |        584 |",
            "| backbone.layer2.0.bn1   | BatchNorm2d | bn        |         16 |",
            "| backbone.layer2.1.conv1 | Conv2d      | conv1     |        584 |",
            "| backbone.layer2.1.bn1   | BatchNorm2d | bn        |         16 |",
            "| head                    | Linear      | ^head$    |         72 |",
            "+-------------------------+-------------+-----------+------------+",
        ]
    )


def test_table_shows_every_column_where_there_is_room():
    text = override_table(install(Wide(), "conv1"), width=160)

    heading = next(line for line in text.splitlines() if "module" in line)
    assert [cell.strip() for cell in heading.strip("|").split("|")] == [c.lstrip("#") for c in COLUMNS]
    assert "in every row" not in text
    assert all(line.count("float32") == 2 for line in text.splitlines() if "backbone" in line)


def test_every_caught_module_is_shown_with_each_pattern_that_caught_it():
    """A short pattern that takes more than was meant is visible ("wo" in "word_embedding")."""
    model = nn.ModuleDict({"wo": nn.Linear(2, 2), "word_embedding": nn.Linear(2, 2)})

    text = override_table(install(model, "wo", class_patterns=["Linear"]), width=120)

    rows = [line for line in text.splitlines() if "Linear" in line and "forward" in line]
    assert len(rows) == 2
    assert all("wo, class Linear" in row for row in rows)
    assert "word_embedding" in rows[1]


def test_a_shared_module_is_one_row_with_all_its_names():
    shared = nn.Linear(2, 2)
    text = override_table(install(nn.ModuleDict({"a": shared, "b": shared}), "a"), width=120)

    assert "a = b" in text
    assert text.count("Linear") == 1


def test_stored_dtypes_are_shown_where_they_differ_from_what_is_computed_in():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2), nn.ReLU())
    text = override_table(install(model, "."), width=120)

    stored = [line.split("|")[6].strip() for line in text.splitlines() if "forward" in line]
    assert stored == ["bfloat16", "float32", "-"]


def test_thousands_of_modules_are_cut_with_a_count():
    model = nn.Sequential(*[nn.LayerNorm(2) for _ in range(2000)])
    text = override_table(install(model, "."), width=80)

    lines = text.splitlines()
    assert lines[-1] == "... and 1,940 more of 2,000"
    assert sum(line.startswith("|") for line in lines) == 1 + 60
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [60, 80, 133])
def test_no_line_is_wider_than_asked_and_no_text_is_lost(width):
    name = "encoder." * 20 + "norm"
    text = render_table("t", ["name", "kind", "#n"], [[name, "x", 1], ["b", "y", 12345678]], width=width)

    assert max(map(len, text.splitlines())) <= width
    first_cells = "".join(line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|"))
    assert name in first_cells
    assert "12345678" in text


def test_numbers_are_flush_right_and_names_flush_left():
    text = render_table("t", ["name", "#n"], [["a", 1], ["bb", 200]], width=80)

    assert "| a    |   1 |" in text
    assert "| bb   | 200 |" in text


def test_text_is_neither_markup_nor_emoji_nor_coloured():
    text = render_table("t", ["pattern"], [["[red]norm[/red]"], [":smile:"], ["[bold"]], width=80)

    assert "[red]norm[/red]" in text
    assert ":smile:" in text
    assert "\x1b" not in text
    assert text.isascii()


def test_without_a_terminal_a_table_is_80_wide(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)
    text = render_table("t", ["a", "b"], [["x" * 90, "y"], ["x", "z"]])

    assert max(map(len, text.splitlines())) == 80


def test_the_terminals_width_is_used(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert max(map(len, render_table("t", ["a", "b"], [["x" * 200, "y"], ["x", "z"]]).splitlines())) == 100
    monkeypatch.setenv("COLUMNS", "20")
    assert max(map(len, render_table("t", ["a", "b"], [["x" * 200, "y"], ["x", "z"]]).splitlines())) == 60


@pytest.mark.parametrize("rows", [[], [["only", 1]]])
def test_tables_of_no_row_and_of_one_row(rows):
    text = render_table("title", ["name", "#n"], rows, width=80, caption="below")

    assert text.startswith("title\n+")
    assert text.endswith("+\nbelow")
    assert all(str(cell) in text for row in rows for cell in row)


def test_summary_says_how_many_modules_of_how_many_in_which_dtype_and_why():
    handle = install(Wide(), "bn", dtype=torch.bfloat16, exclude=["layer4"])

    assert summary_line(handle) == (
        "DtypeOverrider: 6 of 30 modules compute in bfloat16 (patterns=['bn'], exclude=['layer4'])"
    )


def test_never_called_names_a_few_and_counts_the_rest():
    handle = install(nn.Sequential(*[nn.Linear(1, 1) for _ in range(20)]), ".")

    line = never_called_line(handle.records, "DtypeOverrider")

    assert "0.forward, 1.forward" in line
    assert "7.forward and 12 more" in line
    assert "8.forward" not in line
    assert "more" not in never_called_line(handle.records[:8], "DtypeOverrider")
