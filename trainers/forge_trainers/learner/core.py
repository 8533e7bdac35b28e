"""A rank of a learner, without Monarch: training steps on TorchTitan components. Every rank gets the whole batch.

Axes: T tokens of a batch, S loss tokens of a row, D hidden size.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from forge_agents.errors import RunFolderError
from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.types import EpisodeBatch
from forge_trainers.batch.layout import Microbatch, Row, lay_out
from forge_trainers.batch.packing import check_batch, minibatches
from forge_trainers.learner import checkpoint, lora, titan
from forge_trainers.learner.adamw import build_optimizers
from forge_trainers.learner.measures import averaged, flops_per_step, memory, peak_flops, ratio_quantiles
from forge_trainers.learner.minibatch import Minibatch, divergences
from forge_trainers.learner.model import (
    Built,
    Ranks,
    build_model,
    free_unsharded,
    join_ranks,
    sync_gradients,
    unused_tensors,
)
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.learner.precision import randomly_rounded
from forge_trainers.learner.rates import learning_rate, with_rate
from forge_trainers.learner.reference import Reference
from forge_trainers.losses.correction import loss_columns, needed_samples
from forge_trainers.losses.policy_loss import PolicyLoss, logprobs_of

_MAX_VERSION = 2**53
"""Maximum version of weights in a checkpoint. Metrics hold it as a float."""


class LearnerCore:
    """Model, optimizer and learning-rate schedule of one rank.

    Every method is a collective: all ranks call it with the same arguments. Methods block the calling thread.
    """

    def __init__(self, config: LearnerPlan, *, base: LearnerCore | None = None) -> None:
        """Build the model and load the weights in `config.model`, or share the model of `base`.

        `base` is a learner with another adapter of the same shape.

        Raises:
            ModelNotFoundError: Model files are missing or incomplete.
            ValueError: The model is not supported, or the parallel degrees do not fit the model or the number of ranks.
        """
        config = config.with_memory()
        if not config.model:
            raise ValueError("model is empty. Set it to the folder of a Hugging Face model")
        # on CPU, engines compute recurrent models in bfloat16 only, and would round small updates of float32 away
        is_recurrent = families.is_recurrent(models.read_json(Path(config.model, "config.json")))
        dtype = config.dtype_on(cpu=titan.DEVICE_TYPE == "cpu" and not is_recurrent)
        self.config = config = with_rate(replace(config, compute_dtype=dtype))
        self._ranks: Ranks = join_ranks(config) if base is None else base._ranks
        self._built: Built = build_model(config, self._ranks) if base is None else base._built
        self.model: Any = self._built.model
        self._models: list[Any] = [self.model] if base is None else []
        """Models that this learner built. Other learners may share them."""
        self._adapter = None
        if config.lora is not None:
            first = None if base is None else base._adapter
            self._adapter = lora.Adapter(self.model, seed=config.seed, other=first)
        self._teachers: dict[str, Built] = {} if base is None else base._teachers
        self._reference = None
        if config.kl_coef > 0:
            self._reference = Reference(config, self._built, self._ranks, self._adapter, self._teachers)
            self._models += [model for model in self._reference.models if model not in self._models]
        self._exact_kl = self._reference is not None and config.loss_settings.kl == "exact"
        self._loss = titan.ChunkedLossWrapper.Config(num_chunks=1).build()
        self._loss.loss_fn = PolicyLoss(config.loss_settings)  # TorchTitan accepts any callable
        self._loss.set_lm_head(self.model.lm_head)
        self._optimizers = build_optimizers(config, self.model)
        if self._built.copies is not None:
            checkpoint.optimizer_state(self._optimizers)  # allocates the moments before activations fragment memory
        self._total_steps: int | None = None
        self._writer = checkpoint.Writer(self._ranks.use_device)
        self._offloaded: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Device storages that are offloaded, with their bytes in host memory."""
        self.version = 0
        """Version of the weights: number of training steps, one per batch."""

    @property
    def max_sample_tokens(self) -> int:
        """Number of tokens of the longest sample: the setting, or the model's context if that is shorter."""
        return self._built.max_seq_len

    def set_total_steps(self, total: int) -> None:
        """Set the run's total number of training steps, for a decaying learning rate.

        Raises:
            ValueError: The learning rate decays, and warm-up takes all steps.
        """
        if self.config.lr_decay != "none" and self.config.warmup_steps >= total:
            raise ValueError(
                f"warmup_steps={self.config.warmup_steps} leaves none of the run's {total} steps for "
                f"lr_decay={self.config.lr_decay!r}. Lower warmup_steps or train for more steps"
            )
        self._total_steps = total

    def train_step(self, batch: EpisodeBatch, temperature: float | None = None) -> dict[str, float]:
        """Train on one batch: `num_iterations` passes with one optimizer step per minibatch (by default a single step).

        Minibatches with a non-finite loss or gradient are skipped. Trajectories whose advantages are all 0 are not
        computed if they change the loss only through its normalization. The metrics below are over computed tokens.

        Args:
            batch: The batch, as `forge_trainers.batch.packing.pack` makes it.
            temperature: Temperature at which the batch was sampled, above 0. None: the temperature of the settings.

        Returns:
            Means over the optimizer steps: ``loss``, ``ratio_mean`` (learner over sampler), ``clip_fraction``,
            ``correction`` (mean weight), ``corrected_fraction`` (truncated or masked), ``kl`` (to the reference; 0
            without one), ``entropy`` (natural units), ``grad_norm`` (before clipping).
            Of the first optimizer step: ``logprob_gap_mean`` and ``logprob_gap_max`` (absolute difference of learner
            and sampler). Of the last pass: ``ratio_p1``, ``ratio_p50`` and ``ratio_p99`` (quantiles over loss tokens,
            exact over all ranks).
            Of the batch: ``lr``, ``temperature``, ``version`` (after the step), ``tokens``, ``loss_tokens``,
            ``not_computed`` (fraction of all loss tokens), ``optimizer_steps`` (taken) and ``skipped_minibatches``.
            Over all passes: ``positions`` (computed by all ranks), ``group_positions`` (if groups shared no prompts),
            ``microbatches``, ``waste`` (fraction of positions for which ranks wait).
            Time and memory: ``forward_backward_s``, ``optimizer_s``, ``step_s``, ``save_wait_s`` (waiting for a
            checkpoint; not part of the other times), ``cpu_s`` (this rank), ``tokens_per_s`` (``tokens`` in every
            pass), ``flops_per_s`` (all ranks), ``peak_flops_per_s`` (all devices), ``mfu`` (``flops_per_s`` over
            ``peak_flops_per_s``), ``peak_rss_bytes`` and on an accelerator ``peak_device_bytes`` (this rank).

        Raises:
            ValueError: The batch is malformed or does not fit the model, or the learning rate decays and the run has no
                steps left.
            FloatingPointError: Loss or gradient of every minibatch is not finite. The weights are unchanged.
        """
        peak = dist.get_world_size() * peak_flops(titan.TORCH_DTYPE_MAP[self.config.compute_dtype])
        start, cpu_start = time.perf_counter(), time.process_time()
        self._enter()
        self._check(batch)
        if not batch["tokens"]["loss_mask"].any():
            raise ValueError("no token of the batch is in the loss, so the learner cannot train on it")
        temperature = self.config.temperature if temperature is None else temperature
        lr = learning_rate(self.config, self.version, self._total_steps)
        parts = [self._prepared(part) for part in minibatches(batch, self.config.num_minibatches)]
        steps, num_skipped = self._optimizer_steps(parts, lr, temperature)
        self.version += 1
        if self._reference is not None:
            self._reference.follow(self.version)
        metrics = averaged(steps)
        seconds = time.perf_counter() - start - metrics["save_wait_s"]  # waiting for the disk is no training
        counts = self._counts(parts) | divergences(parts, () if self._reference is None else self._reference.agents)
        flops_per_s = counts.pop("flops") / seconds
        return {
            **metrics,
            **counts,
            "optimizer_steps": float(len(steps)),
            "skipped_minibatches": float(num_skipped),
            "lr": lr,
            "temperature": temperature,
            "version": float(self.version),
            "forward_backward_s": seconds - metrics["optimizer_s"],
            "step_s": seconds,
            "cpu_s": time.process_time() - cpu_start,
            "tokens_per_s": self.config.num_iterations * counts["tokens"] / seconds,
            "flops_per_s": flops_per_s,
            "peak_flops_per_s": peak,
            "mfu": flops_per_s / peak,
            **memory(),
        }

    def _prepared(self, batch: EpisodeBatch) -> Minibatch:
        """The minibatch laid out for this rank."""
        mask_T = batch["tokens"]["loss_mask"]
        computed_n = needed_samples(self.config.loss_settings, batch)
        computed_T = mask_T & computed_n.repeat_interleave(batch["samples"]["length"])
        microbatches, facts = self._plan(batch, computed_n.nonzero().squeeze(1).tolist())
        return Minibatch(
            batch=batch,
            computed_n=computed_n,
            computed_T=computed_T,
            num_loss_tokens=float(mask_T.sum()),
            num_computed=float(computed_T.sum()),
            microbatches=microbatches,
            facts=facts,
        )

    def _optimizer_steps(
        self, parts: Sequence[Minibatch], lr: float, temperature: float
    ) -> tuple[list[dict[str, float]], int]:
        """Pass over the minibatches `num_iterations` times. Returns the metrics of each step, and the number of skips.

        Raises:
            FloatingPointError: Every step was skipped, because loss or gradient of its minibatch are not finite.
        """
        passes = self.config.num_iterations
        if passes * len(parts) > 1 and self.config.loss_settings.correction.how != "ratio":
            with self._built.computing():  # before the first step changes the weights
                for part in parts:
                    part.old_T = self._logprobs(self._built, part.batch, part.microbatches, temperature)
        steps: list[dict[str, float]] = []
        failures: list[FloatingPointError] = []
        for part in [*parts] * passes:
            try:
                steps.append(self._optimizer_step(part, lr, temperature, moved=bool(steps)))
            except FloatingPointError as error:
                failures.append(error)
        if not steps:
            raise failures[0]
        return steps, len(failures)

    def _optimizer_step(self, part: Minibatch, lr: float, temperature: float, *, moved: bool) -> dict[str, float]:
        """An optimizer step. `moved`: whether the weights have changed since the start of the batch.

        Raises:
            FloatingPointError: Loss or gradient is not finite. The weights are unchanged.
        """
        batch, microbatches = part.batch, part.microbatches
        self._optimizers.zero_grad()  # an error in an earlier step may have left gradients
        self._loss.loss_fn.begin(temperature=temperature, computed_share=part.num_computed / part.num_loss_tokens)
        totals: dict[str, torch.Tensor] = {}
        log_ratio_T = torch.zeros(part.computed_T.shape, device=self._ranks.device)
        sharded = self._ranks.parallelism.data_parallel_shard_degree > 1

        def logprobs() -> torch.Tensor:
            if part.old_T is not None and not moved:
                return part.old_T
            return self._logprobs(self._built, batch, microbatches, temperature)

        with self._built.computing():
            columns_T = loss_columns(self.config.loss_settings, batch, logprobs, part.old_T)
            if self._reference is not None and not self._exact_kl:
                if part.reference_T is None:
                    part.reference_T = self._reference_logprobs(batch, microbatches, temperature)
                columns_T["reference_logprobs"] = part.reference_T
            for i, microbatch in enumerate(microbatches):
                # Gradients are reduced once, with the last microbatch. Sharded weights reduce theirs with each one,
                # because unsharded gradients of all weights (4 bytes each) would stay in memory until then.
                sync_gradients(self.model, now=sharded or i == len(microbatches) - 1)
                sums = self._forward_backward(batch, microbatch, part.num_loss_tokens, columns_T)
                if self._reference is not None and any(self._reference.agents):
                    sums[f"kl/{self._reference.agents[microbatch.part]}/mean"] = sums["kl/mean"]
                for name, value in sums.items():
                    join = torch.maximum if name.endswith("/max") else torch.add
                    totals[name] = join(totals[name], value) if name in totals else value
                token_S = microbatch.row.token_S.to(log_ratio_T.device)
                log_ratio_T[token_S] = self._loss.loss_fn.take_log_ratios()[: token_S.numel()]
        metrics = self._reduce(totals)
        if self._reference is not None:
            self._reference.check_teachers(metrics)
        for name in [name for name in metrics if name.startswith("kl/")]:
            part.kl_sums[name.removeprefix("kl/")] = metrics.pop(name) * part.num_computed
        start = time.perf_counter()
        metrics |= self._update(metrics["loss"], lr)
        part.log_ratio_T = log_ratio_T
        return metrics | {"optimizer_s": time.perf_counter() - start - metrics["save_wait_s"]}

    def _counts(self, parts: Sequence[Minibatch]) -> dict[str, float]:
        """Ratio quantiles, counts of positions and tokens, and ``flops`` of a batch, over all passes and ranks."""
        passes = self.config.num_iterations
        counts = {name: passes * sum(part.facts[name] for part in parts) for name in parts[0].facts if name != "waste"}
        wasted = sum(part.facts["waste"] * part.facts["positions"] for part in parts)
        length_n = torch.cat([part.batch["samples"]["length"][part.computed_n] for part in parts])
        num_computed = sum(part.num_computed for part in parts)
        trained = [(part.log_ratio_T, part.computed_T) for part in parts if part.log_ratio_T is not None]
        log_ratio_T = torch.cat([self._over_ranks(log_ratio_T) for log_ratio_T, _ in trained])
        return {
            **ratio_quantiles(log_ratio_T, torch.cat([computed_T for _, computed_T in trained])),
            **counts,
            "waste": passes * wasted / counts["positions"],
            "tokens": float(length_n.sum()),
            "loss_tokens": num_computed,
            "not_computed": 1 - num_computed / sum(part.num_loss_tokens for part in parts),
            "flops": flops_per_step(self._built.architecture, self.model, length_n, counts["positions"]),
        }

    @torch.no_grad()
    def logprobs(self, batch: EpisodeBatch) -> torch.Tensor:
        """Log-probability of every loss token under the current weights, at the temperature of the settings.

        float32 [T] on CPU, 0 where masked.
        """
        self._enter()
        self._check(batch)
        microbatches, _ = self._plan(batch)
        with self._built.computing():
            return self._logprobs(self._built, batch, microbatches, self.config.temperature)

    def hf_state_dict(self, *, dtype: torch.dtype) -> dict[str, Any]:
        """Copies of the weights in `dtype` by Hugging Face name. Tied weights appear once, and an adapter is merged.

        With several ranks, values are ``DTensor``s, and experts are gathered in host memory.
        """
        several = dist.get_world_size() > 1
        return {
            name: value.cpu() if several and ".experts." in name else value for name, value in self._hf_tensors(dtype)
        }

    @torch.no_grad()
    def _hf_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
        """`hf_state_dict` one tensor at a time, because all merged or gathered tensors may not fit into memory."""
        state = self._whole_state()
        scale = 0.0 if self.config.lora is None else self.config.lora.alpha / self.config.lora.rank
        for name, value in state.items() if self.config.lora is None else lora.merged(state, scale):
            copy = self._in_dtype(name, value, dtype)
            if isinstance(copy, DTensor) and copy.ndim == 3:  # TorchTitan would name only the experts of this rank
                copy = copy.full_tensor()
            for hf_name, part in self._built.adapter.to_hf({name: copy}).items():
                # parts of stacked experts are views of one storage, and those of gpt-oss are transposed
                is_view = ".experts." in hf_name
                yield hf_name, part.clone(memory_format=torch.contiguous_format) if is_view else part.contiguous()

    def _in_dtype(self, name: str, value: Any, dtype: torch.dtype) -> Any:
        """A copy of a weight in `dtype`."""
        if name.endswith(".expert_bias_E"):  # of a router, see `families.is_exact`
            return value.to(torch.float32, copy=True)
        if dtype == torch.bfloat16 and value.dtype == torch.float32 and self.config.compute_dtype == "float32":
            value = randomly_rounded(name, value, self.config.seed)
        return value.to(dtype, copy=True)

    def published(self, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
        """Weights for an engine: all weights, as in `hf_state_dict`, or only the adapter, in PEFT's layout.

        Weights are copied to `dtype` one at a time. Experts of several ranks are gathered on the rank's device.
        """
        if self._adapter is None:
            return self._hf_tensors(dtype)
        with torch.no_grad():
            adapter = lora.peft_state(self._whole_state(), self._built.adapter)
            return iter([(name, value.to(dtype)) for name, value in adapter.items()])

    def save(self, folder: str | Path) -> None:
        """Write weights, optimizer state, random state and version to `folder`. Atomic. Replaces an existing folder.

        Raises:
            RunFolderError: The folder cannot be written.
        """
        self.start_save(folder)
        self.finish_save()

    def start_save(self, folder: str | Path) -> None:
        """Start to `save` the current state in the background. `train_step` waits for it before it changes weights."""
        self._writer.start(self._state(), Path(folder))

    def finish_save(self) -> dict[str, list[int]]:
        """Wait until the checkpoint of `start_save` is written. May be called from another thread.

        Returns size and CRCs of the files that this rank wrote, by name. See `forge_agents.files.Checksums`.

        Raises:
            RunFolderError: The folder cannot be written.
        """
        return self._writer.finish()

    def load(self, folder: str | Path, *, to_train: bool = True) -> int:
        """Load a checkpoint of `save`, possibly of other ranks and degrees. Training then continues bit for bit.

        Returns the version of the weights. `to_train` False reads the weights alone, which is enough for an export.

        Raises:
            RunFolderError: The checkpoint is missing, incomplete or of another model, or has numbers of no training.
        """
        self._enter()
        free_unsharded(self.model)
        self._writer.wait()
        requested = self._state() if to_train else self._weights()
        state = checkpoint.load(requested, Path(folder), optional=("random", "reference"))
        version = state["version"]
        if type(version) is not int or not 0 <= version <= _MAX_VERSION:
            raise RunFolderError(f"{folder} has version={version!r:.40}. Expected a whole number from 0 to 2^53")
        if invalid := self._invalid_tensor(state):
            raise RunFolderError(
                f"{folder} is damaged: {invalid:.200} has numbers that no training writes, such as NaN"
            )
        self.model.load_state_dict(state["model"], strict=self._adapter is None)
        if to_train:
            settings = [dict(group) for group in self._param_groups()]
            self._optimizers.load_state_dict(state["optimizer"])
            # The run's settings stay: those in the file may be of any type, and would change the optimizer.
            for group, run_settings in zip(self._param_groups(), settings, strict=True):
                group.update(run_settings)
            if "random" in state:
                torch.set_rng_state(state["random"])
            if self._reference is not None and self._reference.moves:
                self._reference.load(state.get("reference"))
        self.version = version
        return version

    def export(self, folder: str | Path, dtype: torch.dtype | str | None = None) -> Path:
        """Write a Hugging Face model folder: safetensors, config.json and tokenizer files. Replaces an existing folder.

        An adapter is merged into the model, and the subfolder ``adapter`` holds it in PEFT's format as well. Weights
        are stored in `dtype`, by default that of the start model.

        Raises:
            RunFolderError: The folder cannot be written, or a weight is not finite.
        """
        self._enter()
        if invalid := self._invalid_tensor(self._weights()):
            raise RunFolderError(
                f"nothing is exported to {folder}, because weights in {invalid} are not finite: the training diverged. "
                "Continue with a lower lr: the run goes back to a checkpoint with finite weights"
            )
        source = Path(self.config.model)
        dtype = dtype or models.dtype_of(source)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        adapter = None
        if self.config.lora is not None:
            weights = lora.peft_state(self._whole_state(), self._built.adapter)
            adapter = (weights, lora.peft_config(self.config.lora, self.config.model, weights))
        tensors = itertools.chain(self._hf_tensors(dtype), unused_tensors(source))
        return checkpoint.export(tensors, source, Path(folder), dtype=dtype, adapter=adapter)

    def offload(self) -> None:
        """Move weights and optimizer state to host memory, so that others can use the device. Idempotent."""
        if self._offloaded:
            return
        self._writer.wait()  # a checkpoint that is being written reads these tensors
        tensors: list[torch.Tensor] = []
        for model in self._models:
            model.state_dict()  # makes FSDP free its compute copies and expose the shards
            tensors += [*model.parameters(), *model.buffers()]
        for optimizer in self._optimizers:
            tensors += [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        for value in tensors:
            local = value.to_local() if isinstance(value, DTensor) else value
            storage = local.untyped_storage()
            if storage.nbytes():  # tied weights appear twice
                host_copy = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage).to("cpu", copy=True)
                self._offloaded.append((storage, host_copy))
                storage.resize_(0)  # in place, because FSDP, optimizer and model hold references to the tensors
        if titan.DEVICE_TYPE != "cpu":
            titan.device_utils.device_module.empty_cache()

    def onload(self) -> None:
        """Move weights and optimizer state back to the device. Idempotent."""
        while self._offloaded:
            storage, host_copy = self._offloaded.pop()
            storage.resize_(host_copy.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host_copy)

    def _enter(self) -> None:
        """Load this learner's adapter into the model, because another learner may have used the model since."""
        if self._adapter is not None and self._adapter.enter():
            free_unsharded(self.model)

    def _whole_state(self) -> dict[str, Any]:
        """The model's tensors by TorchTitan name. Tensors that this rank holds completely are plain tensors."""
        self._enter()
        return {
            name: value.to_local() if isinstance(value, DTensor) and value.device_mesh.size() == 1 else value
            for name, value in self.model.state_dict().items()
        }

    def _state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        weights = self._weights()
        moving = {} if self._reference is None or not self._reference.moves else {"reference": self._reference.state()}
        return moving | {
            "model": weights["model"],
            "optimizer": checkpoint.optimizer_state(self._optimizers),
            "random": torch.get_rng_state(),
            "version": weights["version"],
        }

    def _weights(self) -> dict[str, Any]:
        """Weights for a checkpoint. Adapters are copied, because another learner may overwrite them in the model."""
        self._enter()
        model = self.model.state_dict()
        if self._adapter is not None:
            model = {name: value.clone() for name, value in model.items() if lora.is_adapter(name)}
        return {"model": model, "version": self.version}

    def _check(self, batch: EpisodeBatch) -> None:
        check_batch(batch, vocab_size=self._built.vocab_size, max_length=self._built.max_seq_len)

    def _plan(
        self, batch: EpisodeBatch, samples: Sequence[int] | None = None
    ) -> tuple[Sequence[Microbatch], dict[str, float]]:
        """Lay out the batch, or some of its samples. Every rank computes the same plan.

        Samples with different teachers are in different microbatches. Returns the microbatches of this rank, and
        `Minibatch.facts`.
        """
        config = self.config
        assert config.max_tokens_per_microbatch is not None and config.loss_chunk_tokens is not None
        split = [samples] if self._reference is None else self._reference.split(batch, samples)
        microbatches, facts, waited = list[Microbatch](), Counter[str](), 0.0
        for number, of_part in enumerate(split):
            if of_part is not None and not of_part:
                continue
            layout = lay_out(
                batch,
                max_tokens=config.max_tokens_per_microbatch,
                chunk_tokens=config.loss_chunk_tokens,
                share_prefixes=config.share_prefixes and titan.DEVICE_TYPE == "cpu",
                hidden_size=self._built.hidden_size,
                ranks=self._ranks.dp_size,
                rank=self._ranks.dp_rank,
                multiple_of=config.row_multiple,
                samples=of_part,
            )
            microbatches += [replace(microbatch, part=number) for microbatch in layout.microbatches]
            facts.update(positions=layout.positions, group_positions=layout.group_positions)
            waited += layout.positions / (1 - layout.waste)
        waste = 1.0 - facts["positions"] / waited
        counts = {name: float(value) for name, value in facts.items()}
        return microbatches, {**counts, "microbatches": float(len(microbatches)), "waste": waste}

    def _hidden(self, built: Built, row: Row) -> torch.Tensor:
        positions = row.positions_1L.to(self._ranks.device)
        masks = built.masks(row.spans, positions)
        tokens = row.token_ids_1L.to(self._ranks.device)
        hidden_1LD: torch.Tensor = built.model(tokens, attention_masks=masks, positions=positions)
        return hidden_1LD

    def _forward_backward(
        self,
        batch: EpisodeBatch,
        microbatch: Microbatch,
        num_loss_tokens: float,
        columns_T: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Add the gradients of a microbatch. Returns the sums of the loss's metrics.

        `columns_T` are per-token inputs of the loss, float32 [T], in addition to log-probabilities and advantages.
        """
        row, tokens = microbatch.row, batch["tokens"]
        device = self._ranks.device
        token_S, source_S = microbatch.filled()
        valid_S = torch.arange(token_S.numel()) < row.token_S.numel()
        columns = {"sampler_logprobs": tokens["logprobs"], "advantages": tokens["advantages"], **columns_T}
        inputs = {name: column[token_S][None].to(device) for name, column in columns.items()}
        if self._exact_kl:
            inputs["reference_hidden"] = self._reference_hidden(microbatch)
        self._loss.num_chunks = microbatch.num_chunks
        with self._ranks.context():
            hidden_1SD = _select(self._hidden(self._built, row), source_S.to(device))
            labels_1S = tokens["ids"][token_S][None].to(device)
            loss, metrics = self._loss(hidden_1SD, labels_1S, num_loss_tokens, valid=valid_S[None].to(device), **inputs)
            loss.backward()  # of the trunk only: the wrapper has run the head's backward pass, chunk by chunk
        if self._exact_kl and self._reference is not None:
            self._reference.free()
        totals: dict[str, torch.Tensor] = metrics
        return totals

    @torch.no_grad()
    def _reference_hidden(self, microbatch: Microbatch) -> torch.Tensor:
        """The reference's hidden states that predict the loss tokens. The loss gets the reference's head."""
        assert self._reference is not None
        with self._reference.computing(microbatch.part) as built, self._ranks.context():
            _, source_S = microbatch.filled()
            hidden_1SD = _select(self._hidden(built, microbatch.row), source_S.to(self._ranks.device))
            free_unsharded(built.model)
            self._loss.loss_fn.reference_head = built.model.lm_head
        return hidden_1SD

    def _reference_logprobs(
        self, batch: EpisodeBatch, microbatches: Sequence[Microbatch], temperature: float
    ) -> torch.Tensor:
        """Log-probabilities of the loss tokens under the reference models: float32 [T]."""
        assert self._reference is not None
        out_T = torch.zeros(batch["tokens"]["ids"].shape)
        for number, of_part in itertools.groupby(microbatches, key=lambda microbatch: microbatch.part):
            with self._reference.computing(number) as built:
                out_T += self._logprobs(built, batch, [*of_part], temperature)
        return out_T

    @torch.no_grad()
    def _logprobs(
        self, built: Built, batch: EpisodeBatch, microbatches: Sequence[Microbatch], temperature: float
    ) -> torch.Tensor:
        out_T = torch.zeros(batch["tokens"]["ids"].shape, device=self._ranks.device)
        for microbatch in microbatches:
            row = microbatch.row
            token_S, source_S = microbatch.filled()
            labels_S = batch["tokens"]["ids"][token_S].to(self._ranks.device)
            with self._ranks.context():
                hidden_1SD = _select(self._hidden(built, row), source_S.to(self._ranks.device))
                size = token_S.numel() // microbatch.num_chunks
                logprobs = []
                for start in range(0, labels_S.numel(), size):
                    chunk = slice(start, start + size)
                    logits = built.model.lm_head(hidden_1SD[:, chunk])
                    logprobs.append(logprobs_of(logits, labels_S[chunk][None], temperature=temperature)[0])
            out_T[row.token_S.to(out_T.device)] = torch.cat(logprobs)[: row.token_S.numel()]
        free_unsharded(built.model)
        return self._over_ranks(out_T)

    def _invalid_tensor(self, state: Mapping[str, Any]) -> str:
        """Return `checkpoint.invalid_tensor` of this rank or, if it has none, a text if another rank has one."""
        invalid = checkpoint.invalid_tensor(state)
        if checkpoint.is_alone():
            return invalid
        any_invalid = torch.tensor(float(bool(invalid)), device=self._ranks.device)
        dist.all_reduce(any_invalid, dist.ReduceOp.MAX)  # all ranks go on, or none
        return invalid or ("a part of another rank" if any_invalid else "")

    def _over_ranks(self, values_T: torch.Tensor) -> torch.Tensor:
        """Values of all tokens, on CPU. Each token was computed by one data-parallel rank."""
        if (mesh := self._ranks.loss_mesh) is not None:
            values_T = titan.dist_utils.dist_sum_tensor(values_T, mesh)
        return values_T.cpu()

    def _reduce(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        mesh = self._ranks.loss_mesh
        metrics = {}
        for name, value in totals.items():
            over_ranks = titan.dist_utils.dist_max if name.endswith("/max") else titan.dist_utils.dist_sum
            metrics[name.rpartition("/")[0]] = float(over_ranks(value.detach(), mesh))
        return metrics

    def _update(self, loss: float, lr: float) -> dict[str, float]:
        grad_norm = self._clip()
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            self._optimizers.zero_grad()
            raise FloatingPointError(
                f"the loss is {loss:g} and the gradient norm {grad_norm:g} at version {self.version}. The weights are "
                "unchanged. Lower lr or max_grad_norm, or compute in float32"
            )
        waited_s = self._writer.wait()  # a checkpoint that is being written reads these tensors
        for group in self._param_groups():
            group["lr"] = lr
        self._optimizers.step()
        self._optimizers.zero_grad()
        return {"grad_norm": grad_norm, "save_wait_s": waited_s}

    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _clip(self) -> float:
        """Clip the gradients by their global norm. Returns the norm before clipping.

        TorchTitan also multiplies gradients that need no clipping, by 1. The multiplication takes a fifth of the
        optimizer step.
        """
        parameters, max_norm = list(self.model.parameters()), self.config.max_grad_norm
        if self.config.ep > 1:  # experts and other weights are on different meshes
            return float(titan.dist_utils.clip_grad_norm_(parameters, max_norm, foreach=True, ep_enabled=True))
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if (scale := max_norm / (norm + 1e-6)) < 1:
            gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
            # each rank for itself: DTensor derives the layouts of all products at the first step, for seconds
            torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], scale)
        return float(norm)


def _select(hidden_1LD: torch.Tensor, source_S: torch.Tensor) -> torch.Tensor:
    """Hidden states of the positions that predict loss tokens. The head computes only these."""
    if isinstance(hidden_1LD, DTensor):  # tensor parallelism: the output of the last norm is replicated
        mesh = hidden_1LD.device_mesh
        source_S = DTensor.from_local(source_S, mesh, [Replicate()] * mesh.ndim)
    return hidden_1LD.index_select(1, source_S)
