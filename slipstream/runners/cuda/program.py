"""A step on the device: the functions that are captured. No line here asks the device anything.

Everything they read and write lies in buffers that never move; sizes come from the step's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from slipstream.runners.cuda.buffers import StepBuffers
from slipstream.runners.cuda.constrained import MaskBuffers
from slipstream.runners.cuda.drafter import DraftPass
from slipstream.runners.cuda.kernels import step as kernels
from slipstream.runners.cuda.kernels.gather import gather_rows
from slipstream.runners.cuda.kernels.norm import rms_norm
from slipstream.runners.cuda.kernels.sampling.masks import apply_masks
from slipstream.runners.cuda.kernels.sampling.penalties import add_bias, penalise
from slipstream.runners.cuda.kernels.sampling.sample import choose
from slipstream.runners.cuda.kernels.sampling.truncate import truncate
from slipstream.runners.cuda.layout import Layout, StepShape
from slipstream.runners.cuda.report import StepReport
from slipstream.runners.cuda.rows import DeviceRows
from slipstream.runners.drafter import Drafter
from slipstream.runners.torch.models.decoder import Decoder
from slipstream.runners.torch.models.layers import Layers
from slipstream.runners.torch.sampling.logprobs import hidden_logprobs, log_probabilities
from slipstream.sampling.params import MAX_TOP_LOGPROBS

CudaDrafter = Drafter[StepShape, DraftPass, None]


@dataclass(frozen=True, slots=True)
class CudaProgram:
    decoder: Decoder
    drafter: CudaDrafter | None
    rows: DeviceRows
    buffers: StepBuffers
    masks: MaskBuffers
    report: StepReport
    vocab_size: int
    draft_vocab: int  # drafts come from the first so many tokens
    simulated: Tensor | None = None  # float32 [depth]: acceptance rates instead of a comparison, for benchmarks

    @property
    def depth(self) -> int:
        return self.report.depth

    def with_layers(self, layers: Layers) -> CudaProgram:
        """The same program over other layers of the target model."""
        return replace(self, decoder=replace(self.decoder, layers=layers))

    def forward(self, shape: StepShape) -> None:
        """A step's first half: all rows through the target model. Captured apart: it serves every way of sampling."""
        buffers, batch = self.buffers, self.buffers.step(shape)
        inputs = buffers.inputs(shape)
        layout = (inputs.row_feed, inputs.token_rows, inputs.sample_flat)
        kernels.begin(self.rows.state, batch, *layout, *buffers.samples(shape.num_samples))
        norm = self.decoder.norm
        body = self.decoder.body(self.decoder.embed(batch.tokens), batch)
        rms_norm(body, norm.weight, norm.eps, out=buffers.hidden(shape))

    def verify(self, shape: StepShape) -> None:
        """The other half: verdict and commit of all rows, and the head's share of the tokens unless it is fed apart."""
        buffers, inputs = self.buffers, self.buffers.inputs(shape)
        hidden = buffers.hidden(shape)
        sampling = gather_rows(hidden, inputs.sample_flat.clamp(min=0)) if shape.has_prompts else hidden
        samples = self._sample(self.decoder.unembed(sampling), shape)
        max_accepted = self.masks.max_accepted if shape.masked else None
        outputs = (buffers.row_last(shape), self.report)
        kernels.commit(
            self.rows.state, buffers.step(shape), samples, inputs.row_samples, *outputs, self.simulated, max_accepted
        )
        if shape.feeds_head and not shape.feeds_head_apart:
            self.committed(shape)

    def committed(self, shape: StepShape) -> None:
        assert self.drafter is not None
        self.drafter.committed(shape)

    def propose(self, rows: DraftPass) -> None:
        assert self.drafter is not None
        self.drafter.propose(rows)

    def report_drafts(self, shape: StepShape) -> None:
        if self.depth:
            kernels.report_drafts(self.rows.state, self.buffers.step(shape), self.report)

    def logprobs(self, count: int) -> None:
        """The model's own opinion of the tokens that follow: a prompt's or, committed by now, the samples."""
        hidden, slots, positions = self.buffers.logprob_sources(count)
        tokens = self.rows.tokens[slots, positions + 1]
        values = hidden_logprobs(hidden, self._log_probabilities, self.vocab_size, tokens, MAX_TOP_LOGPROBS)
        self.buffers.logprob_values(count, self.vocab_size).copy_(values)

    def step(self, layout: Layout) -> None:
        """All parts of a step in one."""
        shape = layout.shape
        self.forward(shape.target)
        self.verify(shape)
        if shape.feeds_head_apart:
            self.committed(shape)
        for ahead, num_rows in enumerate(layout.pass_rows):
            self.propose(DraftPass(ahead, num_rows, shape.context))
        self.report_drafts(shape)

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        return log_probabilities(self.decoder.unembed(hidden))

    def _sample(self, logits: Tensor, shape: StepShape) -> Tensor:
        rows, (slots, index) = self.rows, self.buffers.samples(shape.num_samples)
        if not shape.plain:
            fields = (rows.float_field(name) for name in ("repetition", "presence", "frequency"))
            penalise(logits, slots, index, rows.tokens, rows.int_field("num_prompt"), *fields)
            add_bias(logits, slots, rows.bias_tokens, rows.bias_values, rows.int_field("num_bias"))
        if shape.masked:
            apply_masks(logits, slots, self.masks.index[: shape.num_samples], self.masks.masks)
        if not shape.plain:
            truncation = (rows.int_field("top_k"), rows.float_field("top_p"), rows.float_field("min_p"))
            truncate(logits, slots, rows.float_field("inv_temperature"), *truncation)
        return choose(logits, slots, index, *self.rows.noise)
