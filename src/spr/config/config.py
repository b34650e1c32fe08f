"""Owns a configuration: all settings of a run together, what they may be beside each other, how they are written."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from spr.common import old_formats
from spr.common.errors import UserError, did_you_mean
from spr.config.schema import (
    AugmentConfig,
    EvaluationConfig,
    LearnerConfig,
    NetworkConfig,
    ReplayConfig,
    ResetConfig,
    ScheduleConfig,
)
from spr.envs.base import ObservationConfig

Value = int | float | bool | str  # of a field
Shape = tuple[int, int, int]  # of an image: height, width, channels

_LONGEST = 200  # characters of a name


@dataclass(frozen=True)
class Config:
    """Everything that defines a run but its game and its seed."""

    observation: ObservationConfig = field(default_factory=ObservationConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    reset: ResetConfig = field(default_factory=ResetConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        """Refuse impossible values once, here, so that nothing further down has to check."""
        for entry in fields():
            _check_range(entry, self.value(entry.name))
        self._check_parts()
        self._check_targets()
        self._check_schedules()
        self._check_resets()
        if self.network.v_min >= self.network.v_max:
            raise UserError("network.v_min must be smaller than network.v_max")
        if self.schedule.steps <= self.schedule.learning_starts:
            raise UserError(
                f"schedule.steps is {self.schedule.steps}, but learning starts only after "
                f"{self.schedule.learning_starts} random steps: ask for more steps, or set schedule.learning_starts"
            )
        need = self.horizon + self.observation.stack + self.replay.batch_size
        if min(self.schedule.learning_starts, self.replay.capacity) < need:
            raise UserError(
                f"schedule.learning_starts and replay.capacity must be at least {need} to fill a first batch "
                f"of {self.replay.batch_size} sequences that reach {self.horizon} steps ahead"
            )

    def _check_parts(self) -> None:
        learner = self.learner
        if learner.depth > 1 and learner.aux_weight > 0 and not learner.model:
            raise UserError("learner.depth above 1 needs a transition model: set learner.model=true, or a depth of 1")
        if learner.uniformity_weight > 0 and learner.aux_weight == 0:
            raise UserError("learner.uniformity_weight needs a representation: set learner.aux_weight above 0")
        if self.network.shared_hidden and not self.network.dueling:
            raise UserError(
                "network.shared_hidden is for dueling streams, without which there is one hidden layer only"
            )
        if self.augment.crop_margin > 2 * self.augment.shift:
            least = math.ceil(self.augment.crop_margin / 2)
            raise UserError(
                f"augment.crop_margin={self.augment.crop_margin} needs padding: set augment.shift to at least {least}"
            )
        side = min(self.observation.height, self.observation.width)
        for name in ("shift", "crop_margin"):
            if getattr(self.augment, name) >= side:
                raise UserError(f"augment.{name} must be smaller than a frame's side, {side} pixels")
        if not self.augment.rl and learner.aux_weight > 0 and self.has_model:
            raise UserError("augment.rl=false is for losses between views of one state: set learner.depth=0")

    def _check_targets(self) -> None:
        learner = self.learner
        for name in ("ema_decay", "average"):
            if not learner.stop_gradient and getattr(learner, name) > 0:
                raise UserError(
                    f"learner.stop_gradient=false needs targets of the online encoder: set learner.{name}=0"
                )
        for name, none in (("ema_decay", 0), ("target_period", 1)):
            if learner.average > 0 and getattr(learner, name) != none:
                raise UserError(f"learner.average is the target of every loss: set learner.{name}={none}")
        if learner.rl_loss == "huber" and self.replay.priority != "kl":
            raise UserError(
                "replay.priority is of return distributions: set replay.priority=kl for learner.rl_loss=huber"
            )

    def _check_schedules(self) -> None:
        replay, learner = self.replay, self.learner
        ends = {
            "replay.n_step_end": replay.n_step_end,
            "replay.gamma_end": replay.gamma_end,
            "learner.learning_rate_end": learner.learning_rate_end,
        }
        for name in [name for name, end in ends.items() if end and not self.schedule.anneal_updates]:
            raise UserError(f"{name} needs updates to get there: set schedule.anneal_updates, such as 10000")
        if replay.n_step_end and replay.ends == "first":
            raise UserError("replay.ends=first is for one length of return: set replay.n_step_end=0")
        if replay.bootstrap_at != "n" and (replay.ends == "first" or min(replay.n_step, replay.n_step_end or 2) < 2):
            raise UserError(
                f"replay.bootstrap_at={replay.bootstrap_at} needs returns of two steps or more, and replay.ends=all"
            )
        if replay.gamma_end and max(replay.gamma, replay.gamma_end) == 1:
            raise UserError("a discount that changes must stay below 1: set replay.gamma and replay.gamma_end so")
        if learner.learning_rate_end and not learner.learning_rate:
            raise UserError("learner.learning_rate_end needs a start: set learner.learning_rate above 0")

    def _check_resets(self) -> None:
        every, updates = self.reset.every, self.schedule.updates_per_step
        if every and not updates:
            raise UserError("reset.every counts updates, and there are none: set schedule.updates_per_step above 0")
        if 0 < every < updates:
            raise UserError(
                f"reset.every={every} is less than one environment step's {updates} updates: set it to {updates} or "
                "more, or to 0 for no resets"
            )

    @property
    def encoder_arguments(self) -> tuple[str, Shape, int, str]:
        """What `make_encoder` takes: the encoder's name, an observation's shape, width and padding."""
        obs, network = self.observation, self.network
        return network.encoder, (obs.height, obs.width, obs.planes), network.width, network.padding

    @property
    def has_model(self) -> bool:
        """Whether there is a transition model."""
        return self.learner.aux_weight > 0 and self.learner.depth > 0 and self.learner.model

    @property
    def target_offsets(self) -> tuple[int, ...]:
        """How many steps after s_t each target of the auxiliary loss lies; none without that loss."""
        if self.learner.aux_weight == 0:
            return ()
        return tuple(range(1, self.learner.depth + 1)) or (0,)

    @property
    def horizon(self) -> int:
        """Steps after its start that a sampled sequence reaches: the bootstrap or the deepest prediction."""
        return max(self.longest_return, *self.target_offsets, 1)

    @property
    def longest_return(self) -> int:
        """The largest n of the multi-step return, where that changes: what a sequence must reach at any time."""
        return max(self.replay.n_step, self.replay.n_step_end)

    @property
    def bootstrap_early(self) -> int:
        """How many steps before the end of the multi-step return the bootstrap's state lies."""
        return int(self.replay.bootstrap_at == "n-1")

    @property
    def reset_interval(self) -> int:
        """Environment steps between two resets; 0: there are none."""
        return self.reset.every // self.schedule.updates_per_step if self.reset.every else 0

    @property
    def return_changes(self) -> bool:
        """Whether the length or the discount of the multi-step return changes while learning."""
        return bool(self.replay.n_step_end or self.replay.gamma_end)

    @property
    def weights(self) -> dict[str, float]:
        """The losses this configuration has, with their weights."""
        learner = self.learner
        named = {learner.aux_loss: learner.aux_weight, "uniformity": learner.uniformity_weight}
        return {"rl": 1.0} | {name: weight for name, weight in named.items() if weight > 0}

    def value(self, name: str) -> Any:
        """Return the value of a dotted field such as 'learner.depth'."""
        group, _, key = name.partition(".")
        return getattr(getattr(self, group), key)

    def to_dict(self) -> dict[str, dict[str, Value]]:
        """Return nested plain values, as they stand in config.json."""
        return dataclasses.asdict(self)

    def difference(self, other: "Config") -> str | None:
        """Name the first field in which another configuration differs, and both values; None if there is none."""
        for entry in fields():
            mine, theirs = self.value(entry.name), other.value(entry.name)
            if mine != theirs:
                return f"{entry.name} {theirs}, not {mine}"
        return None

    def override(self, changes: Mapping[str, Any]) -> "Config":
        """Return a copy with dotted fields replaced; unknown names and wrong types are refused by name."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            group, _, key = name.partition(".")
            groups.setdefault(group, {})[key] = _checked(name, value)
        parts = {group: dataclasses.replace(getattr(self, group), **values) for group, values in groups.items()}
        return dataclasses.replace(self, **parts)


def from_dict(data: Any) -> Config:
    """Rebuild a configuration from `to_dict`'s form, refusing unknown or wrongly typed entries.

    Files of earlier versions may have the names that their fields had then.
    """
    flat: dict[str, Any] = {}
    if not isinstance(data, Mapping):
        raise UserError("a configuration consists of groups of values by name")
    for group, values in data.items():
        if not isinstance(values, Mapping):
            raise UserError(f"configuration entry '{group:.{_LONGEST}}' must be a group of values")
        for key, value in values.items():
            name, current = old_formats.current_field(f"{group}.{key}", value)
            if name in flat:
                raise UserError(f"the configuration has {name} twice, under its name and an earlier one")
            flat[name] = current
    return Config().override(flat)


class Field(NamedTuple):
    """One value of a configuration: its dotted name, type, meaning, and what it may be."""

    name: str
    kind: type
    meaning: str
    low: float = -math.inf
    high: float = math.inf
    names: Callable[[], Sequence[str]] = tuple


@cache
def fields() -> tuple[Field, ...]:
    """Return every value a configuration has."""
    return tuple(
        Field(f"{group}.{entry.name}", kinds[entry.name], **entry.metadata)
        for group, cls in get_type_hints(Config).items()
        for kinds in [get_type_hints(cls)]
        for entry in dataclasses.fields(cls)
    )


def parse_override(text: str) -> tuple[str, Value]:
    """Read one `group.field=value` of the command line."""
    name, equals, raw = text.partition("=")
    if not equals:
        raise UserError(f"'{text}' is not of the form group.field=value, such as learner.depth=3")
    kind = _known_field(name).kind
    try:
        return name, _SWITCH[raw.lower()] if kind is bool else kind(raw)
    except (ValueError, KeyError):
        raise UserError(f"{name} takes {_NOUNS[kind]}, not '{raw}'") from None


_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
_SWITCH = {"true": True, "false": False, "on": True, "off": False, "yes": True, "no": False, "1": True, "0": False}


def _known_field(name: str) -> Field:
    by_name = {entry.name: entry for entry in fields()}
    if (renamed := old_formats.field_renamed(name)) is not None:
        raise UserError(renamed)
    if name not in by_name:
        shown = name[:_LONGEST]  # it may come from a file, and be of any length
        hint = did_you_mean(shown, by_name) or "; 'spr presets spr' lists them all"
        raise UserError(f"unknown configuration field '{shown}'{hint}")
    return by_name[name]


def _checked(name: str, value: Any) -> Any:
    kind = _known_field(name).kind
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name} takes {_NOUNS[kind]}, not {value!r:.{_LONGEST}}")
    try:
        return kind(value)
    except OverflowError:
        raise UserError(f"{name} takes {_NOUNS[kind]}, not one of {len(str(value))} digits") from None


def _check_range(entry: Field, value: Any) -> None:
    if entry.kind is str and entry.names() and value not in entry.names():
        raise UserError(f"{entry.name} must be one of {', '.join(entry.names())}, not '{value:.{_LONGEST}}'")
    if entry.kind is str and not (value.isprintable() and 0 < len(value) <= _LONGEST):
        raise UserError(f"{entry.name} must be a name of at most {_LONGEST} printable characters")
    if entry.kind in (int, float) and not entry.low <= value <= entry.high:
        raise UserError(f"{entry.name} must be between {entry.low:,} and {entry.high:,}, not {value:,}")
