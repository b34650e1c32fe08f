"""Owns the report's page: its template filled in with tables, figures and runs."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from spr.common.errors import visible
from spr.common.version import __version__
from spr.report.protocol_sections import Section
from spr.report.records import Record
from spr.report.tables import Table


class Contents(NamedTuple):
    """Everything that a page shows."""

    summary: str
    left_out: Sequence[str]
    notes: Sequence[str]
    sections: Sequence[Section]  # one for each protocol
    about: Sequence[Table]  # the runs of all protocols
    records: Sequence[Record]


def page(contents: Contents) -> str:
    """Return the whole page; protocols and configurations, which many runs share, are given once."""
    data = files("spr").joinpath("data")
    template, style, script = (
        data.joinpath(name).read_text(encoding="utf-8") for name in ("page.html.j2", "page.css", "page.js")
    )
    protocols, configs = dict[str, int](), dict[str, int]()
    runs = []
    for record in contents.records:
        protocol = protocols.setdefault(_pretty({"known as": record.protocol} | record.rules), len(protocols) + 1)
        config = configs.setdefault(_pretty(record.config.to_dict()), len(configs) + 1)
        runs.append(record._asdict() | {"path": visible(record.path), "protocol": protocol, "config": config})
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(template).render(
        contents=contents,
        runs=runs,
        protocols=protocols,
        configs=configs,
        style=style,
        script=script,
        version=__version__,
    )


def _pretty(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1)
