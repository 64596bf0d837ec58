"""Defines what flows between processes: prompts, headers, references, facts, reports.

Everything here is a msgspec struct, and no field may hold a tensor. Those that are sent for every
record or tensor are encoded as msgpack arrays, the others as maps.
Controllers see ``Header``, ``Facts`` and numbers. Arrays ("columns") stay in the store of the node
that made them and are named by a ``Ref``. Excepted are a few records that a step check compares
(``ShownRecord``), and why a reward has no value, at most 128 bytes.

Columns of one record whose actions are tokens (P prompt tokens, A actions):

    prompt_ids   int32[P]    as the generator encoded them
    action_ids   int32[A]    as sampled, never re-encoded from text
    logp         float32[A]  log-prob of each action under the weights that sampled it, at the sampling temperature
    action_mask  uint8[A]    1 where the action is trained on; who may write 0: docs/reference/contract.md
    temperature  float32[]   the temperature of ``logp``; 1 for a greedy record
    text         uint8[*]    UTF-8 of the completion, without special tokens such as the one that ends it
    routing      uint8[P + A - 1, L, k]  of a mixture of experts, where the generator claims ``routing``: the k experts
                             that computed each token in each of L layers; uint16 above 256 experts
    version      int32[A]    of a record that more than one version of the weights sampled: the version that sampled
                             each action. Absent: it is ``Header.versions[0]`` for all of them. Written by generators
                             that claim ``midway_weights``
    sequences    int32[S, 3] of an episode in which a policy read several: how its actions are divided into them, see
                             docs/reference/contract.md. Absent: they are one sequence

The forms that a record has on its way, each named by (ordinal, sample):

    form           defined in                  made by                                   read by
    SampleRequest  contract/generator.py       the generator's worker, of a Lease        the generator, to which questions come so, too
    Finished       contract/generator.py       the generator, of a SampleRequest         its worker
    Header         contract/records.py         the generator's worker, of a Finished     controllers, scorers, observers (StepReport)
    RecordTrace    contract/run_files.py       a controller, for the trace               placement policies, commands that read traces
    ScoredRecord   contract/scorer.py          the scorer's worker, of a Header          rewards
    RewardWork     workers/overruns.py         the scorer's worker, of a Header          its node's agent, the process that comes next
    Question       contract/questions.py       a reward or environment that asks a role  the worker of it, which asks for the answers
    RecordScore    contract/records.py         the scorer's worker                       the ledger of a controller
    Facts          contract/records.py         a controller, of a Header                 the lead, for the balancer
    TrainItem      runtime/messages.py         a controller, of Header and Assignment    workers of trainers and annotators
    TrainRecord    contract/trainer.py         these workers, of a TrainItem             trainers, annotators
    Compared       contract/sentinel.py        a trainer's worker, of a TrainRecord      the sentinel, generators that explain a gap
    ShownRecord    runtime/messages.py         a trainer's worker, of a Compared         generators and trainers that score it again or explain it
    TrainedTokens  contract/run_files.py       a trainer's worker, for ``tokens.jsonl``  commands that show records

Twelve words, and what TRL, verl and slime call the same:

    here         there
    record       sample, trajectory
    drawn        sampled, generated
    row          prompt (of the dataset)
    ordinal      index (of a prompt in the run); slime: group_index; verl: uid
    sample       index of a response among those to its prompt
    group        the responses to one prompt; TRL: num_generations; verl: rollout.n
    action       response token
    action_mask  TRL: completion_mask; verl: response_mask; slime: loss_mask
    logp         log-prob of the rollout; verl, slime: rollout_log_probs
    teaches      has a non-zero advantage
    version      policy version; slime: weight_versions
    push         weight sync, weight update
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import msgspec

HEADER_LIMIT_BYTES = 512

#: Version of the weights of a record that nobody sampled: its generator read it.
UNSAMPLED = -1
#: Status of a record.
FINISHED = "finished"
TRUNCATED = "truncated"
ABORTED = "aborted"
FAILED = "failed"
STATUSES = (FINISHED, TRUNCATED, ABORTED, FAILED)
#: Verdict on a group: a step trains on it.
TRAINED = "trained"
#: Verdict on a group: the filter dropped it.
FILTERED = "filtered"
#: Verdict on a group: it could not be used.
QUARANTINED = "quarantined"
#: Status of a reward.
OK = "ok"
REWARD_FAILED = "failed"
REWARD_TIMEOUT = "timeout"
REWARD_SKIPPED = "skipped"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Holds one row of a dataset, as the workers that open it see it.

    It never travels through a controller. Exactly one of ``text`` and ``messages`` is set.

    row: its number in the dataset.
    text: the prompt as text, or None.
    messages: the prompt as chat turns, each ``{"role", "content"}``, or None.
    images: absolute paths of the images that it shows, in the order of their places in the text, or
        of the parts ``{"type": "image"}`` of the turns.
    fields: the row's other values (an answer to verify against, a source, ...).
    """

    row: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    images: list[str] = []
    fields: dict[str, Any] = {}


