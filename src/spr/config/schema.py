"""Owns every number a run depends on, in groups: frozen dataclasses whose defaults are the paper's hyper-parameters.

`ObservationConfig` is in `envs.base`, since environments deliver observations; `config` puts the groups together.
"""

from dataclasses import dataclass

from spr.common import config_fields

PADDINGS = ("valid", "same")
PROJECTIONS = ("head", "mlp", "none")
RL_LOSSES = ("categorical", "huber")
ENDS = ("all", "first")
BOOTSTRAPS = ("n", "n-1")
INITIALISATIONS = ("library", "xavier")
PRIORITIES = ("kl", "cross_entropy")
REDRAWN = ("outputs", "head")


@dataclass(frozen=True)
class AugmentConfig:
    """Image augmentation of sampled observations; acting and evaluation never see it."""

    shift: int = config_fields.value(4, 0, 1_023, "Largest shift in pixels along each axis; 0 turns shifting off.")
    crop_margin: int = config_fields.value(
        0, 0, 1_023, "Pixels by which a random crop, taken first, is smaller; padding by the shift fills them again."
    )
    intensity: float = config_fields.value(
        0.05, 0, 0.5, "Brightness factor: 1 + intensity * clamp(normal, -2, 2); 0 turns it off."
    )
    rl: bool = config_fields.flag(
        True, "Whether the RL loss sees augmented observations too, or only the auxiliary loss."
    )


@dataclass(frozen=True)
class NetworkConfig:
    """Encoder, transition model and Q-head."""

    encoder: str = config_fields.name("standard", "The encoder, by name; a plug-in may have registered it.")
    width: int = config_fields.value(1, 1, 64, "Factor of the channels of an encoder of any width, such as impala.")
    padding: str = config_fields.choice(
        "valid",
        lambda: PADDINGS,
        "Padding of the encoder's convolutions: none, or TensorFlow's SAME; impala has the latter always.",
    )
    initialisation: str = config_fields.choice(
        "library",
        lambda: INITIALISATIONS,
        "How weights begin: as the library's layers do, or Xavier uniform with biases of zero.",
    )
    batch_norm: bool = config_fields.flag(True, "Whether the transition model has batch norm.")
    hidden: int = config_fields.value(
        256, 1, 65_536, "Hidden units in each stream of the Q-head; the projection is all of them."
    )
    dueling: bool = config_fields.flag(True, "Whether the Q-head has streams for value and advantage, or one for both.")
    shared_hidden: bool = config_fields.flag(
        False, "Whether value and advantage share one hidden layer, or have one each."
    )
    noisy: bool = config_fields.flag(True, "Whether the Q-head's layers are noisy.")
    noisy_sigma0: float = config_fields.value(
        0.5, 0, 100, "Initial sigma of the noisy layers, times the root of their fan-in."
    )
    atoms: int = config_fields.value(51, 2, 10_001, "Atoms of the return distribution.")
    v_min: float = config_fields.value(-10.0, -1e6, 1e6, "Smallest return the distribution represents.")
    v_max: float = config_fields.value(10.0, -1e6, 1e6, "Largest return the distribution represents.")
    dropout: float = config_fields.value(
        0.0, 0, 0.99, "Dropout after each ReLU (impala: stage) of the online and target encoders while learning."
    )
    projection: str = config_fields.choice(
        "head",
        lambda: PROJECTIONS,
        "What the auxiliary loss compares: the Q-head's hidden layer, an MLP, latents.",
    )


@dataclass(frozen=True)
class ReplayConfig:
    """What is remembered and how it is drawn."""

    capacity: int = config_fields.value(
        100_000, 1, 100_000_000, "Environment steps kept per agent; a shorter run keeps its own."
    )
    batch_size: int = config_fields.value(32, 2, 65_536, "Sequences in a batch.")
    n_step: int = config_fields.value(10, 1, 1_000, "Length of the multi-step return.")
    n_step_end: int = config_fields.value(
        0, 0, 1_000, "Its length after schedule.anneal_updates, reached along an exponential; 0: it stays."
    )
    gamma: float = config_fields.value(0.99, 0, 1, "Discount per step.")
    gamma_end: float = config_fields.value(
        0.0, 0, 1, "Discount after schedule.anneal_updates, whose distance from 1 changes exponentially; 0: it stays."
    )
    ends: str = config_fields.choice(
        "all",
        lambda: ENDS,
        "Which ends within n steps cut the bootstrap: all, or only that of the first one (released code).",
    )
    bootstrap_at: str = config_fields.choice(
        "n",
        lambda: BOOTSTRAPS,
        "Steps to the bootstrap's state: n, or n-1 with n rewards and gamma^n (released code of SR-SPR and BBF).",
    )
    priority: str = config_fields.choice(
        "kl",
        lambda: PRIORITIES,
        "How far apart prediction and target are, for a priority: KL divergence, or cross-entropy (JAX code).",
    )
    priority_exponent: float = config_fields.value(
        0.5, 0, 10, "Exponent that turns that into a transition's priority; 0 makes all equal, which is uniform replay."
    )
    beta_start: float = config_fields.value(0.4, 0, 1, "Importance-correction exponent when learning starts.")
    beta_end: float = config_fields.value(1.0, 0, 1, "Importance-correction exponent at the last step.")
    clip_rewards: bool = config_fields.flag(
        True, "Whether rewards are clipped to [-1, 1] for learning; scores never are."
    )


