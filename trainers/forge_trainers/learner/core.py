"""The learner of one rank, without Monarch: GRPO steps on TorchTitan's parts.

In: `EpisodeBatch`es, the whole batch on every rank. Out: metrics, log-probabilities, weights. Waits for the other
ranks in collectives.

Axes: T tokens of a batch, S loss tokens of a row, D hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from forge_agents.models import resolve as models
from forge_agents.types import EpisodeBatch
from forge_trainers.batch.layout import Microbatch, Row, lay_out
from forge_trainers.batch.packing import check_batch, minibatches
from forge_trainers.learner import checkpoint, lora, titan
from forge_trainers.learner.adamw import build_optimizers
from forge_trainers.learner.attention import plan_attention
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.measures import averaged, flops_per_step, memory, peak_flops, ratio_quantiles
from forge_trainers.learner.model import Built, Ranks, build_model, free_unsharded, join_ranks, sync_gradients
from forge_trainers.learner.prefixes import plan_prefixes
from forge_trainers.learner.rates import learning_rate, with_rate
from forge_trainers.losses.correction import loss_columns, needed_samples
from forge_trainers.losses.policy_loss import PolicyLoss, logprobs_of


@dataclass(slots=True, kw_only=True)
class _Minibatch:
    """Samples of one optimizer step, laid out for this rank, and what is computed of them once per batch."""

    batch: EpisodeBatch
    needed_n: torch.Tensor
    """bool [n], samples that are computed."""
    computed_T: torch.Tensor
    """bool [T], loss tokens that are computed."""
    num_loss_tokens: float
    num_computed: float
    microbatches: Sequence[Microbatch]
    facts: dict[str, float]
    log_ratio_T: torch.Tensor | None = None
    """float32 [T], learner's minus sampler's log-probabilities in the latest optimizer step, each token on one rank;
    None before any."""
    old_T: torch.Tensor | None = None
    """float32 [T], the learner's log-probabilities at the start of the batch; None where the loss needs none."""
    reference_T: torch.Tensor | None = None
    """float32 [T], log-probabilities of the reference model, once they are computed."""


