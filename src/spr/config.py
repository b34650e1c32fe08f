"""Owns every number a run depends on: frozen dataclasses whose defaults are the paper's table of hyper-parameters."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from spr import declare
from spr.encoders import PADDINGS, Shape, encoder_names, encoder_shapes
from spr.environment import ObservationConfig
from spr.errors import UserError, did_you_mean

PROJECTIONS = ("head", "mlp", "none")
RL_LOSSES = ("categorical", "huber")
ENDS = ("all", "first")
BOOTSTRAPS = ("n", "n-1")
INITIALISATIONS = ("library", "xavier")
PRIORITIES = ("kl", "cross_entropy")
REDRAWN = ("outputs", "head")
_LONGEST = 200  # characters of a name


@dataclass(frozen=True)
class AugmentConfig:
    """Image augmentation of sampled observations; acting and evaluation never see it."""

    shift: int = declare.value(4, 0, 1_023, "Largest shift in pixels along each axis; 0 turns shifting off.")
    crop_margin: int = declare.value(
        0, 0, 1_023, "Pixels by which a random crop, taken first, is smaller; padding by the shift fills them again."
    )
    intensity: float = declare.value(
        0.05, 0, 0.5, "Brightness factor: 1 + intensity * clamp(normal, -2, 2); 0 turns it off."
    )
    rl: bool = declare.flag(True, "Whether the RL loss sees augmented observations too, or only the auxiliary loss.")


@dataclass(frozen=True)
class NetworkConfig:
    """Encoder, transition model and Q-head."""

    encoder: str = declare.name("standard", "The encoder, by name; a plug-in may have registered it.")
    width: int = declare.value(1, 1, 64, "Factor of the channels of an encoder of any width, such as impala.")
    padding: str = declare.choice(
        "valid",
        lambda: PADDINGS,
        "Padding of the encoder's convolutions: none, or TensorFlow's SAME; impala has the latter always.",
    )
    initialisation: str = declare.choice(
        "library",
        lambda: INITIALISATIONS,
        "How weights begin: as the library's layers do, or Xavier uniform with biases of zero.",
    )
    batch_norm: bool = declare.flag(True, "Whether the transition model has batch norm.")
    hidden: int = declare.value(
        256, 1, 65_536, "Hidden units in each stream of the Q-head; the projection is all of them."
    )
    dueling: bool = declare.flag(True, "Whether the Q-head has streams for value and advantage, or one for both.")
    shared_hidden: bool = declare.flag(False, "Whether value and advantage share one hidden layer, or have one each.")
    noisy: bool = declare.flag(True, "Whether the Q-head's layers are noisy.")
    noisy_sigma0: float = declare.value(
        0.5, 0, 100, "Initial sigma of the noisy layers, times the root of their fan-in."
    )
    atoms: int = declare.value(51, 2, 10_001, "Atoms of the return distribution.")
    v_min: float = declare.value(-10.0, -1e6, 1e6, "Smallest return the distribution represents.")
    v_max: float = declare.value(10.0, -1e6, 1e6, "Largest return the distribution represents.")
    dropout: float = declare.value(
        0.0, 0, 0.99, "Dropout after each ReLU (impala: stage) of the online and target encoders while learning."
    )
    projection: str = declare.choice(
        "head",
        lambda: PROJECTIONS,
        "What the auxiliary loss compares: the Q-head's hidden layer, an MLP, latents.",
    )


@dataclass(frozen=True)
class ReplayConfig:
    """What is remembered and how it is drawn."""

    capacity: int = declare.value(
        100_000, 1, 100_000_000, "Environment steps kept per agent; a shorter run keeps its own."
    )
    batch_size: int = declare.value(32, 2, 65_536, "Sequences in a batch.")
    n_step: int = declare.value(10, 1, 1_000, "Length of the multi-step return.")
    n_step_end: int = declare.value(
        0, 0, 1_000, "Its length after schedule.anneal_updates, reached along an exponential; 0: it stays."
    )
    gamma: float = declare.value(0.99, 0, 1, "Discount per step.")
    gamma_end: float = declare.value(
        0.0, 0, 1, "Discount after schedule.anneal_updates, whose distance from 1 changes exponentially; 0: it stays."
    )
    ends: str = declare.choice(
        "all",
        lambda: ENDS,
        "Which ends within n steps cut the bootstrap: all, or only that of the first one (released code).",
    )
    bootstrap_at: str = declare.choice(
        "n",
        lambda: BOOTSTRAPS,
        "Steps to the bootstrap's state: n, or n-1 with n rewards and gamma^n (released code of SR-SPR and BBF).",
    )
    priority: str = declare.choice(
        "kl",
        lambda: PRIORITIES,
        "How far apart prediction and target are, for a priority: KL divergence, or cross-entropy (JAX code).",
    )
    priority_exponent: float = declare.value(
        0.5, 0, 10, "Exponent that turns that into a transition's priority; 0 makes all equal, which is uniform replay."
    )
    beta_start: float = declare.value(0.4, 0, 1, "Importance-correction exponent when learning starts.")
    beta_end: float = declare.value(1.0, 0, 1, "Importance-correction exponent at the last step.")
    clip_rewards: bool = declare.flag(True, "Whether rewards are clipped to [-1, 1] for learning; scores never are.")


@dataclass(frozen=True)
class LearnerConfig:
    """Losses, targets and the optimiser."""

    rl_loss: str = declare.choice(
        "categorical", lambda: RL_LOSSES, "The RL loss: of return distributions, or Huber's of Q-values."
    )
    double_q: bool = declare.flag(True, "Whether the online network picks the action that the target network values.")
    target_period: int = declare.value(
        1, 1, 1_000_000_000, "Updates between hard copies into the RL target network; 1: no separate network."
    )
    # Any name: whoever trains by it must know it, whoever plays with the agent need not.
    aux_loss: str = declare.name("spr", "The auxiliary loss on representations, if its weight is above 0.")
    aux_weight: float = declare.value(2.0, 0, 1e6, "lambda: weight of the auxiliary loss; 0 leaves the RL loss alone.")
    uniformity_weight: float = declare.value(
        0.0, 0, 1e6, "Weight of the loss that spreads projections over the sphere."
    )
    depth: int = declare.value(
        5, 0, 100, "K: how many steps ahead is predicted; 0 compares two views of the same state."
    )
    model: bool = declare.flag(
        True, "Whether predictions roll a transition model forward, or are the present state itself."
    )
    ema_decay: float = declare.value(
        0.0, 0, 1, "The paper's tau: share of its old weights that the target encoder keeps; 0: the online encoder."
    )
    average: float = declare.value(
        0.0,
        0,
        1,
        "Share of its old weights that an average of all weights keeps per update: it values the bootstrap, gives the "
        "auxiliary loss its targets, acts and is judged; 0: there is none.",
    )
    stop_gradient: bool = declare.flag(True, "Whether targets are constants; off, gradients flow into them.")
    learning_rate: float = declare.value(1e-4, 0, 10, "Adam's learning rate.")
    learning_rate_end: float = declare.value(
        0.0, 0, 10, "Learning rate after schedule.anneal_updates, reached along an exponential; 0: it stays."
    )
    adam_beta1: float = declare.value(0.9, 0, 0.999999, "Adam's decay of the first moment.")
    adam_beta2: float = declare.value(0.999, 0, 0.999999, "Adam's decay of the second moment.")
    adam_eps: float = declare.value(1.5e-4, 0, 1, "Adam's epsilon.")
    weight_decay: float = declare.value(
        0.0, 0, 10, "AdamW's decay per update, times the learning rate, of weights that are not vectors; 0: Adam."
    )
    max_grad_norm: float = declare.value(
        10.0, 0, 1e9, "Gradients are clipped to this norm: of encoder and Q-head together, and of the model; 0: not."
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """How long to act and how much to learn."""

    steps: int = declare.value(100_000, 1, 1_000_000_000, "Environment steps of a run.")
    learning_starts: int = declare.value(
        2_000, 1, 1_000_000_000, "Environment steps, with uniformly random actions, before learning starts."
    )
    updates_per_step: int = declare.value(2, 0, 1_000, "Updates after every environment step from then on.")
    anneal_updates: int = declare.value(
        0,
        0,
        1_000_000_000,
        "Updates, from the start and from each reset, until values with an end reach it; 0: none.",
    )
    epsilon_start: float = declare.value(0.0, 0, 1, "Probability of a random action when learning starts.")
    epsilon_end: float = declare.value(
        0.0, 0, 1, "Probability of a random action at the end of its fall, and from then on."
    )
    epsilon_steps: int = declare.value(
        1, 1, 1_000_000_000, "Steps over which that probability falls in a straight line."
    )


@dataclass(frozen=True)
class ResetConfig:
    """What of the networks is drawn anew from time to time; memory and priorities are kept."""

    every: int = declare.value(
        0, 0, 1_000_000_000, "Updates between two resets, in whole environment steps from the run's start; 0: none."
    )
    keep: float = declare.value(
        1.0, 0, 1, "Share of their weights that encoder and transition model keep at a reset; the rest is drawn anew."
    )
    redraw: str = declare.choice(
        "outputs",
        lambda: REDRAWN,
        "What is drawn anew entirely: the Q-head's output layers; or all of it, with projection and predictor.",
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """How a trained agent is evaluated."""

    episodes: int = declare.value(100, 1, 1_000_000, "Whole games played by each agent.")
    max_steps: int = declare.value(
        27_000,
        1,
        1_000_000_000,
        "Steps after which a game counts as over; Atari's own limit is the same, 108,000 frames.",
    )
    epsilon: float = declare.value(0.001, 0, 1, "Probability of a random action.")


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
                f"schedule.learning_starts and replay.capacity must be at least {need} to fill a first batch"
            )

    def _check_parts(self) -> None:
        learner = self.learner
        if learner.depth > 1 and learner.aux_weight > 0 and not learner.model:
            raise UserError("learner.depth above 1 needs a transition model: set learner.model=true, or a depth of 1")
        if learner.uniformity_weight > 0 and learner.aux_weight == 0:
            raise UserError("learner.uniformity_weight needs a representation: set learner.aux_weight above 0")
        if self.network.encoder in encoder_names():  # only what makes networks needs it
            encoder_shapes(*self.encoder_arguments)  # refuses what is too small for it
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


# Fields of 0.6 and 0.7 under the names they have now; their files are still read.
_RENAMED = {
    "network.noise": "network.noisy_sigma0",
    "replay.batch": "replay.batch_size",
    "replay.exponent": "replay.priority_exponent",
    "learner.value": "learner.rl_loss",
    "learner.double": "learner.double_q",
    "learner.representation": "learner.aux_loss",
    "learner.spr_weight": "learner.aux_weight",
    "learner.tau": "learner.ema_decay",
    "learner.clip": "learner.max_grad_norm",
    "schedule.random_steps": "schedule.learning_starts",
}
_OLD_SIDE = 84  # of every frame then; a crop was given by its side


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
            name = f"{group}.{key}"
            if name == "augment.crop" and isinstance(value, int):
                name, value = "augment.crop_margin", _OLD_SIDE - value  # noqa: PLW2901
            name = _RENAMED.get(name, name)
            if name in flat:
                raise UserError(f"the configuration has {name} twice, under its name and an earlier one")
            flat[name] = value
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
    if name in _RENAMED:
        raise UserError(f"{name} is called {_RENAMED[name]} now")
    if name == "augment.crop":
        raise UserError("augment.crop is given by augment.crop_margin now: how much smaller than a frame it is")
    if name not in by_name:
        shown = name[:_LONGEST]  # it may come from a file, and be of any length
        raise UserError(f"unknown configuration field '{shown}'{did_you_mean(shown, by_name)}")
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
