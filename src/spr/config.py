"""Owns every number a run depends on: frozen dataclasses whose defaults are the paper's table of hyper-parameters."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from spr.errors import UserError, did_you_mean
from spr.representations import known

STACK = 4  # frames in an observation, oldest first
SIDE = 84  # height and width of a frame
# (channels out, kernel, stride) of each convolution
ENCODERS: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "standard": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "data_efficient": ((32, 5, 5), (64, 5, 5)),
}
PROJECTIONS = ("head", "mlp", "none")
VALUES = ("categorical", "huber")
ENDS = ("all", "first")


def _value(default: float, low: float, high: float, meaning: str) -> Any:
    """Declare a number with its default, the range it may take, and what it means."""
    return field(default=default, metadata={"low": low, "high": high, "meaning": meaning})


def _flag(default: bool, meaning: str) -> Any:
    """Declare something that is on or off."""
    return field(default=default, metadata={"meaning": meaning})


def _choice(default: str, names: Callable[[], Sequence[str]], meaning: str) -> Any:
    """Declare one of several names."""
    return field(default=default, metadata={"names": names, "meaning": meaning})


@dataclass(frozen=True)
class AugmentConfig:
    """Image augmentation of sampled observations; acting and evaluation never see it."""

    shift: int = _value(4, 0, SIDE - 1, "Largest shift in pixels along each axis; 0 turns shifting off.")
    crop: int = _value(SIDE, 1, SIDE, "Side of a random crop taken first; padding it by the shift fills a frame again.")
    intensity: float = _value(0.05, 0, 0.5, "Brightness factor: 1 + intensity * clamp(normal, -2, 2); 0 turns it off.")
    rl: bool = _flag(True, "Whether the RL loss sees augmented observations too, or only the representation loss.")


@dataclass(frozen=True)
class NetworkConfig:
    """Encoder, transition model and Q-head."""

    encoder: str = _choice("standard", lambda: list(ENCODERS), "The convolutions: DQN's, or Data-Efficient Rainbow's.")
    hidden: int = _value(256, 1, 65_536, "Hidden units in each stream of the Q-head; the projection is all of them.")
    dueling: bool = _flag(True, "Whether the Q-head has streams for value and advantage, or one for both.")
    noisy: bool = _flag(True, "Whether the Q-head's layers are noisy.")
    noise: float = _value(0.5, 0, 100, "Initial sigma of the noisy layers, times the root of their fan-in.")
    atoms: int = _value(51, 2, 10_001, "Atoms of the return distribution.")
    v_min: float = _value(-10.0, -1e6, 1e6, "Smallest return the distribution represents.")
    v_max: float = _value(10.0, -1e6, 1e6, "Largest return the distribution represents.")
    dropout: float = _value(0.0, 0, 0.99, "Dropout after each ReLU of the online and target encoders while learning.")
    projection: str = _choice(
        "head",
        lambda: PROJECTIONS,
        "What the representation loss compares: the Q-head's hidden layer, an MLP, latents.",
    )


@dataclass(frozen=True)
class ReplayConfig:
    """What is remembered and how it is drawn."""

    capacity: int = _value(100_000, 1, 100_000_000, "Environment steps kept per agent; a shorter run keeps its own.")
    batch: int = _value(32, 2, 65_536, "Sequences in a batch.")
    n_step: int = _value(10, 1, 1_000, "Length of the multi-step return.")
    gamma: float = _value(0.99, 0, 1, "Discount per step.")
    ends: str = _choice(
        "all",
        lambda: ENDS,
        "Which ends within n steps cut the bootstrap: all, or only that of the first one (released code).",
    )
    exponent: float = _value(0.5, 0, 10, "Exponent that turns the KL divergence of a transition into its priority.")
    beta_start: float = _value(0.4, 0, 1, "Importance-correction exponent when learning starts.")
    beta_end: float = _value(1.0, 0, 1, "Importance-correction exponent at the last step.")


@dataclass(frozen=True)
class LearnerConfig:
    """Losses, targets and the optimiser."""

    value: str = _choice("categorical", lambda: VALUES, "The RL loss: of return distributions, or Huber's of Q-values.")
    double: bool = _flag(True, "Whether the online network picks the action that the target network values.")
    target_period: int = _value(
        1, 1, 1_000_000_000, "Updates between copies of the RL target network; 1: the online one."
    )
    representation: str = _choice("spr", known, "The representation loss, if its weight is above 0.")
    spr_weight: float = _value(2.0, 0, 1e6, "lambda: weight of the representation loss; 0 leaves the RL loss alone.")
    uniformity_weight: float = _value(0.0, 0, 1e6, "Weight of the loss that spreads projections over the sphere.")
    depth: int = _value(5, 0, 100, "K: how many steps ahead is predicted; 0 compares two views of the same state.")
    model: bool = _flag(True, "Whether predictions roll a transition model forward, or are the present state itself.")
    tau: float = _value(0.0, 0, 1, "Moving average of the target encoder; 0 means the online one.")
    stop_gradient: bool = _flag(True, "Whether targets are constants; off, gradients flow into them.")
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
    epsilon_start: float = _value(0.0, 0, 1, "Probability of a random action when learning starts.")
    epsilon_end: float = _value(0.0, 0, 1, "Probability of a random action at the end of its fall, and from then on.")
    epsilon_steps: int = _value(1, 1, 1_000_000_000, "Steps over which that probability falls in a straight line.")


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
            _check_range(entry, self.value(entry.name))
        self._check_parts()
        if self.network.v_min >= self.network.v_max:
            raise UserError("network.v_min must be smaller than network.v_max")
        if self.schedule.steps <= self.schedule.random_steps:
            raise UserError(
                f"schedule.steps is {self.schedule.steps}, but learning starts only after "
                f"{self.schedule.random_steps} random steps: ask for more steps, or set schedule.random_steps"
            )
        need = self.horizon + STACK + self.replay.batch
        if min(self.schedule.random_steps, self.replay.capacity) < need:
            raise UserError(f"schedule.random_steps and replay.capacity must be at least {need} to fill a first batch")

    def _check_parts(self) -> None:
        learner = self.learner
        if learner.depth > 1 and learner.spr_weight > 0 and not learner.model:
            raise UserError("learner.depth above 1 needs a transition model: set learner.model=true, or a depth of 1")
        if learner.uniformity_weight > 0 and learner.spr_weight == 0:
            raise UserError("learner.uniformity_weight needs a representation: set learner.spr_weight above 0")
        if not learner.stop_gradient and learner.tau > 0:
            raise UserError("learner.stop_gradient=false needs targets of the online encoder: set learner.tau=0")
        if self.augment.crop + 2 * self.augment.shift < SIDE:
            least = math.ceil((SIDE - self.augment.crop) / 2)
            raise UserError(f"augment.crop={self.augment.crop} needs padding: set augment.shift to at least {least}")
        if not self.augment.rl and learner.spr_weight > 0 and self.transition:
            raise UserError("augment.rl=false is for losses between views of one state: set learner.depth=0")

    @property
    def transition(self) -> bool:
        """Whether there is a transition model."""
        return self.learner.spr_weight > 0 and self.learner.depth > 0 and self.learner.model

    @property
    def targets(self) -> tuple[int, ...]:
        """How many steps ahead of s_t each target of the representation loss lies."""
        if self.learner.spr_weight == 0:
            return ()
        return tuple(range(1, self.learner.depth + 1)) or (0,)

    @property
    def views(self) -> tuple[tuple[int, bool], ...]:
        """The observations that an update sees: steps ahead of s_t, and whether augmented.

        First s_t for the RL loss, then s_t as the representation loss sees it if that is another view, then the
        targets, and the bootstrap last.
        """
        rl = self.augment.rl
        anchor = () if rl or not self.targets else ((0, True),)
        return ((0, rl), *anchor, *((steps, True) for steps in self.targets), (self.replay.n_step, rl))

    @property
    def learnt_views(self) -> int:
        """How many of the views, from the first, gradients reach."""
        lead = 1 if self.augment.rl or not self.targets else 2
        return lead if self.learner.stop_gradient else lead + len(self.targets)

    @property
    def horizon(self) -> int:
        """Steps after its start that a sampled sequence reaches: the bootstrap or the deepest prediction."""
        return max(self.replay.n_step, *self.targets, 1)

    @property
    def weights(self) -> dict[str, float]:
        """The losses this configuration has, with their weights."""
        learner = self.learner
        named = {learner.representation: learner.spr_weight, "uniformity": learner.uniformity_weight}
        return {"rl": 1.0} | {name: weight for name, weight in named.items() if weight > 0}

    def value(self, name: str) -> Any:
        """Return the value of a dotted field such as 'learner.depth'."""
        group, _, key = name.partition(".")
        return getattr(getattr(self, group), key)

    def to_dict(self) -> dict[str, dict[str, int | float | bool | str]]:
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


def from_dict(data: Mapping[str, Any]) -> Config:
    """Rebuild a configuration from `to_dict`'s form, refusing unknown or wrongly typed entries."""
    flat: dict[str, Any] = {}
    for group, values in data.items():
        if not isinstance(values, Mapping):
            raise UserError(f"configuration entry '{group}' must be a group of values")
        flat |= {f"{group}.{key}": value for key, value in values.items()}
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


def parse_override(text: str) -> tuple[str, int | float | bool | str]:
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
    if name not in by_name:
        raise UserError(f"unknown configuration field '{name}'{did_you_mean(name, by_name)}")
    return by_name[name]


def _checked(name: str, value: Any) -> Any:
    kind = _known_field(name).kind
    accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name} takes {_NOUNS[kind]}, not {value!r}")
    return kind(value)


def _check_range(entry: Field, value: Any) -> None:
    if entry.kind is str and value not in entry.names():
        raise UserError(f"{entry.name} must be one of {', '.join(entry.names())}, not '{value}'")
    if entry.kind in (int, float) and not entry.low <= value <= entry.high:
        raise UserError(f"{entry.name} must be between {entry.low:,} and {entry.high:,}, not {value:,}")
