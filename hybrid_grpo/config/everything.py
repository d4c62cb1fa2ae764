"""The names that other packages import from `hybrid_grpo.config`."""

# ruff: noqa: F401

from hybrid_grpo.config.alarms import AlarmConfig, AlarmsConfig, GuardConfig
from hybrid_grpo.config.building import build, dump, to_dict
from hybrid_grpo.config.checks import BatchPlan
from hybrid_grpo.config.commands import SftConfig
from hybrid_grpo.config.data import DataConfig, MixtureConfig
from hybrid_grpo.config.evaluation import EvalConfig
from hybrid_grpo.config.grpo import GrpoConfig
from hybrid_grpo.config.model import EngineConfig, LoraConfig, PolicyConfig
from hybrid_grpo.config.rewards import RewardConfig, ScoringConfig, reward_name
from hybrid_grpo.config.rollout import RolloutConfig, environment_rewards
from hybrid_grpo.config.run import LogConfig, RunConfig
from hybrid_grpo.config.train import ModelRunConfig, TrainConfig
