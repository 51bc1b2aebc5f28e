"""Decoding as one replayed graph a step: forward, logits processors, token choice and stopping, all on the device.

`generate` hands its prepared arguments to `graph_decode` (its `custom_generate` protocol). What cannot be captured
goes to the method that `generate` would have called, and a log line says why. Tokens are those of `generate`; the
check whether every row has finished runs one step behind, so that the host never waits for the step it just launched.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .cache import PagedCache
from .cache.device_state import DeviceState
from .cache.layer import PagedLayer
from .compat import CACHE_ARGUMENT, decoder_only_output, decoding_method
from .log import warn_once

# Processors that are functions of the logits, or of the tokens in a way that tolerates a repeated first token in the
# place of those to come.
CAPTURED_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "RepetitionPenaltyLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
    if hasattr(logits_process, name)
)
# Steps for which blocks are reserved at first; doubled each time they are used up, at the price of a new capture.
FIRST_RESERVATION = 512


class GraphDecoder:
    """Captured decoding for one model; kept by `enable(model, decode="graph")` between calls of `generate`."""

    def __init__(self, model: Any, compile_forward: bool = True):
        self._model = weakref.ref(model)
        self.compile_forward = compile_forward
        self._compiled: Any = None

    def __call__(
        self, model, input_ids, logits_processor, stopping_criteria, generation_config, streamer=None, **kwargs
    ):
        """The decoding method that `generate` calls; see `transformers.GenerationMixin._sample` for the arguments."""
        if streamer is not None:
            if generation_config.num_beams > 1:
                raise ValueError(
                    f"streamer cannot be used with num_beams={generation_config.num_beams}: set num_beams=1."
                )
            streamer.put(input_ids.cpu())
        reason = why_not(model, logits_processor, stopping_criteria, generation_config, kwargs)
        if reason is not None:
            warn_once(f"decode='graph' does not run this call: {reason}; plain generate does")
            method = decoding_method(model, generation_config)
            if streamer is not None:
                kwargs["streamer"] = streamer
            return method(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        kwargs.pop("synced_gpus", None)
        run = _Run(self, model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, kwargs)
        return run.decode()

    def is_of(self, model: Any) -> bool:
        return self._model() is model

    def __reduce__(self) -> Any:
        """Copied and pickled without the model and what was compiled of it: see `is_of`."""
        return _decoder_of_no_model, (self.compile_forward,)

    def forward(self) -> Any:
        model = self._model()
        if not self.compile_forward:
            return model.forward
        if self._compiled is None:
            self._compiled = torch.compile(model.forward, fullgraph=True, dynamic=False)
        return self._compiled


def _decoder_of_no_model(compile_forward: bool) -> GraphDecoder:
    decoder = GraphDecoder.__new__(GraphDecoder)
    decoder._model, decoder._compiled, decoder.compile_forward = lambda: None, None, compile_forward
    return decoder


def why_not(model, logits_processor, stopping_criteria, generation_config, kwargs: dict[str, Any]) -> str | None:
    """None if the call can be captured, else the reason in words."""
    cache = kwargs.get(CACHE_ARGUMENT)
    if not isinstance(cache, PagedCache):
        return "the cache is not a PagedCache"
    if any(type(layer) is not PagedLayer for layer in cache.layers):
        return "some layers of the cache are not paged"
    if generation_config.num_beams > 1:
        return f"num_beams={generation_config.num_beams}"
    if generation_config.prompt_lookup_num_tokens is not None:
        return "assisted decoding"
    if kwargs.get("inputs_embeds") is not None:
        return "inputs_embeds"
    positions = kwargs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return f"position_ids of {positions.dim()} dimensions"
    if kwargs.get("synced_gpus"):
        return "synced_gpus=True"
    if len(set(getattr(model, "hf_device_map", {"": model.device}).values())) > 1:
        return "the model is spread over several devices"
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            return f"{name}=True"
    for processor in logits_processor:
        if type(processor) not in CAPTURED_PROCESSORS:
            return f"logits processor {type(processor).__name__}"
        if getattr(processor, "prompt_ignore_length", None) is not None:  # it would count the places to come
            return f"logits processor {type(processor).__name__} with prompt_ignore_length"
    for criterion in stopping_criteria:
        if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria):
            return f"stopping criterion {type(criterion).__name__}"
    if stopping_criteria.max_length is None:
        return "no maximum length"
    return None


class _Run:
    """One call of `generate`."""

    def __init__(self, decoder, model, input_ids, processors, criteria, generation_config, streamer, model_kwargs):
        self.decoder, self.model, self.processors = decoder, model, processors
        self.config, self.streamer, self.model_kwargs = generation_config, streamer, model_kwargs
        self.cache: PagedCache = model_kwargs[CACHE_ARGUMENT]
        self.device = input_ids.device
        self.rows, self.prompt_length = input_ids.shape
        self.max_length = criteria.max_length
        self.eos = next((c.eos_token_id.to(self.device) for c in criteria if isinstance(c, EosTokenCriteria)), None)
        self.pad = generation_config._pad_token_tensor
        self.captures = self.device.type == "cuda"
        # What a step reads and writes, at fixed addresses. Places to come hold the row's first token.
        self.sequence = input_ids[:, :1].repeat(1, max(self.max_length, self.prompt_length))
        self.sequence[:, : self.prompt_length] = input_ids
        self.place = torch.full((1,), self.prompt_length, dtype=torch.int64, device=self.device)
        self.shift = torch.zeros(self.rows, dtype=torch.int64, device=self.device)  # from lengths to positions
        self.token = torch.zeros(self.rows, dtype=torch.int64, device=self.device)
        self.unfinished = torch.ones(self.rows, dtype=torch.int64, device=self.device)
        self.all_finished = torch.zeros((), dtype=torch.bool, device=self.device)

    @torch.no_grad()
    def decode(self):
        outputs = self.model._prefill(
            self.sequence[:, : self.prompt_length], self.config, dict(self.model_kwargs), is_first_iteration=True
        )
        self._choose(outputs.logits[:, -1])
        del outputs
        positions = self.model_kwargs.get("position_ids")
        if positions is not None:  # they go on where the caller's end, which need not be at the number of tokens
            lengths = torch.tensor(self.cache.sequences.lengths, device=self.device)
            self.shift.copy_(positions[:, -1].to(self.device) + 1 - lengths)
        steps, last = 1, self.max_length - self.prompt_length
        watcher = _Watcher(self)
        watcher.look()
        while steps < last and not watcher.stopped:
            if self._must_run_eagerly():
                # Such a step gives back what lies behind the windows, so that it cannot be taken back.
                watcher.catch_up()
                if watcher.stopped:
                    break
                self._eager_step()
                watcher.look()
                steps += 1
            else:
                steps += self._captured_steps(last - steps, watcher)
        unneeded = watcher.finish()
        length = self.prompt_length + steps - unneeded
        if unneeded:
            self.cache.crop(-unneeded)
        if self.streamer is not None:
            self.streamer.end()
        sequences = self.sequence[:, :length].clone()
        if self.config.return_dict_in_generate:
            return decoder_only_output(sequences, self.cache)
        return sequences

    # One step -------------------------------------------------------------------------------------------------------

    def _choose(self, logits: torch.Tensor) -> None:
        """The next token of each row, put where it belongs; device operations only."""
        scores = self.processors(self.sequence, logits.to(torch.float32))
        if self.config.do_sample:
            token = torch.multinomial(torch.softmax(scores, -1), num_samples=1).squeeze(1)
        else:
            token = scores.argmax(-1)
        if self.eos is not None:
            token = token * self.unfinished + self.pad * (1 - self.unfinished)
            self.unfinished.mul_((~torch.isin(token, self.eos)).to(torch.int64))
            self.all_finished.copy_(self.unfinished.max() == 0)
        self.token.copy_(token)
        self.sequence.index_copy_(1, self.place, token.unsqueeze(1))
        self.place.add_(1)

    def _inputs(self, lengths: torch.Tensor) -> dict[str, Any]:
        return {
            "input_ids": self.token.unsqueeze(1),
            "position_ids": (lengths + self.shift).unsqueeze(1),
            CACHE_ARGUMENT: self.cache,
            "use_cache": True,
        }

    def _must_run_eagerly(self) -> bool:
        """An eager step copies shared blocks and goes on fitting the keys' factors; a captured one could do neither."""
        sequences = self.cache.sequences
        return sequences.shares_next_block or any(not layer.storage.is_fitted for layer in self.cache.layers)

    def _eager_step(self) -> None:
        lengths = torch.tensor(self.cache.sequences.lengths, device=self.device)
        self._choose(self.model(**self._inputs(lengths)).logits[:, -1])

    def _device_step(self, state: DeviceState, forward: Any) -> None:
        state.advance()
        self._choose(forward(**self._inputs(state.seq_lens.to(torch.int64) - 1)).logits[:, -1])

    def _captured_steps(self, remaining: int, watcher: _Watcher) -> int:
        """Steps until all rows finish, `remaining` are done or the reservation is used up; returns how many ran."""
        sequences = self.cache.sequences
        steps = min(remaining, max(FIRST_RESERVATION, sequences.columns))
        self.cache.reserve(steps)
        state = DeviceState(sequences, max(sequences.lengths) + remaining, self.device)
        sequences.device_state = state
        try:
            forward = self.decoder.forward()
            graph, done = None, 0
            for _ in range(steps):
                sequences.enter_together()
                state.follow(sequences)
                try:
                    if graph is not None:
                        graph.replay()
                    else:
                        self._device_step(state, forward)  # compiles, and warms up what the capture needs
                        if self.captures:
                            graph = self._capture(state, forward)
                except BaseException:
                    sequences.crop(1)  # not every layer has stored this step's tokens
                    raise
                done += 1
                watcher.look()
                if watcher.stopped:
                    break
            return done
        finally:
            sequences.device_state = None

    def _capture(self, state: DeviceState, forward: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._device_step(state, forward)
        return graph


class _Watcher:
    """Reads whether every row has finished, and the tokens for a streamer, one step behind the device."""

    def __init__(self, run: _Run):
        self.run = run
        self.stopped = False
        self._pending: list[tuple[torch.Tensor, torch.Tensor | None, torch.cuda.Event | None]] = []

    def look(self) -> None:
        """After a step was launched: learn whether the step before it had finished all rows."""
        run = self.run
        if run.eos is None and run.streamer is None:
            return
        flag, token, event = run.all_finished, run.token if run.streamer is not None else None, None
        if run.captures:
            flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            if token is not None:
                token = torch.empty(run.rows, dtype=torch.int64, pin_memory=True).copy_(token, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            flag, token = flag.clone(), None if token is None else token.clone()
        self._pending.append((flag, token, event))
        if len(self._pending) > (1 if run.captures else 0):
            self._read()

    def catch_up(self) -> None:
        """Read what is pending, waiting for the device."""
        while self._pending and not self.stopped:
            self._read()

    def finish(self) -> int:
        """Steps that ran after every row had finished: their tokens and cache entries are to be dropped."""
        unneeded = 0
        while self._pending:
            if self.stopped:
                unneeded += 1
                self._pending.pop()
            else:
                self._read()
        return unneeded

    def _read(self) -> None:
        flag, token, event = self._pending.pop(0)
        if event is not None:
            event.synchronize()
        if token is not None:
            self.run.streamer.put(token.cpu())
        self.stopped = bool(flag)
