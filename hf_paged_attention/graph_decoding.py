"""Decoding as one replayed graph a step: forward, logits processors, token choice and stopping, all on the device.

`generate` hands its prepared arguments to `graph_decode` (its `custom_generate` protocol). What cannot be captured
goes to the method that `generate` would have called, and a log line says why. Tokens are those of `generate`; the
check whether every row has finished runs one step behind, so that the host never waits for the step it just launched.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .arena import ArenaKeeper
from .cache import PagedCache
from .cache.table import to_device
from .captured_step import CapturedStep, model_state, must_run_eagerly
from .compat import CACHE_ARGUMENT, decoder_only_output, decoding_method
from .compiled_forward import CompiledForward, why_not_captured
from .kernels.integers import next_power_of_2
from .log import warn_once

# Processors that are functions of the logits, or of the tokens in a way that tolerates the prompt's last token in the
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


class GraphDecoder:
    """Captured decoding for one model; kept by `enable(model, decode="graph")` between calls of `generate`."""

    def __init__(self, forward: CompiledForward, arenas: ArenaKeeper):
        self.forward = forward
        self.arenas = arenas

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


def why_not(model, logits_processor, stopping_criteria, generation_config, kwargs: dict[str, Any]) -> str | None:
    """None if the call can be captured, else the reason in words."""
    reason = why_not_captured(model, kwargs.get(CACHE_ARGUMENT), generation_config)
    if reason is not None:
        return reason
    if kwargs.get("inputs_embeds") is not None:
        return "inputs_embeds"
    positions = kwargs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return f"position_ids of {positions.dim()} dimensions"
    if kwargs.get("synced_gpus"):
        return "synced_gpus=True"
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            return f"{name}=True"
    for processor in logits_processor:
        if type(processor) not in CAPTURED_PROCESSORS:
            return f"logits processor {type(processor).__name__}"
        # A number may leave the whole prompt out, and then the places to come would count. A tensor is what generate
        # itself gives from Transformers 5.2x on: the padding of each row.
        if isinstance(getattr(processor, "prompt_ignore_length", None), int):
            return f"logits processor {type(processor).__name__} with prompt_ignore_length"
    for criterion in stopping_criteria:
        if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria):
            return f"stopping criterion {type(criterion).__name__}"
    if stopping_criteria.max_length is None:
        return "no maximum length"
    return None


_serials = itertools.count()


class Tokens:
    """The tokens of `rows` rows of at most `width`, and what a step chooses the next ones by, at fixed addresses."""

    def __init__(self, rows: int, width: int, device: torch.device, processors: Any, do_sample: bool, eos: Any):
        self.serial = next(_serials)
        self.processors, self.do_sample, self.eos = processors, do_sample, eos
        self.sequence = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.shift = torch.zeros(rows, dtype=torch.int64, device=device)  # from lengths to positions
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.unfinished = torch.ones(rows, dtype=torch.int64, device=device)
        self.all_finished = torch.zeros((), dtype=torch.bool, device=device)
        self.pad = torch.zeros((), dtype=torch.int64, device=device)

    def start(self, input_ids: torch.Tensor, pad: torch.Tensor | None) -> None:
        """Begin with the prompts `[rows, T]`. Places to come hold the prompt's last token."""
        self.sequence.copy_(input_ids[:, -1:].expand_as(self.sequence))
        self.sequence[:, : input_ids.shape[1]] = input_ids
        self.place.fill_(input_ids.shape[1])
        self.shift.zero_()
        self.unfinished.fill_(1)
        self.all_finished.fill_(False)
        if pad is not None:
            self.pad.copy_(pad)

    def choose(self, logits: torch.Tensor) -> None:
        """The next token of each row, put where it belongs; device operations only."""
        scores = self.processors(self.sequence, logits.to(torch.float32))
        if self.do_sample:
            # torch.multinomial's own way to one sample, without its check of the probabilities, which makes the host
            # wait: the same tokens for the same seed.
            probabilities = torch.softmax(scores, -1)
            token = (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)
        else:
            token = scores.argmax(-1)
        if self.eos is not None:
            token = token * self.unfinished + self.pad * (1 - self.unfinished)
            # Not torch.isin, which sorts where ids are many and rows few, and then makes the host wait.
            ended = (token.unsqueeze(1) == self.eos.flatten()).any(1)
            self.unfinished.mul_((~ended).to(torch.int64))
            self.all_finished.copy_(self.unfinished.max() == 0)
        self.token.copy_(token)
        self.sequence.index_copy_(1, self.place, token.unsqueeze(1))
        self.place.add_(1)


