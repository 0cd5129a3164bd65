"""Bytes that one rank of the learner holds at its peak: a sum of named terms at each moment that can be the peak.

Every term is a method of :class:`LearnerMemory`. ``python benchmarks/memory.py`` runs the learner's own code and
measures what each phase holds; tests/memory demands that both agree. Left out are what kernels, NCCL and the allocator
need for themselves (see ``hardware.memory_share``), and adapters; and the rounded weights with which the policy samples
in turn with training: half as many bytes as gradients, which are not there then. A value model is one more such sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

USED = 0.8
"""Share of a GPU's memory up to which a run keeps activations and fills passes. The rest is for fragments, and for what
is not counted."""
KEYS = 8
"""Keys that a pass may have for each token of its limit: what attention's kernel copies of them, and their gradients,
then take about what the feed-forward layer of the block has just given up, in Llama 8B 196 KB and 172 KB a token."""
_FLOAT, _BFLOAT = 4, 2
_CHUNK_BYTES, _LEAST_ROWS = 30 << 20, 2048
"""As in models/head.py on a GPU."""
_ZERO_BUCKET = 5e8
"""Gradients that DeepSpeed sums at a time: its reduce_bucket_size, if the configuration says no other."""
_SAVED = {
    ("llama", "float32"): (32, 8, 16),
    ("llama", "autocast"): (30, 4, 8),
    ("llama", "bfloat16"): (20, 4, 8),
    ("gpt_neox", "float32"): (40, 0, 8),
    ("gpt_neox", "autocast"): (22, 0, 4),
    ("gpt_neox", "bfloat16"): (20, 0, 4),
}
"""By kind of block and of computing: what a block keeps of a token for its backward pass, in bytes for each number of
the hidden state, of keys, and of the feed-forward layer. Under autocast the residual stream stays float32, and each
matrix product has a copy of its input; weights that are cast when they are gathered make it bfloat16."""

_PRODUCTS = {"llama": (4, 2, 2), "gpt_neox": (6, 0, 1)}
"""The same numbers of what attention and matrix products return, in numbers instead of bytes."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Args:
        parameters: in all.
        layers: blocks.
        hidden: width of the residual stream.
        vocabulary: rows of the embedding.
        kv_width: key heads x head size.
        feed_forward: width of the feed-forward layer; of a mixture, of all experts that a token meets.
        block: "llama" (RMSNorm, gated feed-forward layer) or "gpt_neox" (LayerNorm, GELU).
        tied: whether the output head is the embedding.
        scores: query heads x tokens of the longest row, where attention holds its scores; 0 for a kernel that does not.
        capped: whether these scores have a soft cap.
        query_width: query heads x head size; 0 for the width of the residual stream.
    """

    parameters: float
    layers: int
    hidden: int
    vocabulary: int
    kv_width: int
    feed_forward: int
    block: str = "llama"
    tied: bool = False
    scores: int = 0
    capped: bool = False
    query_width: int = 0

    @property
    def embedding(self) -> float:
        """Parameters of the embedding, as of the head."""
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> float:
        """Parameters in no block."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def one_block(self) -> float:
        """Parameters of one block."""
        return (self.parameters - self.outside) / self.layers


@dataclass(frozen=True)
class Pass:
    """Tokens of one forward pass: of the padded rows, and how many of them were sampled, at most; and the keys of all
    branches, where a kernel for packed rows copies those that they share.
    """

    tokens: float
    sampled: float
    keys: float = 0.0


