"""Tables of cases: every case is tried, every failure named, and every two values meet."""

from __future__ import annotations

import itertools

import pytest
from tables import each, pairwise


def test_every_case_is_tried_and_every_failure_is_named(tmp_path, monkeypatch, capsys):
    tried = []

    @each([(1, "one"), (2, "two"), (3, "three"), (4, "four")])
    def check(number, word, tmp_path, monkeypatch, capsys):
        tried.append((number, word, [*tmp_path.iterdir()], capsys.readouterr().out))
        (tmp_path / "file").touch()
        print("said")
        assert number != 2, "it is two"
        with pytest.raises(ValueError, match="invalid literal"):
            int("3" if number == 3 else word)

    fixtures = {"tmp_path": tmp_path, "monkeypatch": monkeypatch, "capsys": capsys}
    with pytest.raises(AssertionError, match=r"2 of 4 cases fail:\n\(2, 'two'\): .*it is two(.|\n)*\(3, 'three'\): "):
        check(**fixtures)
    assert tried == [(1, "one", [], ""), (2, "two", [], ""), (3, "three", [], ""), (4, "four", [], "")]


@each([((2, 2),), ((3, 2, 4),), ((7, 6, 3, 2, 2, 3, 3, 2),), ((4, 4, 4, 4, 4),)])
def test_every_two_values_meet_in_few_combinations(sizes):
    """Of an axis's values each is another one, so that a combination cannot pass for another."""
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    found = pairwise(*axes)
    assert pairwise(*axes) == found
    for one, other in itertools.combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in found} == set(itertools.product(axes[one], axes[other]))
    assert len(found) <= 1.5 * max(a * b for a, b in itertools.combinations(sizes, 2))
