"""Owns reports of finished runs: records, statistics, tables, figures, the page."""
