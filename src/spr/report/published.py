"""Owns which methods have published scores: what each is called in tables, by game and over all games."""

from typing import NamedTuple


class PublishedMethod(NamedTuple):
    """What is published of a method, under the name of its preset here."""

    paper: str = ""  # its name in the paper's table by game, where it has a column there
    later: str = ""  # its name among agents that followed, with scores by game
    aggregates: tuple[str, ...] = ()  # its rows in published_aggregates.csv
    recalled: bool = False  # whether the published table was not at hand


METHODS = {
    "simple": PublishedMethod("SimPLe"),
    "der": PublishedMethod("DER", aggregates=("DER", "DER (100 runs)")),
    "otrainbow": PublishedMethod("OTRainbow"),
    "curl": PublishedMethod("CURL", aggregates=("CURL", "CURL (100 runs)")),
    "drq": PublishedMethod("DrQ", aggregates=("DrQ", "DrQ (100 runs)")),
    "drq_eps": PublishedMethod(aggregates=("DrQ-eps (100 runs)",)),
    "spr_noaug": PublishedMethod("SPR without augmentation", aggregates=("SPR without augmentation",)),
    "spr": PublishedMethod("SPR", aggregates=("SPR", "SPR (100 runs)", "SPR (JAX)")),
    "spr_resets": PublishedMethod(later="SPR + resets, 32 runs", aggregates=("SPR + resets",)),
    "sr_spr": PublishedMethod(later="SR-SPR with 16 updates per step", aggregates=("SR-SPR RR16",), recalled=True),
    "bbf": PublishedMethod(later="BBF, 14 runs", aggregates=("BBF RR2",)),
    "bbf_rr8": PublishedMethod(later="BBF with 8 updates per step, 50 runs", aggregates=("BBF RR8",), recalled=True),
}
IN_PAPER = {preset: method.paper for preset, method in METHODS.items() if method.paper}
LATER = {preset: method.later for preset, method in METHODS.items() if method.later}
RECALLED = [preset for preset, method in METHODS.items() if method.recalled]
