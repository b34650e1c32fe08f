"""Owns every number a run depends on: frozen dataclasses whose defaults are the paper's table of hyper-parameters."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from spr.errors import UserError, did_you_mean

STACK = 4  # frames in an observation, oldest first
SIDE = 84  # height and width of a frame


def _value(default: float, low: float, high: float, meaning: str) -> Any:
    """Declare a field with its default, the range it may take, and what it means."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


@dataclass(frozen=True)
class AugmentConfig:
    """Image augmentation of sampled observations; acting and evaluation never see it."""

    shift: int = _value(4, 0, SIDE - 1, "Largest shift in pixels along each axis; 0 turns shifting off.")
    intensity: float = _value(0.05, 0, 0.5, "Brightness factor: 1 + intensity * clamp(normal, -2, 2); 0 turns it off.")


@dataclass(frozen=True)
class NetworkConfig:
    """Encoder, transition model and Q-head."""

    hidden: int = _value(256, 1, 65_536, "Hidden units in each stream of the Q-head; the projection is both.")
    atoms: int = _value(51, 2, 10_001, "Atoms of the return distribution.")
    v_min: float = _value(-10.0, -1e6, 1e6, "Smallest return the distribution represents.")
    v_max: float = _value(10.0, -1e6, 1e6, "Largest return the distribution represents.")
    noise: float = _value(0.5, 0, 100, "Initial sigma of the noisy layers, times the root of their fan-in.")
    dropout: float = _value(0.0, 0, 0.99, "Dropout after each ReLU of the online and target encoders while learning.")


@dataclass(frozen=True)
class ReplayConfig:
    """What is remembered and how it is drawn."""

    capacity: int = _value(100_000, 1, 100_000_000, "Environment steps kept per agent; a shorter run keeps its own.")
    batch: int = _value(32, 2, 65_536, "Sequences in a batch.")
    n_step: int = _value(10, 1, 1_000, "Length of the multi-step return.")
    gamma: float = _value(0.99, 0, 1, "Discount per step.")
    exponent: float = _value(0.5, 0, 10, "Exponent that turns the KL divergence of a transition into its priority.")
    beta_start: float = _value(0.4, 0, 1, "Importance-correction exponent when learning starts.")
    beta_end: float = _value(1.0, 0, 1, "Importance-correction exponent at the last step.")