def settings_of(processors: Any, do_sample: bool, eos: torch.Tensor | None) -> Hashable:
    """What a captured step has kept of how tokens are chosen, by value."""
    parts: list[Hashable] = [do_sample, _frozen(eos)]
    for processor in processors:
        parts.append((type(processor), *((name, _frozen(value)) for name, value in sorted(vars(processor).items()))))
    return tuple(parts)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), tuple(value.flatten().tolist()))
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    return value if isinstance(value, Hashable) else id(value)


class _Run:
    """One call of `generate`."""

    def __init__(self, decoder, model, input_ids, processors, criteria, generation_config, streamer, model_kwargs):
        self.decoder, self.model, self.processors = decoder, model, processors
        self.config, self.streamer, self.model_kwargs = generation_config, streamer, model_kwargs
        self.cache: PagedCache = model_kwargs[CACHE_ARGUMENT]
        self.prompt = input_ids
        self.device = input_ids.device
        self.rows, self.prompt_length = input_ids.shape
        self.max_length = criteria.max_length
        self.eos = next((c.eos_token_id.to(self.device) for c in criteria if isinstance(c, EosTokenCriteria)), None)
        self.captures = self.device.type == "cuda"
        self.tokens: Tokens | None = None

    @torch.no_grad()
    def decode(self):
        outputs = self.model._prefill(self.prompt, self.config, dict(self.model_kwargs), is_first_iteration=True)
        logits = outputs.logits[:, -1]
        del outputs
        arena = self.decoder.arenas.of(self.cache)
        tokens = self._tokens_of(arena)
        tokens.start(self.prompt, self.config._pad_token_tensor)
        tokens.choose(logits)
        del logits
        positions = self.model_kwargs.get("position_ids")
        if positions is not None:  # they go on where the caller's end, which need not be at the number of tokens
            tokens.shift.copy_(positions[:, -1].to(self.device) + 1 - self._lengths())
        step = arena.parts.setdefault("generate step", CapturedStep(self.captures))
        steps, last = 1, self.max_length - self.prompt_length
        watcher = _Watcher(self)
        watcher.look()
        while steps < last and not watcher.stopped:
            if must_run_eagerly(self.cache):
                # Such a step gives back what lies behind the windows, so that it cannot be taken back.
                watcher.catch_up()
                if watcher.stopped:
                    break
                self._eager_step()
                watcher.look()
                steps += 1
            else:
                steps += self._captured_steps(step, last - steps, watcher)
        unneeded = watcher.finish()
        length = self.prompt_length + steps - unneeded
        if unneeded:
            self.cache.crop(-unneeded)
        if self.streamer is not None:
            self.streamer.end()
        sequences = tokens.sequence[:, :length].clone()
        self.decoder.arenas.hold(arena, self.cache)
        if self.config.return_dict_in_generate:
            return decoder_only_output(sequences, self.cache)
        return sequences

    def _tokens_of(self, arena: Any) -> Tokens:
        """Those of an earlier call that chose its tokens in the same way, if there is room in them."""
        width = max(self.max_length, self.prompt_length)
        settings = settings_of(self.processors, self.config.do_sample, self.eos)
        known, tokens = arena.parts.get("tokens", (None, None))
        if known != settings or tokens.sequence.shape[1] < width or tokens.sequence.device != self.device:
            do_sample = self.config.do_sample
            tokens = Tokens(self.rows, next_power_of_2(width), self.device, self.processors, do_sample, self.eos)
            arena.parts["tokens"] = (settings, tokens)
        self.tokens = tokens
        return tokens

    def _lengths(self) -> torch.Tensor:
        return to_device(torch.tensor(self.cache.sequences.lengths), self.device)

    # One step -------------------------------------------------------------------------------------------------------

    def _inputs(self, lengths: torch.Tensor) -> dict[str, Any]:
        return {
            "input_ids": self.tokens.token.unsqueeze(1),
            "position_ids": (lengths + self.tokens.shift).unsqueeze(1),
            CACHE_ARGUMENT: self.cache,
            # As generate's own loop calls the forward, so that both loops share what was compiled.
            "use_cache": True,
            "return_dict": True,
        }

    def _eager_step(self) -> None:
        self.tokens.choose(self.model(**self._inputs(self._lengths())).logits[:, -1])

    def _captured_steps(self, step: CapturedStep, remaining: int, watcher: _Watcher) -> int:
        """Steps until all rows finish or `remaining` are done; returns how many ran."""
        longest = max(self.cache.sequences.lengths) + remaining
        step.prepare(self.cache, longest, (self.tokens.serial, model_state(self.model)))
        forward = self.decoder.forward.get(self.model, self.rows)

        def work() -> None:
            step.state.advance()
            self.tokens.choose(forward(**self._inputs(step.state.positions)).logits[:, -1])

        done = 0
        while done < remaining and not watcher.stopped:
            step.run(self.cache, work)
            watcher.look()
            done += 1
        return done


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
        tokens = run.tokens
        flag, token, event = tokens.all_finished, tokens.token if run.streamer is not None else None, None
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
