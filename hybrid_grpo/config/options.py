"""Every option, one dataclass per owner. What can be derived (accumulation, micro-batches) is not asked for.

Where settings come from is in `parsing.py`, what is refused in `checks.py`. Nothing changes a configuration after
it was parsed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole: where it writes, how long it lasts, how it repeats."""

    name: str = "run"
    """Name of the run; its folder is DIR/NAME."""
    dir: str = "runs"
    """Folder that holds the runs."""
    seed: int = 0
    """Seed of the data order and of every sampled token."""
    steps: int = 100
    """Steps to train: rollouts for `train`, optimizer steps for `sft`."""
    resume: Literal["never", "auto"] = "never"
    """`auto` goes on from the newest checkpoint of this run, or starts where there is none."""


@dataclass(frozen=True)
class PolicyConfig:
    """The model that is trained and its optimizer."""

    model: str = ""
    """Folder or hub name of the starting model and its tokenizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in forward and backward; the optimizer always keeps float32 masters."""
    attn_implementation: Literal["auto", "packed", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention of the training forward. `packed` computes no padding, with flash-attn's kernels where it is installed,
    else torch's; `auto` takes it for every architecture that allows it, else `sdpa`. The others are those of
    transformers, on padded rows (flash_attention_2 needs the extra `flash`)."""
    shared_prefix: Literal["auto", "on", "off"] = "auto"
    """With `packed`, compute the prompt of a group once in training too, exactly; `auto` where it pays."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in backward instead of keeping them."""
    lr: float = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at 0 with the last step."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moment decays."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward and backward, per rank, padding included where there is any; a longer row goes alone. Not
    given: 16,384 on a GPU, and on a CPU 4,096, whose activations the system need not map anew for every layer."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): the model stays as it is, and small matrices beside its linear layers
    are trained (needs the extra `lora`)."""

    rank: int = 0
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: int = 32
    """An adapter adds alpha / rank times the product of its matrices to the weight of its layer."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Layers with an adapter, by the ends of their names, as in [q_proj, v_proj]; `all-linear` is every linear layer
    but the output head, which takes none. Experts that are one tensor are not linear layers."""


@dataclass(frozen=True)
class EngineConfig:
    """The DeepSpeed engine."""

    zero_stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage of the policy: 3 shards weights, gradients and optimizer over the ranks."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (ZeRO stage 1 or higher)."""
    adam: Literal["auto", "torch", "deepspeed"] = "auto"
    """AdamW kernels: `deepspeed` compiles its own on first use; `auto` takes them for GPU runs that offload."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed configuration merged over the one built here, section by section."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts: where they come from and how they become tokens."""

    path: str = ""
    """JSONL or parquet file, folder of a saved dataset, or hub name."""
    task: str | None = None
    """Ready-made source, prompts and rewards, of which every setting can be overridden: gsm8k, math, multiple_choice,
    code, countdown, letters, or one of your own, `path/to/file.py:name`."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split to train on, where the source has splits."""
    eval_path: str | None = None
    """Source of the held-out prompts; not given: the same as `path`."""
    eval_split: str | None = None
    """Split to evaluate on; with neither this nor `eval_path` there is no evaluation."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion_column: str = "completion"
    """Column with the target text (`sft`), or with the text to score (`score`)."""
    system_prompt: str | None = None
    """System message put before every prompt; makes text prompts into chats."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's template to message lists, `always` also to text (as a user message)."""
    max_prompt_tokens: int = 512
    """Longest prompt that is kept."""
    over_long: Literal["drop", "refuse"] = "drop"
    """What to do with longer prompts: drop and count them, or stop."""
    shuffle: bool = True
    """Draw prompts in a seeded random order, a new one every epoch."""
    limit: int | None = None
    """Read only the first rows of the training split."""
    eval_limit: int | None = None
    """Read only the first rows of the evaluation split."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_step: int = 32
    """Prompts of one rollout, over all ranks (P)."""
    num_generations: int = 8
    """Completions per prompt (G), the group that advantages are relative to."""
    max_completion_tokens: int = 512
    """Longest completion."""
    min_completion_tokens: int = 0
    """Tokens before which nothing ends a completion: stop ids are not drawn, stop strings are passed over."""
    temperature: float = 1.0
    """Softmax temperature, of sampling and of every log-probability in the loss."""
    top_p: float = 1.0
    """Nucleus: smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """After top-k and top-p, keep the tokens with at least this share of the largest probability; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the completion so far are divided by this where positive, else multiplied by
    it (CTRL, arXiv:1909.05858); 1 changes nothing."""
    logit_bias: dict[str, float] = field(default_factory=dict)
    """Added to the logits of tokens, by token id: `{"42": -100.0}`."""
    stop_ids: list[int] = field(default_factory=list)
    """Token ids that end a completion, beside the model's own end-of-sequence ids."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a completion as soon as it contains one; they stay part of it."""
    ignore_eos: bool = False
    """For benchmarks: nothing but max_completion_tokens ends a completion."""
    logprobs: Literal["softmax", "sampling"] = "softmax"
    """Distribution that `old_logp` is recorded under: `softmax` is that of the training forward, at the temperature;
    `sampling` the filtered one that the tokens were really drawn from."""
    decoder: Literal["paged", "transformers"] = "paged"
    """`transformers` decodes with generate(), for architectures that the paged decoder cannot run."""
    max_slots: int = 256
    """Completions decoded at the same time on one rank."""
    prefill_tokens: int | None = None
    """Prompt tokens of one prefill forward; a longer prompt is read in pieces. Not given: 16,384 on a GPU, 2,048 on a
    CPU."""
    cache_gb: float | None = None
    """GiB of keys and values on one rank; not given: from free memory."""


@dataclass(frozen=True)
class GrpoConfig:
    """The objective."""

    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """Average of the token losses: over all tokens (dapo), per completion then over completions (grpo), or by the
    constant B * max_completion_tokens (dr_grpo)."""
    importance: Literal["token", "sequence"] = "token"
    """Ratio of the policy to the one that sampled: of every token, or of the completion, as the exponential of its
    tokens' mean log-ratio (GSPO, arXiv:2507.18071, which is `sequence` with loss_type grpo)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """What becomes of the ratio: PPO's clipped surrogate, or its value cut at 1 + epsilon_high, as a constant weight of
    the log-probability (CISPO, arXiv:2506.13585), which keeps the gradient of every token."""
    epsilon_low: float = 0.2
    """The ratio is clipped from below at 1 - epsilon_low; no part of cispo, which has no lower bound."""
    epsilon_high: float = 0.2
    """The ratio is clipped from above at 1 + epsilon_high (0.28 in DAPO; 3e-4 and 4e-4 are GSPO's low and high)."""
    dual_clip: float | None = None
    """Greater than 1: with a negative advantage A the loss is at most -dual_clip * A, however large the ratio
    (arXiv:1912.09729); for surrogate clip."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What rewards are compared with: the mean of their group, or of the others in it (RLOO, arXiv:2402.14740)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide the centred rewards by their standard deviation in the group, by that over all completions of the step
    (REINFORCE++-baseline, arXiv:2501.03262), or do not (Dr. GRPO)."""
    combine_rewards: Literal["sum", "normalize"] = "sum"
    """Weighted sum of the reward functions as they are, or each first centred and scaled within the group (GDPO,
    arXiv:2601.05242, which is `normalize` with scale_rewards batch)."""
    step_credit: Literal["reward_to_go", "normalized"] = "reward_to_go"
    """With rewards of steps, a token's advantage is what its completion still earns, relative to what the others of the
    group still earn at the same token; or (normalized) the sum over the steps to come, each relative to all steps of
    the group: DeepSeekMath, arXiv:2402.03300, section 4.1.3, which pays for ending before a step that may go wrong."""
    beta: float = 0.0
    """Weight of the KL to the reference; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of a token, with d = ref_logp - logp: -d (k1), d^2 / 2 (k2) or exp(d) - d - 1 (k3)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """The KL is a term of the loss, or is subtracted from the reward, summed over the completion."""
    kl_unbiased: bool = False
    """Multiply the KL of the loss by the ratio of its token, gradient included, which makes its gradient (of k1 and k3)
    that of the KL itself, off-policy too (DeepSeek-V3.2); without it k1 in the loss is noise."""
    kl_target: float | None = None
    """Adapt beta, which is where it starts, to hold policy/kl at this many nats per token (arXiv:1909.08593)."""
    kl_horizon: int = 10000
    """Completions over which a KL that is 20 % or more off its target changes beta by a fifth."""
    entropy_coef: float = 0.0
    """Weight of the entropy that the loss rewards."""
    old_logp: Literal["auto", "sampler", "policy"] = "auto"
    """Who gives the log-probabilities that ratios are relative to, where a rollout has several optimizer steps: the
    sampler, which recorded them, or a pass of the training forward before the first. `auto` takes the sampler's, unless
    sampler_correction is on or rollout.logprobs is sampling."""
    sampler_correction: Literal["none", "truncate", "mask"] = "none"
    """Correct for a sampler that differs from the training forward: weigh the loss of every token with their ratio, at
    most sampler_ratio_max (truncated importance sampling), or drop completions whose tokens' geometric mean of it is
    outside the bounds."""
    sampler_ratio_max: float = 2.0
    """Upper bound of sampler_correction."""
    sampler_ratio_min: float = 0.5
    """Lower bound of sampler_correction mask."""
    mask_truncated: bool = False
    """Completions cut at the length limit take no part in the loss, but still in their group's mean and standard
    deviation (DAPO, section 3.4)."""
    overlong_buffer: int = 0
    """Tokens before max_completion_tokens over which a punishment for length grows from 0 to overlong_penalty (DAPO
    eq. 13); 0 punishes nothing."""
    overlong_penalty: float = 1.0
    """What a completion of max_completion_tokens loses of its reward where overlong_buffer is set."""
    dynamic_sampling: bool = False
    """Sample other prompts in place of those whose completions all have the same reward, before any punishment (DAPO
    eq. 11)."""
    max_resamples: int = 5
    """Rounds of dynamic_sampling in one step before it goes on with what there is."""
    ref_every: int = 0
    """Steps between refreshes of the reference from the policy; 0 keeps the starting model."""
    ref_mix: float = 1.0
    """Share of the policy in a refreshed reference: 1 replaces it (iterative GRPO), a small share with ref_every 1 is
    a moving average."""
    num_iterations: int = 1
    """Passes over one rollout (mu of DeepSeekMath)."""
    num_minibatches: int = 1
    """Optimizer steps per pass."""


@dataclass(frozen=True)
class RewardConfig:
    """One reward function."""

    function: str
    """`exact_match` or another built-in, `path/to/file.py:function`, or `package.module:function`."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    name: str | None = None
    """Name in the metrics; not given: the function's own."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Fixed keyword arguments for the function."""
    timeout_s: float = 60.0
    """Seconds of one call. One that takes longer is given up, and its completions have no reward of this function."""
    batch_size: int | Literal["auto", "group"] = "auto"
    """Completions of one call; `group` is all of one prompt; `auto` is what the function asks for by an attribute
    `batch_size`, else 1."""
    isolation: Literal["auto", "process", "none"] = "auto"
    """`process` calls it in worker processes; `none` in a thread of the rank, for functions that hold a GPU, whose
    crash is the rank's; `auto` is `process` but for simple built-ins."""


@dataclass(frozen=True)
class ScoringConfig:
    """How reward functions are run."""

    workers: int = 0
    """Worker processes of a rank, which call functions at the same time; 0: one for each of its cores, 2 to 8."""
    memory_gb: float = 4.0
    """GiB that a worker may allocate; beyond it a function gets a MemoryError."""
    max_failed_frac: float = 0.5
    """Stop the run, with a checkpoint, where a function fails for more than this share of a step's completions."""
    max_wait_s: float = 600.0
    """Seconds to wait for rewards after the last completion of a step; those that are not there then have failed."""


@dataclass(frozen=True)
class CurriculumConfig:
    """Which prompts are drawn, by how often they are solved: by `eval.outcome` and `eval.threshold`."""

    sampling: Literal["uniform", "difficulty"] = "uniform"
    """`difficulty` draws prompts in proportion to what their groups are expected to teach: the probability that the
    completions are neither all right nor all wrong, times the share that is still wrong; `uniform` passes over all of
    them, in an order that success rates do not change."""
    column: str | None = None
    """Column that foretells how hard a prompt is, such as a level or a topic, or whose length does: prompts that were
    not tried yet are expected to be solved as often as those like them; not given: the length of the prompt."""
    skip_above: float | None = None
    """Leave out prompts with a known success rate of at least this: they are solved."""
    skip_below: float | None = None
    """Leave out prompts with a known success rate of at most this: they are out of reach."""
    min_tries: int = 4
    """Completions behind a success rate, discounted by their age, from which on skip_above and skip_below believe it;
    a prompt that is left out comes back when they have aged."""
    half_life: int = 50
    """Steps after which a completion counts half in the success rate: the policy that wrote it is gone."""
    floor: float = 0.05
    """Weight of prompts that teach nothing or are left out, against 1 for the best: nothing is ever forgotten."""


@dataclass(frozen=True)
class EvalConfig:
    """Greedy evaluation on the held-out prompts."""

    every: int = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    name: str = "heldout"
    """Name of the set in the metrics: eval/NAME/accuracy."""
    outcome: str | None = None
    """Name of the reward that tells right from wrong; not given: the first one."""
    threshold: float = 1.0
    """A completion is right when its outcome reward is at least this."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is written to resume from."""

    every: int = 0
    """Steps between checkpoints; 0 writes none (the trained model is always exported at the end)."""
    keep: int = 2
    """Newest checkpoints that are kept."""


@dataclass(frozen=True)
class LogConfig:
    """What is shown and written while it runs."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online where an account is configured, else offline."""
    wandb_project: str = "hybrid_grpo"
    """Project on wandb."""
    rollouts_every: int = 1
    """Steps between rollouts written to rollouts/ and to the wandb table; 0 writes none."""
    parity_alarm: float = 0.05
    """Warn when sampler and training forward differ by more than this, on average, in log-probability."""
    heldout_alarm: float = 0.05
    """Warn when held-out accuracy is more than this below its best while the training reward is higher than then."""


@dataclass(frozen=True)
class SftLoopConfig:
    """The supervised stage."""

    batch_size: int = 64
    """Rows of one optimizer step, over all ranks."""
    max_completion_tokens: int = 512
    """Longest target that is kept; rows beyond it are dropped and counted."""


@dataclass(frozen=True)
class TrainConfig:
    """GRPO training."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward functions: `[{function: exact_match, weight: 1.0}, ...]`."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning, on the same engine."""

    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftLoopConfig = field(default_factory=SftLoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True)
class OutputConfig:
    """Where completions go."""

    output: str = "-"
    """File of JSON lines, written anew; `-` is standard output. Several ranks write a file each: out.0.jsonl, ..."""


@dataclass(frozen=True)
class GenerateConfig(TrainConfig):
    """Completions of prompts, one JSON object a line. Takes the recipe of a training run, of which the sections that
    only training has are without effect."""

    data: DataConfig = field(default_factory=lambda: DataConfig(over_long="refuse"))
    """The prompts are those of `path` and `split`. Without a path and a task, or with `-`, they come from standard
    input: one a line, as text or as a JSON object with the columns of a data set."""
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(num_generations=1))
    """All but `prompts_per_step` counts; temperature 0 takes the most probable tokens."""
    generate: OutputConfig = field(default_factory=OutputConfig)
    """Where completions go."""

    @property
    def reads_stdin(self) -> bool:
        """Whether prompts come from standard input."""
        return self.data.path == "-" or not (self.data.path or self.data.task)


@dataclass(frozen=True)
class PlanOptionsConfig:
    """Where the planned run would be."""

    world_size: int | None = None
    """Ranks; not given: as many as run this command."""
    gpu: Literal["a100-40gb", "a100-80gb", "l40s", "h100", "h200", "b200"] | None = None
    """Plan for an empty GPU of this kind, by its data sheet; not given: for the device that is here."""


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """Memory and time of a training run, by its recipe, without loading weights."""

    plan: PlanOptionsConfig = field(default_factory=PlanOptionsConfig)
    """Where the planned run would be."""


@dataclass(frozen=True)
class ReplayOptionsConfig:
    """Which rollouts are scored again, and what is kept of it."""

    steps: str | None = None
    """Steps, as in `100-200`, `100-`, `-200` or `100`; not given: all that were saved."""
    threshold: float | None = None
    """A completion is right when its new reward is at least this; not given: eval.threshold, as for the old one."""
    limit: int = 50
    """Disagreements of each function that are written, the largest first."""
    output: str | None = None
    """Name of the two files in RUN_FOLDER/replay, NAME.json and NAME.disagreements.jsonl; not given: of the functions.
    Those of an earlier replay of this name are replaced."""


@dataclass(frozen=True)
class ReplayConfig(TrainConfig):
    """Score a run's rollouts with other reward functions, without a model. RUN_FOLDER is that of a training run; its
    settings are where this starts from: those of `grpo` say how advantages are made, `rewards` are scored again."""

    replay: ReplayOptionsConfig = field(default_factory=ReplayOptionsConfig)
    """Which rollouts are scored again, and what is kept of it."""


@dataclass(frozen=True)
class ScoreOptionsConfig:
    """Where rewards go."""

    output: str = "-"
    """File of JSON lines, written anew; `-` is standard output."""


@dataclass(frozen=True)
class ScoreConfig(TrainConfig):
    """Try reward functions on rows that have completions. FILE is a source as in `data.path`, or `-` for JSON lines
    from standard input: a row has a prompt, the column of `data.completion_column` with a text, or one with an `s`
    behind it with a list of them, and columns for the functions. Takes the recipe of a training run."""

    score: ScoreOptionsConfig = field(default_factory=ScoreOptionsConfig)
    """Where rewards go."""


@dataclass(frozen=True)
class ServeOptionsConfig:
    """Where rewards are served, and to whom."""

    host: str = "127.0.0.1"
    """Address to listen at; any but this machine's own needs `token_env`."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    token_env: str | None = None
    """Name of the environment variable with the bearer token that clients must send."""
    certificate: str | None = None
    """File of the TLS certificate and its chain (PEM); not given: plain HTTP."""
    key: str | None = None
    """File of the certificate's private key (PEM); not given: it is in the file of the certificate."""
    max_body_mb: float = 16.0
    """Largest request, in MiB."""
    max_requests: int = 256
    """Requests that are answered at the same time; more are told to come back (503). A rank sends up to 32."""
    timeout_s: float = 30.0
    """Seconds for a request to arrive, and for its answer to be taken."""
    label_column: str = "answer"
    """Name under which functions are given the `labels` of a request."""
    ends: list[str] = field(default_factory=list)
    """Texts taken off the end of a `query`, such as `<|im_end|>`: OpenRLHF sends special tokens with it."""


@dataclass(frozen=True)
class ServeRewardConfig:
    """Reward functions as a service for other machines, by OpenRLHF's convention."""

    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward functions: `[{function: exact_match, weight: 1.0}, ...]`."""
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    """How they are run."""
    serve: ServeOptionsConfig = field(default_factory=ServeOptionsConfig)
    """Where they are served, and to whom."""


@dataclass(frozen=True)
class BatchPlan:
    """The batch equation of a GRPO step, derived from the configuration and the number of ranks."""

    world_size: int
    prompts_per_rank: int
    num_generations: int
    num_minibatches: int
    num_iterations: int

    @property
    def rows_per_minibatch(self) -> int:
        """Completions behind one optimizer step, over all ranks."""
        return self.world_size * self.prompts_per_rank * self.num_generations // self.num_minibatches

    def __str__(self) -> str:
        rows = self.world_size * self.prompts_per_rank * self.num_generations
        steps = self.num_iterations * self.num_minibatches
        return (
            f"{self.world_size} ranks x {self.prompts_per_rank} prompts x {self.num_generations} completions"
            f" = {rows} rows a rollout; {self.num_iterations} iterations x {self.num_minibatches} minibatches"
            f" = {steps} optimizer steps of {self.rows_per_minibatch} rows"
        )


def reward_name(reward: RewardConfig) -> str:
    """The name of a reward in the metrics."""
    function = reward.function
    name = getattr(function, "__name__", type(function).__name__) if callable(function) else function.rpartition(":")[2]
    return reward.name or name.rpartition(".")[2]