class LearnerCore:
    """Model, optimiser and schedule of one rank.

    Every method is a collective: all ranks call it with the same arguments. It runs in the calling thread and blocks.
    """

    def __init__(self, config: LearnerConfig, *, base: LearnerCore | None = None) -> None:
        """Build the model and load the weights in `config.model`.

        Args:
            config: How to learn.
            base: A learner of another adapter of the same shape, whose model this one shares; None builds one.

        Raises:
            ModelNotFoundError: Model files are missing or half written.
            ValueError: The model is not supported, or the parallel degrees do not fit it or the number of ranks.
        """
        config = config.with_memory()
        if not config.model:
            raise ValueError("model is empty; give the folder of a Hugging Face model")
        self.config = config = with_rate(config)
        self._share = titan.DEVICE_TYPE == "cpu" if config.share_prefixes is None else config.share_prefixes
        self._ranks: Ranks = join_ranks(config) if base is None else base._ranks
        self._built: Built = build_model(config, self._ranks) if base is None else base._built
        self.model: Any = self._built.model
        self._adapter = None
        if config.lora is not None:
            beside = None if base is None else base._adapter
            self._adapter = lora.Adapter(self.model, seed=config.seed, beside=beside)
        self._reference = None  # the start model: this one without its adapter, else a frozen copy
        if config.kl_coef > 0:
            alone = self._adapter is None
            self._reference = build_model(config, self._ranks, trainable=False).model if alone else self.model
        self._loss = titan.ChunkedLossWrapper.Config(num_chunks=1).build()
        self._loss.loss_fn = PolicyLoss(config.loss_settings)  # any callable will do
        self._loss.set_lm_head(self.model.lm_head)
        self._optimizers = build_optimizers(config, self.model)
        if self._built.copies is not None:
            checkpoint.optimizer_state(self._optimizers)  # moments have their place before activations come and go
        self._total_steps: int | None = None
        self._writer = checkpoint.Writer(self._ranks.use_device)
        self._models: list[Any] = [self.model] if base is None else []
        """That this learner built; others share them."""
        if self._reference is not None and self._reference is not self.model:
            self._models.append(self._reference)
        self._parked: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """What has left the device: where it was, and its bytes."""
        self.version = 0
        """Number of training steps taken, one per batch; the version of the weights."""

    @property
    def max_sample_tokens(self) -> int:
        """Tokens of the longest sample that fits: the setting, or less where the model's context is shorter."""
        return self._built.max_seq_len

    def set_total_steps(self, total: int) -> None:
        """Say how many optimiser steps the run has, those already taken included, for a learning rate that falls.

        Raises:
            ValueError: The rate is to fall, and warm-up leaves no step for it.
        """
        if self.config.lr_decay != "none" and self.config.warmup_steps >= total:
            raise ValueError(
                f"warmup_steps={self.config.warmup_steps} leaves none of the run's {total} steps for "
                f"lr_decay={self.config.lr_decay!r}; lower warmup_steps or train longer"
            )
        self._total_steps = total

    def train_step(self, batch: EpisodeBatch, temperature: float | None = None) -> dict[str, float]:
        """Learn from one batch: `num_iterations` passes with one optimizer step per minibatch, by default one in all.

        A minibatch with a loss or gradient that is not finite is skipped. Trajectories without any advantage are not
        computed where they add nothing to the loss but to its denominator; means, quantiles and counts below are of
        what is computed.

        Args:
            batch: As `forge_trainers.batch.packing.pack` makes it.
            temperature: At which it was sampled, above 0; None: that of the settings.

        Returns:
            Means over the optimizer steps: ``loss``, ``ratio_mean`` (learner over sampler), ``clip_fraction``,
            ``correction`` (mean weight), ``corrected_fraction`` (truncated or masked), ``kl`` (to the reference; 0
            without one), ``entropy`` (natural units), ``grad_norm`` (before clipping).
            Of the first optimizer step: ``logprob_gap_mean`` and ``logprob_gap_max`` (absolute difference of learner
            and sampler). Of the last pass: ``ratio_p1``, ``ratio_p50`` and ``ratio_p99`` (quantiles over loss tokens,
            exact over all ranks).
            Of the batch: ``lr``, ``temperature``, ``version`` (after the step), ``tokens``, ``loss_tokens``,
            ``not_computed`` (share of all loss tokens), ``optimizer_steps`` (taken) and ``skipped_minibatches``.
            Over all passes: ``positions`` (computed by all ranks), ``group_positions`` (if only episodes of a group
            shared prompts), ``microbatches``, ``waste`` (share of positions that ranks wait for).
            Time and memory: ``forward_backward_s``, ``optimizer_s``, ``step_s``, ``save_wait_s`` (not in them: until a
            checkpoint was written), ``cpu_s`` (this rank's), ``tokens_per_s`` (of ``tokens``, in every pass),
            ``flops_per_s`` (all ranks'), ``peak_flops_per_s`` (of all ranks' devices), ``mfu`` (the first over the
            second), ``peak_rss_bytes`` and on an accelerator ``peak_device_bytes`` (this rank's).

        Raises:
            ValueError: The batch is malformed or does not fit the model, or the learning rate is to fall and
                `set_total_steps` leaves no step.
            FloatingPointError: Loss or gradient of every minibatch is not finite; weights are unchanged.
        """
        peak = dist.get_world_size() * peak_flops(titan.TORCH_DTYPE_MAP[self.config.compute_dtype])
        start, cpu_start = time.perf_counter(), time.process_time()
        self._enter()
        self._check(batch)
        if not batch["tokens"]["loss_mask"].any():
            raise ValueError("no token of the batch is in the loss; there is nothing to learn")
        temperature = self.config.temperature if temperature is None else temperature
        lr = learning_rate(self.config, self.version, self._total_steps)
        parts = [self._prepared(part) for part in minibatches(batch, self.config.num_minibatches)]
        if self.config.num_iterations * len(parts) > 1 and self.config.loss_settings.correction.how != "ratio":
            with self._built.computing():
                for part in parts:
                    part.old_T = self._logprobs(self.model, part.batch, part.microbatches, temperature)
        steps: list[dict[str, float]] = []
        failures: list[FloatingPointError] = []
        for part in parts * self.config.num_iterations:
            try:
                steps.append(self._optimizer_step(part, lr, temperature, moved=bool(steps)))
            except FloatingPointError as error:
                failures.append(error)
        if not steps:
            raise failures[0]
        self.version += 1
        metrics = averaged(steps)
        end = time.perf_counter() - metrics["save_wait_s"]  # a disk's time is not the learner's
        passes = self.config.num_iterations
        facts = {name: passes * sum(part.facts[name] for part in parts) for name in parts[0].facts if name != "waste"}
        wasted = sum(part.facts["waste"] * part.facts["positions"] for part in parts)
        facts["waste"] = passes * wasted / facts["positions"]
        length_n = torch.cat([part.batch["samples"]["length"][part.needed_n] for part in parts])
        num_tokens, num_computed = float(length_n.sum()), sum(part.num_computed for part in parts)
        flops = flops_per_step(self._built.architecture, self.model, length_n, facts["positions"])
        trained = [(part.log_ratio_T, part.computed_T) for part in parts if part.log_ratio_T is not None]
        log_ratio_T = torch.cat([self._over_ranks(one) for one, _ in trained])
        return {
            **metrics,
            **ratio_quantiles(log_ratio_T, torch.cat([computed_T for _, computed_T in trained])),
            **facts,
            "optimizer_steps": float(len(steps)),
            "skipped_minibatches": float(len(failures)),
            "lr": lr,
            "temperature": temperature,
            "version": float(self.version),
            "tokens": num_tokens,
            "loss_tokens": num_computed,
            "not_computed": 1 - num_computed / sum(part.num_loss_tokens for part in parts),
            "forward_backward_s": end - start - metrics["optimizer_s"],
            "step_s": end - start,
            "cpu_s": time.process_time() - cpu_start,
            "tokens_per_s": passes * num_tokens / (end - start),
            "flops_per_s": flops / (end - start),
            "peak_flops_per_s": peak,
            "mfu": flops / (end - start) / peak,
            **memory(),
        }

    def _prepared(self, batch: EpisodeBatch) -> _Minibatch:
        """A minibatch laid out for this rank."""
        mask_T = batch["tokens"]["loss_mask"]
        needed_n = needed_samples(self.config.loss_settings, batch)
        computed_T = mask_T & needed_n.repeat_interleave(batch["samples"]["length"])
        microbatches, facts = self._plan(batch, needed_n.nonzero().squeeze(1).tolist())
        return _Minibatch(
            batch=batch,
            needed_n=needed_n,
            computed_T=computed_T,
            num_loss_tokens=float(mask_T.sum()),
            num_computed=float(computed_T.sum()),
            microbatches=microbatches,
            facts=facts,
        )

    def _optimizer_step(self, part: _Minibatch, lr: float, temperature: float, *, moved: bool) -> dict[str, float]:
        """One optimizer step on a minibatch.

        Args:
            part: The minibatch.
            lr: Learning rate.
            temperature: Temperature at which it was sampled.
            moved: Whether the weights have changed since the start of the batch.

        Raises:
            FloatingPointError: Loss or gradient is not finite; the weights are unchanged.
        """
        batch, microbatches = part.batch, part.microbatches
        self._optimizers.zero_grad()  # an error within a loss has left what was there of its step
        self._loss.loss_fn.begin(temperature=temperature, computed_share=part.num_computed / part.num_loss_tokens)
        totals: dict[str, torch.Tensor] = {}
        log_ratio_T = torch.zeros(part.computed_T.shape, device=self._ranks.device)
        sharded = self._ranks.parallelism.data_parallel_shard_degree > 1

        def logprobs() -> torch.Tensor:
            if part.old_T is not None and not moved:
                return part.old_T
            return self._logprobs(self.model, batch, microbatches, temperature)

        with self._built.computing():
            columns_T = loss_columns(self.config.loss_settings, batch, logprobs, part.old_T)
            if self._reference is not None:
                if part.reference_T is None:
                    with lora.switched_off(self._reference):
                        part.reference_T = self._logprobs(self._reference, batch, microbatches, temperature)
                columns_T["reference_logprobs"] = part.reference_T
            for i, microbatch in enumerate(microbatches):
                # once, with the last microbatch; but not where weights are sharded: their whole gradients, four bytes
                # for each weight, would be held until then
                sync_gradients(self.model, now=sharded or i == len(microbatches) - 1)
                for name, value in self._forward_backward(batch, microbatch, part.num_loss_tokens, columns_T).items():
                    join = torch.maximum if name.endswith("/max") else torch.add
                    totals[name] = join(totals[name], value) if name in totals else value
                token_S = microbatch.row.token_S.to(log_ratio_T.device)
                log_ratio_T[token_S] = self._loss.loss_fn.take_log_ratios()[: token_S.numel()]
        metrics = self._reduce(totals)
        begun = time.perf_counter()
        metrics |= self._update(metrics["loss"], lr)
        part.log_ratio_T = log_ratio_T
        return metrics | {"optimizer_s": time.perf_counter() - begun - metrics["save_wait_s"]}

    @torch.no_grad()
    def logprobs(self, batch: EpisodeBatch) -> torch.Tensor:
        """The current weights' log-probability of every loss token, at the loss's temperature.

        Returns:
            float32 [T] on CPU, 0 where masked.
        """
        self._enter()
        self._check(batch)
        microbatches, _ = self._plan(batch)
        with self._built.computing():
            return self._logprobs(self.model, batch, microbatches, self.config.temperature)

    def hf_state_dict(self, *, dtype: torch.dtype) -> dict[str, Any]:
        """The weights under Hugging Face's names, tied ones once; an adapter is merged into them.

        Returns:
            Tensors of `dtype`: ``DTensor``s where there are several ranks, else plain; copies, not views. Experts of
            several ranks are whole, in the host's memory.
        """
        several = dist.get_world_size() > 1
        return {
            name: value.cpu() if several and ".experts." in name else value for name, value in self._hf_tensors(dtype)
        }

    @torch.no_grad()
    def _hf_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
        """`hf_state_dict`, one tensor after the other: all of them merged, or all experts whole, may be too large."""
        state = self._whole_state()
        scale = 0.0 if self.config.lora is None else self.config.lora.alpha / self.config.lora.rank
        for name, value in state.items() if self.config.lora is None else lora.merged(state, scale):
            copy = value.to(dtype, copy=True)
            if isinstance(copy, DTensor) and copy.ndim == 3:  # experts: the adapter would name this rank's only
                copy = copy.full_tensor()
            for hf_name, part in self._built.adapter.to_hf({name: copy}).items():
                # the stacked experts' parts would share one piece of memory
                yield hf_name, part.clone() if ".experts." in hf_name else part.contiguous()

    def published(self, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
        """What an engine needs: all weights, as in `hf_state_dict`, or the adapter alone, in PEFT's layout.

        Weights are copied to `dtype` one at a time; experts of several ranks are whole, where the rank computes.
        """
        if self._adapter is None:
            return self._hf_tensors(dtype)
        with torch.no_grad():
            adapter = lora.peft_state(self._whole_state(), self._built.adapter)
            return iter([(name, value.to(dtype)) for name, value in adapter.items()])

    def save(self, folder: str | Path) -> None:
        """Write weights, optimiser, random state and version to `folder`, all or nothing; replaces one.

        Raises:
            RunFolderError: The folder cannot be written.
        """
        self.start_save(folder)
        self.finish_save()

    def start_save(self, folder: str | Path) -> None:
        """Begin to `save` the state as it is now, on a thread; `train_step` waits for it before it changes weights."""
        self._writer.start(self._state(), Path(folder))

    def finish_save(self) -> dict[str, list[int]]:
        """Wait for what `start_save` began; it may be called from another thread. Raises what `save` raises.

        Returns:
            Size and CRCs of the files that this rank wrote, by name; see `forge_agents.files.Sums`.
        """
        return self._writer.finish()

    def load(self, folder: str | Path) -> int:
        """Continue from a checkpoint that `save` wrote, bit for bit.

        Any number of ranks and any parallel degrees may load what others saved.

        Returns:
            The version that was loaded.

        Raises:
            RunFolderError: There is no complete checkpoint, or it belongs to another model.
        """
        self._enter()
        free_unsharded(self.model)
        self._writer.wait()
        state = checkpoint.load(self._state(), Path(folder), optional=("random",))
        self.model.load_state_dict(state["model"], strict=self._adapter is None)
        self._optimizers.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.version = int(state["version"])
        return self.version

    def export(self, folder: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        """Write a Hugging Face model folder: safetensors, config.json and the tokenizer's files.

        Of an adapter it is the model with the adapter merged; ``adapter/`` in it holds the adapter alone, as PEFT does.

        Args:
            folder: Appears when complete; an existing one is replaced.
            dtype: Of the stored weights, or its name; None for that of the model trained.
        """
        source = Path(self.config.model)
        dtype = dtype or models.dtype_of(source)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        adapter = None
        if self.config.lora is not None:
            weights = lora.peft_state(self._whole_state(), self._built.adapter)
            adapter = (weights, lora.peft_config(self.config.lora, self.config.model))
        return checkpoint.export(self._hf_tensors(dtype), source, Path(folder), dtype=dtype, adapter=adapter)

    def park(self) -> None:
        """Take weights and moments to the host's memory, so that others can use the device. Twice is no error."""
        if self._parked:
            return
        self._writer.wait()  # a checkpoint under way reads these very tensors
        held: list[torch.Tensor] = []
        for model in self._models:
            model.state_dict()  # has FSDP drop all its compute copies, and show the shards
            held += [*model.parameters(), *model.buffers()]
        for optimizer in self._optimizers:
            held += [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        for value in held:
            local = value.to_local() if isinstance(value, DTensor) else value
            storage = local.untyped_storage()
            if storage.nbytes():  # tied weights are there twice
                kept = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage).to("cpu", copy=True)
                self._parked.append((storage, kept))
                storage.resize_(0)  # in place: FSDP, optimiser and model go on to hold the same tensors
        if titan.DEVICE_TYPE != "cpu":
            titan.device_utils.device_module.empty_cache()

    def unpark(self) -> None:
        """Bring them back to the device. Twice is no error."""
        while self._parked:
            storage, kept = self._parked.pop()
            storage.resize_(kept.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(kept)

    def _enter(self) -> None:
        """Put this learner's adapter into the model; another learner of the same model may have worked since."""
        if self._adapter is not None and self._adapter.enter():
            free_unsharded(self.model)

    def _whole_state(self) -> dict[str, Any]:
        """The model's tensors by TorchTitan's names, plain where this rank has all of them."""
        self._enter()
        return {
            name: value.to_local() if isinstance(value, DTensor) and value.device_mesh.size() == 1 else value
            for name, value in self.model.state_dict().items()
        }

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds. Adapters are copied: the next learner of the model puts its own in their place."""
        self._enter()
        model = self.model.state_dict()
        if self._adapter is not None:
            model = {name: value.clone() for name, value in model.items() if lora.is_adapter(name)}
        return {
            "model": model,
            "optimizer": checkpoint.optimizer_state(self._optimizers),
            "random": torch.get_rng_state(),
            "version": self.version,
        }

    def _check(self, batch: EpisodeBatch) -> None:
        check_batch(batch, vocab_size=self._built.vocab_size, max_length=self._built.max_seq_len)

    def _plan(
        self, batch: EpisodeBatch, samples: Sequence[int] | None = None
    ) -> tuple[Sequence[Microbatch], dict[str, float]]:
        """Lay out the batch, or some of its samples; every rank comes to the same plan."""
        config = self.config
        assert config.max_tokens_per_microbatch is not None and config.loss_chunk_tokens is not None
        layout = lay_out(
            batch,
            max_tokens=config.max_tokens_per_microbatch,
            chunk_tokens=config.loss_chunk_tokens,
            share_prefixes=self._share,
            share_openings=self._share and titan.DEVICE_TYPE == "cpu",
            hidden_size=self._built.hidden_size,
            ranks=self._ranks.dp_size,
            rank=self._ranks.dp_rank,
            multiple_of=config.row_multiple,
            samples=samples,
        )
        facts = {
            "positions": layout.positions,
            "group_positions": layout.group_positions,
            "microbatches": len(layout.microbatches),
            "waste": layout.waste,
        }
        return layout.microbatches, {name: float(value) for name, value in facts.items()}

    def _hidden(self, model: Any, row: Row) -> torch.Tensor:
        positions = row.positions_1L.to(self._ranks.device)
        masks: Any
        if titan.DEVICE_TYPE == "cpu":
            masks = plan_attention(row.spans)
        elif self._share:
            masks = plan_prefixes(row.spans, self._ranks.device)
        else:
            masks = titan.create_varlen_metadata_for_document(positions)
        tokens = row.token_ids_1L.to(self._ranks.device)
        hidden_1LD: torch.Tensor = model(tokens, attention_masks=masks, positions=positions)
        return hidden_1LD

    def _forward_backward(
        self,
        batch: EpisodeBatch,
        microbatch: Microbatch,
        num_loss_tokens: float,
        columns_T: dict[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        row, tokens = microbatch.row, batch["tokens"]
        device = self._ranks.device
        token_S, source_S = microbatch.filled()
        valid_S = torch.arange(token_S.numel()) < row.token_S.numel()
        columns = {"sampler_logprobs": tokens["logprobs"], "advantages": tokens["advantages"], **(columns_T or {})}
        inputs = {name: column[token_S][None].to(device) for name, column in columns.items()}
        self._loss.num_chunks = microbatch.num_chunks
        with self._ranks.context():
            hidden_1SD = _select(self._hidden(self.model, row), source_S.to(device))
            labels_1S = tokens["ids"][token_S][None].to(device)
            loss, metrics = self._loss(hidden_1SD, labels_1S, num_loss_tokens, valid=valid_S[None].to(device), **inputs)
            loss.backward()  # of the trunk; the wrapper has taken the head's already, chunk by chunk
        found: dict[str, torch.Tensor] = metrics
        return found

    @torch.no_grad()
    def _logprobs(
        self, model: Any, batch: EpisodeBatch, microbatches: Sequence[Microbatch], temperature: float
    ) -> torch.Tensor:
        out_T = torch.zeros(batch["tokens"]["ids"].shape, device=self._ranks.device)
        for microbatch in microbatches:
            row = microbatch.row
            token_S, source_S = microbatch.filled()
            labels_S = batch["tokens"]["ids"][token_S].to(self._ranks.device)
            with self._ranks.context():
                hidden_1SD = _select(self._hidden(model, row), source_S.to(self._ranks.device))
                size = token_S.numel() // microbatch.num_chunks
                found = []
                for start in range(0, labels_S.numel(), size):
                    chunk = slice(start, start + size)
                    logits = model.lm_head(hidden_1SD[:, chunk])
                    found.append(logprobs_of(logits, labels_S[chunk][None], temperature=temperature)[0])
            out_T[row.token_S.to(out_T.device)] = torch.cat(found)[: row.token_S.numel()]
        free_unsharded(model)
        return self._over_ranks(out_T)

    def _over_ranks(self, values_T: torch.Tensor) -> torch.Tensor:
        """Values of all tokens, on CPU; each token was computed by one data-parallel rank."""
        if (mesh := self._ranks.loss_mesh) is not None:
            values_T = titan.dist_utils.dist_sum_tensor(values_T, mesh)
        return values_T.cpu()

    def _reduce(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        mesh = self._ranks.loss_mesh
        metrics = {}
        for name, value in totals.items():
            over_ranks = titan.dist_utils.dist_max if name.endswith("/max") else titan.dist_utils.dist_sum
            metrics[name.partition("/")[0]] = float(over_ranks(value.detach(), mesh))
        return metrics

    def _update(self, loss: float, lr: float) -> dict[str, float]:
        grad_norm = self._clip()
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            self._optimizers.zero_grad()
            raise FloatingPointError(
                f"the loss is {loss:g} and the gradient norm {grad_norm:g} at version {self.version}; the weights are "
                "unchanged. Lower lr or max_grad_norm, or compute in float32"
            )
        waited_s = self._writer.wait()  # a checkpoint under way reads these very tensors
        config = self.config
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:  # of a checkpoint they hold what was set when it was written
                group.update(lr=lr, betas=config.betas, weight_decay=config.weight_decay)
        self._optimizers.step()
        self._optimizers.zero_grad()
        return {"grad_norm": grad_norm, "save_wait_s": waited_s}

    def _clip(self) -> float:
        """The norm of all gradients, which are scaled down to the largest allowed, and not touched where it is less.

        TorchTitan multiplies them with 1 there, which costs a fifth of an optimiser's step in memory traffic.
        """
        parameters, most = list(self.model.parameters()), self.config.max_grad_norm
        if self.config.ep > 1:  # experts and the rest have meshes of their own
            return float(titan.dist_utils.clip_grad_norm_(parameters, most, foreach=True, ep_enabled=True))
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if most / (norm + 1e-6) < 1:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, norm, foreach=True)
        return float(norm)


def _select(hidden_1LD: torch.Tensor, source_S: torch.Tensor) -> torch.Tensor:
    """Hidden states of the positions that predict loss tokens, so that the head computes no others."""
    if isinstance(hidden_1LD, DTensor):  # tensor parallelism; the last norm's output is replicated
        mesh = hidden_1LD.device_mesh
        source_S = DTensor.from_local(source_S, mesh, [Replicate()] * mesh.ndim)
    return hidden_1LD.index_select(1, source_S)

