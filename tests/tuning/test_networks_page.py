"""The results page of several networks, README's table and the table of docs/why.md say what their rows say."""

from dataclasses import replace

from benchmarks import networks, why


def test_the_page_and_the_tables_are_made_of_their_rows() -> None:
    rows = networks.read_rows()
    assert networks.PAGE.read_text() == networks.page(rows)
    readme = (networks.ROOT / "README.md").read_text()
    assert networks.readme_table(rows) in readme and networks.with_table(readme, rows) == readme
    assert why.PAGE.read_text() == why.page()


def test_the_page_says_where_tuned_recipes_are_behind() -> None:
    rows = networks.read_rows()
    lowered = [replace(r, gain=-3.0, low=-4.0) if (r.ceiling, r.method) == (3, "tuned") else r for r in rows]
    text = networks.page(lowered)
    assert "the least is -3.00 (95 % CI -4.00 to" in text and "at 3 GMACs" in text
    assert text != networks.page(rows)