@dataclass(frozen=True)
class LearnerConfig:
    """Losses, targets and the optimiser."""

    rl_loss: str = config_fields.choice(
        "categorical", lambda: RL_LOSSES, "The RL loss: of return distributions, or Huber's of Q-values."
    )
    double_q: bool = config_fields.flag(
        True, "Whether the online network picks the action that the target network values."
    )
    target_period: int = config_fields.value(
        1, 1, 1_000_000_000, "Updates between hard copies into the RL target network; 1: no separate network."
    )
    # Any name: it must be registered to train with it, not to play with the agent.
    aux_loss: str = config_fields.name("spr", "The auxiliary loss on representations, if its weight is above 0.")
    aux_weight: float = config_fields.value(
        2.0, 0, 1e6, "lambda: weight of the auxiliary loss; 0 leaves the RL loss alone."
    )
    uniformity_weight: float = config_fields.value(
        0.0, 0, 1e6, "Weight of the loss that spreads projections over the sphere."
    )
    depth: int = config_fields.value(
        5, 0, 100, "K: how many steps ahead is predicted; 0 compares two views of the same state."
    )
    model: bool = config_fields.flag(
        True, "Whether predictions roll a transition model forward, or are the present state itself."
    )
    ema_decay: float = config_fields.value(
        0.0, 0, 1, "The paper's tau: share of its old weights that the target encoder keeps; 0: the online encoder."
    )
    average: float = config_fields.value(
        0.0,
        0,
        1,
        "Share of its old weights that an average of all weights keeps per update: it values the bootstrap, gives the "
        "auxiliary loss its targets, acts and is evaluated; 0: there is none.",
    )
    stop_gradient: bool = config_fields.flag(True, "Whether targets are constants; off, gradients flow into them.")
    learning_rate: float = config_fields.value(1e-4, 0, 10, "Adam's learning rate.")
    learning_rate_end: float = config_fields.value(
        0.0, 0, 10, "Learning rate after schedule.anneal_updates, reached along an exponential; 0: it stays."
    )
    adam_beta1: float = config_fields.value(0.9, 0, 0.999999, "Adam's decay of the first moment.")
    adam_beta2: float = config_fields.value(0.999, 0, 0.999999, "Adam's decay of the second moment.")
    adam_eps: float = config_fields.value(1.5e-4, 0, 1, "Adam's epsilon.")
    weight_decay: float = config_fields.value(
        0.0, 0, 10, "AdamW's decay per update, times the learning rate, of weights that are not vectors; 0: Adam."
    )
    max_grad_norm: float = config_fields.value(
        10.0, 0, 1e9, "Gradients are clipped to this norm: of encoder and Q-head together, and of the model; 0: not."
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """How long to act and how much to learn."""

    steps: int = config_fields.value(100_000, 1, 1_000_000_000, "Environment steps of a run.")
    learning_starts: int = config_fields.value(
        2_000, 1, 1_000_000_000, "Environment steps, with uniformly random actions, before learning starts."
    )
    updates_per_step: int = config_fields.value(2, 0, 1_000, "Updates after every environment step from then on.")
    anneal_updates: int = config_fields.value(
        0,
        0,
        1_000_000_000,
        "Updates, from the start and from each reset, until values with an end reach it; 0: none.",
    )
    epsilon_start: float = config_fields.value(0.0, 0, 1, "Probability of a random action when learning starts.")
    epsilon_end: float = config_fields.value(
        0.0, 0, 1, "Probability of a random action at the end of its fall, and from then on."
    )
    epsilon_steps: int = config_fields.value(
        1, 1, 1_000_000_000, "Steps over which that probability falls in a straight line."
    )


@dataclass(frozen=True)
class ResetConfig:
    """Which part of the networks is re-initialised from time to time; replay and priorities are kept."""

    every: int = config_fields.value(
        0, 0, 1_000_000_000, "Updates between two resets, in whole environment steps from the run's start; 0: none."
    )
    keep: float = config_fields.value(
        1.0,
        0,
        1,
        "Share of their weights that encoder and transition model keep at a reset; the rest is new.",
    )
    redraw: str = config_fields.choice(
        "outputs",
        lambda: REDRAWN,
        "What is re-initialised entirely: the Q-head's output layers; or all of it, with projection and predictor.",
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """How a trained agent is evaluated."""

    episodes: int = config_fields.value(100, 1, 1_000_000, "Whole games played by each agent.")
    max_steps: int = config_fields.value(
        27_000,
        1,
        1_000_000_000,
        "Steps after which a game counts as over; Atari's own limit is the same, 108,000 frames.",
    )
    epsilon: float = config_fields.value(0.001, 0, 1, "Probability of a random action.")