@dataclass(frozen=True)
class LearnerConfig:
    """Losses, targets and the optimiser."""

    depth: int = _value(5, 0, 100, "K: how many steps ahead the transition model predicts.")
    spr_weight: float = _value(2.0, 0, 1e6, "lambda: weight of the SPR loss; 0 leaves plain Rainbow.")
    tau: float = _value(0.0, 0, 1, "Moving average of the target encoder; 0 means the online one, without gradient.")
    learning_rate: float = _value(1e-4, 0, 10, "Adam's learning rate.")
    adam_beta1: float = _value(0.9, 0, 0.999999, "Adam's decay of the first moment.")
    adam_beta2: float = _value(0.999, 0, 0.999999, "Adam's decay of the second moment.")
    adam_eps: float = _value(1.5e-4, 0, 1, "Adam's epsilon.")
    clip: float = _value(10.0, 1e-9, 1e9, "Largest gradient norm: of encoder and Q-head together, and of the model.")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long to act and how much to learn."""

    steps: int = _value(100_000, 1, 1_000_000_000, "Environment steps of a run.")
    random_steps: int = _value(2_000, 1, 1_000_000_000, "Uniformly random actions before learning starts.")
    updates_per_step: int = _value(2, 0, 1_000, "Updates after every environment step from then on.")


@dataclass(frozen=True)
class EvaluationConfig:
    """How a trained agent is judged."""

    episodes: int = _value(100, 1, 1_000_000, "Whole games played by each agent.")
    epsilon: float = _value(0.001, 0, 1, "Probability of a random action.")


@dataclass(frozen=True)
class Config:
    """Everything that defines a run but its game and its seed."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        """Refuse impossible values once, here, so that nothing further down has to check."""
        for entry in fields():
            value = self.value(entry.name)
            if not entry.low <= value <= entry.high:
                raise UserError(f"{entry.name} must be between {entry.low:,} and {entry.high:,}, not {value:,}")
        if self.network.v_min >= self.network.v_max:
            raise UserError("network.v_min must be smaller than network.v_max")
        if self.schedule.steps <= self.schedule.random_steps:
            raise UserError(
                f"schedule.steps is {self.schedule.steps}, but learning starts only after "
                f"{self.schedule.random_steps} random steps: ask for more steps, or set schedule.random_steps"
            )
        if self.learner.spr_weight > 0 and self.learner.depth == 0:
            raise UserError("learner.depth must be at least 1 where learner.spr_weight is above 0")
        need = self.horizon + STACK + self.replay.batch
        if min(self.schedule.random_steps, self.replay.capacity) < need:
            raise UserError(f"schedule.random_steps and replay.capacity must be at least {need} to fill a first batch")

    @property
    def horizon(self) -> int:
        """Steps after its start that a sampled sequence reaches: the bootstrap or the deepest prediction."""
        return max(self.replay.n_step, self.learner.depth)

    @property
    def weights(self) -> dict[str, float]:
        """The losses this configuration has, with their weights."""
        return {"rl": 1.0} | ({"spr": self.learner.spr_weight} if self.learner.spr_weight > 0 else {})

    def value(self, name: str) -> Any:
        """Return the value of a dotted field such as 'learner.depth'."""
        group, _, key = name.partition(".")
        return getattr(getattr(self, group), key)

    def to_dict(self) -> dict[str, dict[str, int | float]]:
        """Return nested plain values, as they stand in config.json."""
        return dataclasses.asdict(self)

    def override(self, changes: Mapping[str, Any]) -> "Config":
        """Return a copy with dotted fields replaced; unknown names and wrong types are refused by name."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            group, _, key = name.partition(".")
            groups.setdefault(group, {})[key] = _checked(name, value)
        parts = {group: dataclasses.replace(getattr(self, group), **values) for group, values in groups.items()}
        return dataclasses.replace(self, **parts)


def from_dict(data: Mapping[str, Any]) -> Config:
    """Rebuild a configuration from `to_dict`'s form, refusing unknown or wrongly typed entries."""
    flat: dict[str, Any] = {}
    for group, values in data.items():
        if not isinstance(values, Mapping):
            raise UserError(f"configuration entry '{group}' must be a group of values")
        flat |= {f"{group}.{key}": value for key, value in values.items()}
    return Config().override(flat)


class Field(NamedTuple):
    """One value of a configuration: its dotted name, type, range and meaning."""

    name: str
    kind: type
    low: float
    high: float
    meaning: str


@cache
def fields() -> tuple[Field, ...]:
    """Return every value a configuration has."""
    return tuple(
        Field(f"{group}.{entry.name}", kinds[entry.name], **entry.metadata)
        for group, cls in get_type_hints(Config).items()
        for kinds in [get_type_hints(cls)]
        for entry in dataclasses.fields(cls)
    )


def parse_override(text: str) -> tuple[str, int | float]:
    """Read one `group.field=value` of the command line."""
    name, equals, raw = text.partition("=")
    if not equals:
        raise UserError(f"'{text}' is not of the form group.field=value, such as learner.depth=3")
    kind = _known_type(name)
    try:
        return name, kind(raw)
    except ValueError:
        raise UserError(f"{name} takes {_NOUNS[kind]}, not '{raw}'") from None


_NOUNS: dict[type, str] = {int: "a whole number", float: "a number"}


def _known_type(name: str) -> type:
    known = {entry.name: entry.kind for entry in fields()}
    if name not in known:
        raise UserError(f"unknown configuration field '{name}'{did_you_mean(name, known)}")
    return known[name]


def _checked(name: str, value: Any) -> int | float:
    kind = _known_type(name)
    accepted = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise UserError(f"{name} takes {_NOUNS[kind]}, not {value!r}")
    return float(value) if kind is float else int(value)
