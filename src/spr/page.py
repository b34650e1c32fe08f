"""Owns the report's page: one HTML file that needs nothing else, no network and, but for sorting, no script."""

import base64
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from spr import __version__
from spr.figures import Drawing
from spr.records import Record
from spr.tables import Cell, Table


class Contents(NamedTuple):
    """Everything that a page shows."""

    summary: str
    left_out: Sequence[str]
    notes: Sequence[str]
    tables: Sequence[Table]
    drawings: Sequence[Drawing]
    missing: Sequence[str]  # figures that could not be drawn, and why
    others: Sequence[Table]  # of other protocols
    records: Sequence[Record]


def page(contents: Contents) -> str:
    """Return the whole page."""
    parts = [
        f"<h1>SPR: report</h1><p class='lead'>{escape(contents.summary)}</p>",
        "<nav><a href='#tables'>Tables</a><a href='#figures'>Figures</a><a href='#runs'>Runs</a></nav>",
        _box("Left out", contents.left_out, ""),
        _box("To be known", contents.notes, " calm"),
        "<h2 id='tables'>Tables</h2>",
        *map(_table, contents.tables),
        "<h2 id='figures'>Figures</h2>",
        *map(_figure, contents.drawings),
        _box("Not drawn", contents.missing, " calm"),
    ]
    if contents.others:
        parts += ["<h2>Other protocols</h2><p class='note'>No published figure can be compared with these.</p>"]
        parts += map(_table, contents.others)
    parts += ["<h2 id='runs'>Runs</h2>", *_runs(contents.records)]
    data = files("spr").joinpath("data")
    style, script = (data.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>SPR: report</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='icon' href='data:,'><style>{style}</style></head><body>"
    )
    foot = f"<p class='note'>Made by spr {escape(__version__)}.</p><script>{script}</script></body></html>\n"
    return head + "\n".join(parts) + foot


def _box(title: str, lines: Sequence[str], kind: str) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<div class='box{kind}'><strong>{title}</strong><ul>{items}</ul></div>"


def _table(table: Table) -> str:
    words = [all(isinstance(row[i].value, str | None) for row in table.rows) for i in range(len(table.columns))]
    heads = "".join(
        f"<th scope='col'{' class=text' * text}><button type='button'>{escape(title)}</button></th>"
        for title, text in zip(table.columns, words, strict=True)
    )
    rows = "".join(_row(row, words) for row in table.rows)
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in table.notes)
    return (
        f"<h3>{escape(table.title)}</h3>{notes}<div class='wide'><table id='{escape(table.name)}'>"
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(row: Sequence[Cell], words: Sequence[bool]) -> str:
    ours = any(cell.value == "ours" for cell in row)
    return f"<tr{' class=ours' * ours}>{''.join(_cell(cell, text) for cell, text in zip(row, words, strict=True))}</tr>"


def _cell(cell: Cell, text: bool) -> str:
    kinds = " ".join([*["text"] * text, *["best"] * cell.best])
    beside = " · ".join(part for part in (cell.interval(), cell.small) if part)
    mark = "small mark" if cell.small == "incomplete" else "small"
    small = f"<span class='{mark}'>{escape(beside)}</span>" if beside else ""
    value = "" if cell.value is None else escape(str(cell.value))
    return f"<td class='{kinds}' data-value='{value}'>{escape(cell.text())}{small}</td>"


def _figure(drawing: Drawing) -> str:
    data = base64.b64encode(drawing.png).decode()
    width = int.from_bytes(drawing.png[16:20])  # of a PNG's first chunk, in pixels
    return (
        f"<figure id='{escape(drawing.name)}'><h3>{escape(drawing.title)}</h3>"
        f"<img src='data:image/png;base64,{data}' width='{width * 2 // 3}' alt='{escape(drawing.title)}: "
        f"{escape(drawing.words)}'><figcaption>{escape(drawing.words)}</figcaption></figure>"
    )


def _runs(records: Sequence[Record]) -> list[str]:
    """Return every run's details; protocols and configurations, which many runs share, are given once."""
    rules, configs = dict[str, int](), dict[str, int]()
    lines = []
    for record in records:
        protocol = rules.setdefault(_pretty({"known as": record.protocol} | record.rules), len(rules) + 1)
        config = configs.setdefault(_pretty(record.config.to_dict()), len(configs) + 1)
        about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in record.about.items())
        episodes = " ".join(f"{score:g}" for score in record.episodes)
        lines.append(
            f"<details><summary>{escape(record.method)} on {escape(record.game)}, seed {record.seed}: "
            f"<strong>{record.score:,.1f}</strong></summary><p>{escape(about)}; protocol {protocol}, configuration "
            f"{config}; {escape(str(record.path))}</p><p>{len(record.episodes)} games: {episodes}</p></details>"
        )
    for title, shared in (("Protocols", rules), ("Configurations", configs)):
        lines.append(f"<h3>{title}</h3>")
        lines += [
            f"<details><summary>{title[:-1].lower()} {number}</summary><pre>{escape(text)}</pre></details>"
            for text, number in shared.items()
        ]
    return lines


def _pretty(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1)