class Ref(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names bytes in a node's store.

    Controllers only forward it. The process that opens it checks bounds, ``mac`` and ``digest``.

    node: the node whose store has the bytes.
    slab: the file of the store that has them.
    offset: where they begin in it, in bytes.
    nbytes: how many they are.
    digest: xxh3-64 of the content.
    mac: keyed blake2b over the other fields, 16 bytes.
    dtype: "columns" for a chunk of named arrays, else a numpy dtype.
    shape: of the array; empty for a chunk.
    """

    node: str
    slab: str
    offset: int
    nbytes: int
    digest: int
    mac: bytes
    dtype: str = "columns"
    shape: tuple[int, ...] = ()


class Header(msgspec.Struct, array_like=True, gc=False):
    """Holds the half of a record that controllers see.

    It has at most 512 bytes encoded (``HEADER_LIMIT_BYTES``).

    ordinal: the prompt's place in the seeded order of the run.
    sample: its number in the group, 0 .. group size - 1.
    row: row of the dataset.
    seed: of this sample, blake2b of (run seed, ordinal, pass, sample).
    attempt: how often a replica has not finished its group before: it was lost, or first needed
        weights.
    versions: first and last weights version that sampled its actions; ``UNSAMPLED`` where none did.
    n_prompt: length of the prompt, in tokens.
    n_actions: length of the answer, in tokens or denoising steps.
    status: how it ended: "finished", "truncated", "aborted" or "failed".
    reason: why it ended so; "" where that is a matter of course.
    columns: the chunk that holds its columns; None where it has none.
    slot: its place in that chunk.
    rewards: reward -> value, for rewards with status "ok".
    reward_status: reward -> "ok", "failed", "timeout" or "skipped".
    cost: ``Finished.cost`` of its generator.
    media: name -> further bytes that scorers and trainers need.
    prompt_digest: xxh3-64 of the row as the generator opened it; 0 where it is not known. A scorer
        compares it with its own opening of the row.
    digests: xxh3-64 of what was sampled, and of its log-probs; 0 where they are not known. Two runs
        are compared by them.
    seal: binds the record's content to its name (``gcore_core.contract.lineage``); 0: none.
    receipt: of its rewards, summed over the scorers that gave them.
    stamp: of the weights that its generator held when it ended; 0 where that is not known.
    replica: number of the generator's replica that sampled it.
    n_given: how many of its actions no policy sampled, since their ``action_mask`` is 0.
    """

    ordinal: int
    sample: int
    row: int
    seed: int
    attempt: int = 0
    versions: tuple[int, int] = (0, 0)
    n_prompt: int = 0
    n_actions: int = 0
    status: str = FINISHED
    reason: str = ""
    columns: Ref | None = None
    slot: int = 0
    rewards: dict[str, float] = {}
    reward_status: dict[str, str] = {}
    cost: float = 0.0
    media: dict[str, Ref] = {}
    prompt_digest: int = 0
    digests: tuple[int, int] = (0, 0)
    seal: int = 0
    receipt: int = 0
    stamp: int = 0
    replica: int = 0
    n_given: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """(ordinal, sample), by which the training batch is ordered."""
        return self.ordinal, self.sample

    @property
    def n_sampled(self) -> int:
        """How long the answer is that the policy gave, without what it was given on the way."""
        return self.n_actions - self.n_given


class Lease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names one prompt that a shard owns, and which of its samples are to be drawn.

    ordinal: the prompt's place in the seeded order of the run.
    row: row of the dataset.
    epoch: which pass over the dataset.
    samples: numbers of the samples to draw.
    attempt: how often a replica has not finished it before: it was lost, or needed other weights
        first.
    """

    ordinal: int
    row: int
    epoch: int
    samples: tuple[int, ...]
    attempt: int = 0


class Inquiry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Measures one answer of a generator role that a reward got about a record.

    role: the generator role that was asked.
    replica: number of the replica that answered.
    n_prompt: tokens of the question.
    n_actions: tokens of the answer.
    began_ago_s: seconds from the beginning of the answer to the moment when this was sent. A time
        of day would need a shared clock.
    ended_ago_s: seconds from its end to that moment.
    """

    role: str
    replica: int
    n_prompt: int
    n_actions: int
    began_ago_s: float
    ended_ago_s: float


class RecordScore(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Holds what the rewards of one scorer worker said of a record.

    ordinal, sample: which record it is.
    values: reward -> value, for rewards with status "ok".
    statuses: reward -> "ok", "failed", "timeout" or "skipped".
    reason: why the first reward that failed or timed out gave no value; "" where none did.
    asked: what the rewards asked generator roles.
    receipt: of the values, made of the record that the scorer has opened; see
        ``gcore_core.contract.lineage``.
    """

    ordinal: int
    sample: int
    values: dict[str, float]
    statuses: dict[str, str]
    reason: str = ""
    asked: list[Inquiry] = []
    receipt: int = 0


class Facts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Holds what the lead may know of a record: at most 64 bytes encoded.

    All fields are the header's.
    """

    ordinal: int
    sample: int
    n_prompt: int
    n_actions: int
    cost: float


class Assignment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Says where one record trains; the lead gives one for each ``Facts``, in their order.

    rank: the data-parallel rank.
    minibatch: the minibatch of the step; it is drawn by seed, never by length.
    tile: the part of its minibatch that it belongs to. A tile trains on one rank as a whole, and
        its records do not depend on the number of ranks. 0 for all records unless the run is
        deterministic.
    """

    rank: int
    minibatch: int
    tile: int = 0


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Describes one tensor of a weight push.

    name: as in a Hugging Face checkpoint.
    dtype: as in safetensors (F32, ...).
    shape: of the tensor.
    nbytes: its size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class AdapterFacts(msgspec.Struct, frozen=True, array_like=True):
    """Describes the low-rank adapter (LoRA, Hu et al. 2021) that a push brings.

    A target's weight is W + scale * B A. W is the base's, which does not change; A has the shape
    (rank, inputs), B (outputs, rank).

    rank: of all targets.
    scale: peft's alpha / rank, or alpha / sqrt(rank) with rank stabilisation.
    targets: names of the modules that have an adapter, such as
        ``model.layers.0.self_attn.q_proj``, in the order of the tensors.
    base: weights_sha256 of the base's files, see ``gcore_core.contract.weights_hash``.
    """

    rank: int
    scale: float
    targets: list[str]
    base: str


class WeightPlan(msgspec.Struct, frozen=True, array_like=True):
    """Says what a push will bring; it is the push's first message.

    version: of the weights that the push brings.
    tensors: every tensor, in the order in which they come.
    adapter: what the tensors are where they are an adapter's and not the model's. They are then
        named as in peft's files, ``base_model.model.<target>.lora_A.weight`` and ``lora_B``, of
        each target A and then B. Only a generator with the trait ``adapters`` gets such
        a plan.
    """

    version: int
    tensors: list[TensorSpec]
    adapter: AdapterFacts | None = None


class StepReport(msgspec.Struct, kw_only=True):
    """Reports one finished step, as observers and the metrics file see it.

    step: how many steps are finished.
    version: of the weights after the step.
    metrics: slash-separated path -> value.
    evaluation: "greedy/<reward>", "sampled/<reward>", ... -> value; only at evaluation steps.
    samples: a few evaluated records, to be opened by reference; only at evaluation steps.
    digests: stage -> digest of what the step did there, in hexadecimal, by which two runs are
        compared; of step 0 only that of the weights.
    """

    step: int
    version: int
    metrics: dict[str, float]
    evaluation: dict[str, float] = {}
    samples: list[Header] = []
    digests: dict[str, str] = {}


class RunFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Tells observers about a run when it starts.

    name: of the run.
    directory: where its files are.
    steps: how many steps it is to make.
    config: the resolved configuration as a tree of plain values.
    resumed_from: the step that it goes on from; 0 for a new run.
    """

    name: str
    directory: str
    steps: int
    config: dict[str, Any]
    resumed_from: int = 0


class WorkerFailure(msgspec.Struct, kw_only=True, frozen=True):
    """Reports a worker that ended or was lost.

    role, rank: which worker it is.
    reason: what happened.
    """

    role: str
    rank: int
    reason: str