@dataclass(frozen=True)
class LearnerMemory:
    """One of several ranks.

    Args:
        shape: of the policy.
        frozen: parameters of reference and reward model together.
        ranks: R.
        sharded: FSDP's (and about ZeRO-3's) ranks share everything; DDP's hold all.
        recompute: gradient checkpointing; "selective" keeps products.
        bf16: under autocast; weights are float32.
        annotate: the largest pass without gradient.
        update: the largest pass with gradient.
        frozen_bytes: a parameter of the frozen models.
        state_bytes: a parameter of the policy: weight, gradient and moments.
        zero: the stage of DeepSpeed's ZeRO, which gathers float32 and has another copy of what it updates; else 0.
        context: C, ranks that share the tokens of a pass.
    """

    shape: Shape
    frozen: float
    ranks: int
    sharded: bool
    recompute: bool | str
    bf16: bool
    annotate: Pass
    update: Pass
    frozen_bytes: float = 4.0
    state_bytes: float = 16.0
    zero: int = 0
    context: int = 1

    def with_passes(self, tokens: float, sampled: float) -> LearnerMemory:
        """The same with passes of so many tokens, and in 16 bits, where branches may share keys, as many as a pass may
        have.
        """
        sizes = Pass(tokens, sampled, KEYS * tokens if self.bf16 else 0.0)
        return replace(self, annotate=sizes, update=sizes)

    # What lies there all the time

    @property
    def _share(self) -> int:
        return self.ranks if self.sharded else 1

    def weights(self) -> float:
        """The policy, float32."""
        return _FLOAT * self.shape.parameters / self._share

    def gradients(self) -> float:
        """Float32, from the first micro-batch of a step to its end."""
        return _FLOAT * self.shape.parameters / (self.ranks if self.zero >= 2 else self._share)

    def optimiser(self) -> float:
        """AdamW's two moments; with ZeRO also the weights that it updates, which it copies to those of the model."""
        each = self.state_bytes - 2 * _FLOAT + (_FLOAT if self.zero else 0)
        return each * self.shape.parameters / (self.ranks if self.zero else self._share)

    def frozen_models(self) -> float:
        """Reference and reward model."""
        return self.frozen_bytes * self.frozen / self._share

    def buckets(self) -> float:
        """DDP's memory for gradients, in which they are summed over the ranks. It stays when they are given up, and the
        next step's lie elsewhere until their last pass. ZeRO has one of limited size.
        """
        if self.zero:
            return _FLOAT * min(_ZERO_BUCKET, self.shape.parameters)
        return 0.0 if self.sharded or self.ranks == 1 else _FLOAT * self.shape.parameters

    def held(self) -> float:
        """Between two batches."""
        return self.weights() + self.optimiser() + self.frozen_models() + self.buckets()

    # Weights of other ranks

    @property
    def _casts_gathered(self) -> bool:
        """Whether weights are cast before they are gathered."""
        return self.bf16 and self._share > 1 and not self.zero

    def _whole(self, parameters: float) -> float:
        """Gathered in the type to compute with, or by ZeRO in float32."""
        return (_BFLOAT if self._casts_gathered else _FLOAT) * parameters if self._share > 1 else 0.0

    def outside_whole(self) -> float:
        """The head, while it computes, or the embedding: each by itself, or, if they are one, all through a pass."""
        return self._whole(self.shape.embedding)

    def tied_whole(self) -> float:
        """What of it is there while blocks compute."""
        return self.outside_whole() if self.shape.tied else 0.0

    def block_whole(self) -> float:
        """One block."""
        return self._whole(self.shape.one_block)

    # Copies of weights to compute with

    def _copies(self, parameters: float) -> float:
        """Of weights that are float32 where they are needed."""
        return _BFLOAT * parameters if self.bf16 and not self._casts_gathered else 0.0

    def cast_weights(self) -> float:
        """Autocast keeps its copy of every matrix of the policy until the forward pass ends, gathered or not."""
        return self._copies(self.shape.layers * self.shape.one_block)

    def saved_casts(self) -> float:
        """And the backward pass needs them, too; with checkpointing, blocks cast theirs again."""
        return 0.0 if self.recompute else self.cast_weights()

    def head_cast(self) -> float:
        """The head's copy, which is made anew for each pass."""
        return self._copies(self.shape.embedding)

    # Activations

    @property
    def _computing(self) -> str:
        return "float32" if not self.bf16 else "bfloat16" if self._casts_gathered else "autocast"

    def _tokens(self, sizes: Pass) -> float:
        """This rank's tokens of a pass."""
        return sizes.tokens / self.context

    def _states(self, sizes: Pass) -> float:
        """The residual stream."""
        return (_BFLOAT if self._computing == "bfloat16" else _FLOAT) * self._tokens(sizes) * self.shape.hidden

    def block_saved(self) -> float:
        """What one block keeps for its backward pass: of scores, their softmax in float32, that in 16 bits if these are
        computed with, and what the soft cap returns.
        """
        number = _BFLOAT if self.bf16 else _FLOAT
        each = _FLOAT + (_BFLOAT if self.bf16 else 0) + (number if self.shape.capped else 0)
        return self._of_block(_SAVED[self.shape.block, self._computing]) + each * self._scores(self.update)

    def _scores(self, sizes: Pass) -> float:
        """Of one block, padding counted."""
        return self._tokens(sizes) * self.shape.scores

    def copied_keys(self, sizes: Pass) -> float:
        """Keys and values of all branches, in 16 bits, which one block copies for its attention."""
        return 2 * _BFLOAT * sizes.keys / self.context * self.shape.kv_width

    def key_gradients(self) -> float:
        """Gradients of these copies; the kernel first makes those of every query head."""
        shape = self.shape
        heads = (shape.query_width or shape.hidden) / shape.kv_width
        return self.copied_keys(self.update) * (1 + (heads if heads > 1 else 0))

    def products(self) -> float:
        """What of one block is kept although it is computed again: what attention and matrix products return."""
        if self.recompute != "selective":
            return 0.0
        numbers = self._of_block(_PRODUCTS[self.shape.block]) + self._scores(self.update)
        return (_BFLOAT if self.bf16 else _FLOAT) * numbers

    def _of_block(self, each: tuple[int, int, int]) -> float:
        """So many of each number of the hidden state, of keys, and of the feed-forward layer."""
        hidden, kv, feed_forward = each
        shape = self.shape
        each_token = hidden * shape.hidden + kv * shape.kv_width + feed_forward * shape.feed_forward
        return self._tokens(self.update) * each_token

    def saved(self) -> float:
        """What all blocks keep: everything, or only their inputs and products; and three more states at the end."""
        per_block = self._states(self.update) + self.products() if self.recompute else self.block_saved()
        return self.shape.layers * per_block + 3 * self._states(self.update)

    def block_passing(self, sizes: Pass) -> float:
        """What a block holds at once, without gradient: four states, and three products of its feed-forward layer, or
        the scores of attention before and after a step, and as float32, or the keys that it copies.
        """
        product = (_BFLOAT if self.bf16 else _FLOAT) * self._tokens(sizes) * self.shape.feed_forward
        return 4 * self._states(sizes) + max(3 * product, 3 * _FLOAT * self._scores(sizes), self.copied_keys(sizes))

    # The backward pass of one block

    def block_again(self) -> float:
        """The last block but one: its weights, those of the next and the gradients of the one before; what it computes
        again, or else what the last block has given up; the gradient of its largest matrix, and of what is passed on
        within its feed-forward layer, or of scores; or the copied keys and their gradients, when that layer has given
        up what it kept.
        """
        shape, matrix = self.shape, self.shape.hidden * self.shape.feed_forward
        passed_on = 2 * (_BFLOAT if self.bf16 else _FLOAT) * self._tokens(self.update) * shape.feed_forward
        kept = _PRODUCTS[shape.block][2] * (_BFLOAT if self.bf16 else _FLOAT) if self.recompute == "selective" else 0
        freed = self._of_block((0, 0, _SAVED[shape.block, self._computing][2] - kept))
        copied = self.copied_keys(self.update) + self.key_gradients() - freed
        passed_on = max(passed_on, 2 * _FLOAT * self._scores(self.update), copied)
        casts = self._copies(shape.one_block - matrix)
        if not self.recompute:
            casts = self._copies((shape.layers - 1) * shape.one_block - matrix)
        again = self.block_saved() - self.products() if self.recompute else -self.block_saved()
        return 3 * self.block_whole() + casts + again + _FLOAT * matrix + passed_on

    # Logits

    def chunk(self, sizes: Pass) -> float:
        """Float32 logits of the tokens that the head computes at a time: see models/head.py."""
        rows = max(_LEAST_ROWS, _CHUNK_BYTES // (_FLOAT * self.shape.vocabulary))
        return _FLOAT * min(sizes.sampled, self._tokens(sizes), rows) * self.shape.vocabulary

    def head_pass(self, sizes: Pass) -> float:
        """The head's weights to compute with, and three tensors as large as a chunk: logits, their log-softmax, and
        what entropies need.
        """
        return self.head_cast() + 3 * self.chunk(sizes)

    # Moments

    def annotating(self) -> dict[str, float]:
        """Bytes at each moment of annotation that may be its peak."""
        outside, tied, casts = self.outside_whole(), self.tied_whole(), self.cast_weights()
        return {
            # What a weight is copied from is freed only after the next has been gathered.
            "first block": 2 * (outside + self.block_whole()) + self._states(self.annotate),
            "last block": casts + tied + 2 * self.block_whole() + self.block_passing(self.annotate),
            "head": casts + 2 * outside + self.head_pass(self.annotate) + 2 * self._states(self.annotate),
        }

    def updating(self) -> dict[str, float]:
        """The same of an update, without what is held anyway; gradients are held from the first micro-batch on."""
        outside, tied, casts = self.outside_whole(), self.tied_whole(), self.saved_casts()
        return {
            "first block": 2 * (outside + self.block_whole()) + self._states(self.update),
            "head": self.cast_weights() + 2 * outside + self.saved() + self.head_pass(self.update),
            # The sum of the chunks' gradients, float32, and that of one chunk.
            "head's gradient": casts
            + 2 * outside
            + self.saved()
            + _FLOAT * self.shape.embedding
            + self.head_cast()
            + self.head_pass(self.update),
            "block": 2 * tied + self.block_again() + self.saved(),  # if tied, weights and gradient
            # A gradient, whole, in a row for the sum, and summed.
            "end": 2 * outside + outside / self._share,
        }

    def publishing(self) -> float:
        """The largest tensor, rounded for the generators: whole, and the share of it that it is gathered from.

        Others may be on their way off the device then, in no more room than gradients take, which nobody holds.
        """
        share = self.shape.embedding / self._share if self._share > 1 else 0.0
        return _BFLOAT * (self.shape.embedding + share)

    # Phases

    def phases(self) -> dict[str, float]:
        """Peak of each phase."""
        held = self.held()
        return {
            "annotate": held + max(self.annotating().values()),
            "update": held + self.gradients() + max(self.updating().values()),
            "publish": held + self.publishing(),
        }

    def peak(self) -> float:
        """The most of all phases."""
        return max(self.phases().values())
