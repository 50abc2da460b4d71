"""The decode engine: a stock checkpoint, a pool of row states, steps that read them once and write them once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapcli.errors import ModelError, UsageError
from lapcli.linearising.plan import holds_conversion
from lapcli.runtime.configurations import (
    Configuration,
    Convertible,
    load_convertible,
    only_configuration,
    storage_bytes,
)
from lapcli.runtime.eager import EagerPlan
from lapcli.runtime.pages import ALL, Kind, Pages
from lapcli.runtime.pieces import Pieces, lengths_within
from lapcli.runtime.plans import Plan, Room, make_plan, why_no_plan
from lapcli.runtime.pools import PagedStates, Slots
from lapcli.runtime.prefill import OwnPrefiller
from lapcli.runtime.sampling import Mode, mode_of
from lapcli.runtime.settings import DecodePath, Event, GenerationSettings
from lapcli.runtime.steps import Span, Steps
from lapkernels.delta_step import why_not
from lapkernels.thin_linear import select_impl as select_thin

KERNELS = ("auto", "reference", "chunked", "triton", "fla")
"""What `--kernel` may say here: `reference` and `triton` choose the state's step, the others the prefill's kernel."""
PREFILL_TOKENS = 8192
"""Tokens of a piece of a prompt: more would not run faster, and take memory for activations."""
DEFAULT_LENGTH = 4096
THIN_ROWS = 1
"""Rows up to which a step's products are made with norms and sums inside: on an H200 cuBLAS is the faster at 4 rows."""


class Prefilled(NamedTuple):
    """A row that can be continued.

    Attributes:
        slot: where its state lies.
        logits: `[vocabulary]`, of the token after the prompt.
    """

    slot: int
    logits: Tensor


class Memory(NamedTuple):
    """What rows may take of the device.

    Attributes:
        total_bytes: of all slots and pages.
        free_bytes: of those that no row has.
    """

    total_bytes: int
    free_bytes: int


@dataclass
class Filling:
    """A prompt that goes through the model piece by piece.

    Attributes:
        slot: where its state will lie.
        tokens: `[1, T]`.
        cache: what the model remembers of the pieces so far.
        seen: tokens of them.
    """

    slot: int
    tokens: Tensor
    cache: Any
    seen: int = 0


class Engine:
    """Decodes rows that come and go, each in a slot of a pool.

    `Engine.load` and `Engine.from_config` make one; `prefill`, `step` and `release` work by hand, `decode` runs many
    steps without waiting for the host, and `generate` (or `lapcli.runtime.batch.Batch`) does all of it.

    Args:
        model: a language model in eval mode, or one in several configurations; its projections become views of fused
            ones.
        max_rows: the most rows at once.
        max_length: the most tokens of a row, where the model has attention layers; others have no limit.
        kv_bytes: that keys and values of all rows together may take, and states of layers that are attention in other
            configurations; default: enough for all at full length. Rows take it in pages as they grow
            (`lapcli.runtime.pages`).
        kernel: see `KERNELS`.
        state_dtype: of recurrent states: fp32, or bf16 to halve them. fp64 models have fp64.
        graphs: whether to capture CUDA graphs; default: on a CUDA device.
        thin: rows of a step, at most, whose norms and sums are done within products (`lapkernels.thin_linear`);
            default: `THIN_ROWS` where that has a compiled kernel, else none.
        few: rows of a step, at most, whose products are those of `lapkernels.few_linear`, 0 for none; default: those of
            the rows and shapes that were measured to be faster than PyTorch's (16 to 64 rows on a Hopper).
        captured_tokens: of a prompt's pass that is a CUDA graph, at most (`lapcli.runtime.pieces`); default: 2048.
        scores: see `lapcli.runtime.sampling.Choices`.

    Attributes:
        device: where.
        dtype: of weights and activations.
        vocabulary: token ids that have logits.
        configurations: of the model, by rising numbers of converted layers; rows may differ in theirs.
        pages: of keys and values, and of such states.

    Raises:
        ModelError: a kernel asked for by name cannot run here, a model in several configurations has no fused step, or
            `kv_bytes` hold no row of `max_length` tokens.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 1,
        max_length: int | None = None,
        kv_bytes: int | None = None,
        kernel: str = "auto",
        state_dtype: torch.dtype = torch.float32,
        graphs: bool | None = None,
        thin: int | None = None,
        few: int | None = None,
        captured_tokens: int | None = None,
        scores: int | None = None,
    ):
        if max_rows < 1:
            raise UsageError(f"max_rows = {max_rows}: an engine has room for 1 row at least")
        self._convertible = model if isinstance(model, Convertible) else None
        model = model.model if isinstance(model, Convertible) else model
        self.model = model.requires_grad_(False)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.max_rows = max_rows
        self.max_length = max_length or longest_row(model.config)
        on_gpu = self.device.type == "cuda"
        graphs = on_gpu if graphs is None else graphs
        if graphs and not on_gpu:
            raise UsageError(f"CUDA graphs need a CUDA device; the model is on {self.device}")
        state_dtype = torch.float64 if self.dtype == torch.float64 else state_dtype
        impl = kernel if kernel in ("reference", "triton") else "auto"
        wrong = why_not(impl, self.device, self.dtype)
        if wrong is not None:
            raise ModelError(f"--kernel {kernel} cannot run the step of a state here: {wrong}", "use --kernel auto")
        if self._convertible is not None:
            self._convertible.configure(self._convertible.numbers[-1])
        room = Room(max_rows, self.max_length, state_dtype, impl, self._convertible)
        why = why_no_plan(model)
        if why is not None and self._convertible is not None:
            raise ModelError(
                f"rows of several configurations need fused steps: {why}",
                "serve one configuration (lapcli convert --export)",
            )
        self.plan: Plan | EagerPlan = make_plan(model, room) if why is None else EagerPlan(model)
        # What waits for the host cannot be captured: the library's own pass, and steps in PyTorch.
        graphs = graphs and why is None and self._step_kernel(impl) == "triton"
        if isinstance(self.plan, Plan):
            compiled = select_thin(self.device, self.dtype).name == "triton"
            self.plan.thin = (THIN_ROWS if compiled else 0) if thin is None else thin
            self.plan.few = few
        if graphs and isinstance(prefiller := self.plan.prefiller, OwnPrefiller):
            prefiller.pieces = Pieces(model, capture=True, lengths=lengths_within(captured_tokens))
        self._path = DecodePath("eager", "", False, why) if why else self._fused_path(impl, graphs)
        self.slots = Slots(max_rows)
        # What rows go through, by how many layers are converted.
        self._kinds = self._kinds_of_rows()
        self.pages = Pages(
            self.plan.attention,
            max_rows,
            self.max_length,
            nbytes=kv_bytes,
            dtype=self.dtype,
            device=self.device,
            states={layer: pool for layer, pool in self.plan.recurrent.items() if isinstance(pool, PagedStates)},
            kinds=list(self._kinds.values()),
        )
        blocks = len(self.pages.states)
        self.steps = Steps(self.plan, max_rows, self.device, capture=graphs, blocks=blocks, scores=scores)
        self.configurations: tuple[Configuration, ...] = (
            (only_configuration(model, self.plan.recurrent, self.plan.attention),)
            if self._convertible is None
            else self._convertible.configurations(self.pages.block * self.pages.page_bytes, self.plan.attention)
        )
        self.vocabulary: int = model.config.get_text_config(decoder=True).vocab_size

    @property
    def path(self) -> DecodePath:
        """What runs a step."""
        pieces = getattr(self.plan.prefiller, "pieces", None)
        failures = {"a step": self.steps.failure, "a prompt": None if pieces is None else pieces.failure}
        said = "".join(f"; {what} could not be captured: {why}" for what, why in failures.items() if why)
        graph = self._path.graph and self.steps.failure is None
        return self._path._replace(graph=graph, reason=self._path.reason + said)

    @classmethod
    def load(
        cls,
        model: Any,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: str = "auto",
        *,
        trust_remote_code: bool = False,
        configurations: Iterable[int] | None = None,
        offload: bool = False,
        **room: Any,
    ) -> "Engine":
        """Load a checkpoint, or a conversion with all its configurations.

        Args:
            model: what the command line takes (a directory, a hub id, `demo:NAME`), the directory of a conversion, or a
                resolved `ModelSource`.
            device: where.
            dtype: of weights and activations.
            kernel: see `KERNELS`.
            trust_remote_code: whether code in the model's directory may run.
            configurations: of a conversion, see `load_convertible`.
            offload: likewise.
            room: further arguments of the engine.

        Raises:
            ArtifactError: a conversion that does not hold what is asked for.
            ModelError: the model cannot be loaded or decoded here.
            UsageError: configurations or offloading are asked for, and the model is no conversion.
        """
        from lapcli.families.loading import ModelSource, load_model, resolve_model

        if not isinstance(model, ModelSource) and holds_conversion(model):
            convertible = load_convertible(
                model,
                device=device,
                dtype=dtype,
                kernel=prefill_kernel(kernel),
                configurations=configurations,
                offload=offload,
            )
            return cls(convertible, kernel=kernel, **room)
        if configurations is not None or offload:
            raise UsageError(
                f"{model} is one model, and configurations or offloading were asked for",
                "name the directory of a conversion (lapcli convert --to dsla --output DIR)",
            )
        source = model if isinstance(model, ModelSource) else resolve_model(str(model))
        loaded = load_model(
            source, device=device, dtype=dtype, kernel=prefill_kernel(kernel), trust_remote_code=trust_remote_code
        )
        return cls(loaded, kernel=kernel, **room)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        kernel: str = "auto",
        **room: Any,
    ) -> "Engine":
        """Make an engine with random weights, without a checkpoint: what it costs does not depend on their values.

        Args:
            config: the document of a `config.json`, with its `model_type`.
            device: where the weights are drawn.
            dtype: of weights and activations.
            seed: of the weights.
            kernel: see `KERNELS`.
            room: further arguments of the engine.

        Raises:
            ModelError: neither lapcli nor transformers knows the type.
        """
        from lapcli.runtime.random_models import random_model

        model = random_model(config, device=torch.device(device), dtype=dtype, seed=seed)
        if hasattr(model, "set_kernel"):
            model.set_kernel(prefill_kernel(kernel))
        return cls(model, kernel=kernel, **room)

    @torch.no_grad()
    def prefill(
        self,
        tokens: Sequence[int],
        slot: int | None = None,
        *,
        piece: int = PREFILL_TOKENS,
        configuration: str | None = None,
    ) -> Prefilled:
        """Run a prompt and keep its state.

        Args:
            tokens: of the prompt, at least one.
            slot: a row that these tokens continue; `None` for a new row.
            piece: tokens a forward pass; more come in several.
            configuration: the name of a new row's; `None` for the first.

        Returns:
            The row's slot, and the logits after its last token.

        Raises:
            ModelError: no slot is free, too few pages are, or the row would be longer than `max_length`.
            UsageError: there is no token, or one is not in the vocabulary; there is no such configuration.
        """
        return self.prefill_rows(
            [tokens], None if slot is None else [slot], piece=piece, configurations=[configuration]
        )[0]

    @torch.no_grad()
    def prefill_rows(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int] | None = None,
        *,
        piece: int = PREFILL_TOKENS,
        configurations: Sequence[str | None] | None = None,
    ) -> list[Prefilled]:
        """Run several prompts; new rows of one length and configuration go through the model together.

        Arguments, results and errors are those of `prefill`, for each row.
        """
        for tokens in prompts:
            self._check_tokens(tokens)
        if slots is not None:
            self.slots.check(slots)
            held = [self.slots.positions[slot] for slot in slots]
            after = [at + len(tokens) for at, tokens in zip(held, prompts, strict=True)]
            self._check_lengths(after)
            self.pages.grow(dict(zip(slots, after, strict=True)))
            return [
                self._run([tokens], self._prefiller(slot).restore(slot, at), [slot], at, piece)[0]
                for tokens, slot, at in zip(prompts, slots, held, strict=True)
            ]
        self._check_lengths([len(tokens) for tokens in prompts])
        if len(prompts) > self.slots.free:
            raise ModelError(
                f"{len(prompts)} new rows, and {self.slots.free} of {self.max_rows} slots are free",
                "release rows, or make the engine with more max_rows",
            )
        taken: list[int] = []
        found: dict[int, Prefilled] = {}
        kinds = [
            (len(tokens), self.converted(name))
            for tokens, name in zip(prompts, configurations or [None] * len(prompts), strict=True)
        ]
        try:
            for length, converted in kinds:
                taken.append(self._open(length, converted))
            for kind in dict.fromkeys(kinds):
                length, converted = kind
                alike = [number for number, found_kind in enumerate(kinds) if found_kind == kind]
                most = min(max(1, piece // length), self.plan.together)
                for start in range(0, len(alike), most):
                    group = alike[start : start + most]
                    mine, where = [prompts[number] for number in group], [taken[number] for number in group]
                    done = self._run(mine, self.plan.prefiller_of(converted).cache(), where, 0, piece)
                    found.update(zip(group, done, strict=True))
        except BaseException:
            for slot in taken:
                self.release(slot)
            raise
        return [found[number] for number in range(len(prompts))]

    @torch.no_grad()
    def prefill_together(self, prompts: Sequence[Sequence[int]]) -> list[Prefilled]:
        """Run new rows of any lengths through the model in one pass, the shorter ones padded.

        `prefill_rows` lets rows of unlike lengths go through one after the other, which takes less memory, and a GPU
        longer. All are rows of the first configuration.

        Args:
            prompts: tokens of each, at least one.

        Raises:
            ModelError: too few slots or pages are free, or a row would be longer than `max_length`.
            UsageError: there is no token, or one is not in the vocabulary.
        """
        if isinstance(self.plan, EagerPlan) or not prompts:
            return self.prefill_rows(prompts)
        for tokens in prompts:
            self.check_prompt(tokens)
        converted = self.converted(None)
        taken: list[int] = []
        lengths = [len(tokens) for tokens in prompts]
        prefiller = self.plan.prefiller_of(converted)
        try:
            for length in lengths:
                taken.append(self._open(length, converted))
            cache = prefiller.cache()
            logits = prefiller.forward_together(prompts, cache)
            prefiller.store_rows(cache, taken, lengths)
        except BaseException:
            for slot in taken:
                self.release(slot)
            raise
        for slot, length in zip(taken, lengths, strict=True):
            self.slots.positions[slot] = length
        return [Prefilled(slot, logits[row]) for row, slot in enumerate(taken)]

    def _open(self, tokens: int, converted: int) -> int:
        """Take a slot for a row of a configuration, and pages for so many tokens."""
        slot = self.slots.take(converted)
        try:
            self.pages.open(slot, self._kinds[converted])
            self.pages.grow({slot: tokens})
        except ModelError:
            self.release(slot)
            raise
        return slot

    def _run(
        self, prompts: Sequence[Sequence[int]], cache: Any, slots: Sequence[int], seen: int, piece: int
    ) -> list[Prefilled]:
        """Run prompts of one length on from a cache, and move what it holds into their slots."""
        tokens = torch.tensor([list(prompt) for prompt in prompts], device=self.device)
        logits, prefiller = None, self._prefiller(slots[0])
        for part in tokens.split(piece, dim=1):
            logits = prefiller.forward(part, cache, seen)
            seen += part.shape[1]
        assert logits is not None
        for row, slot in enumerate(slots):
            self.slots.positions[slot] = seen
            prefiller.store(cache, row, slot, seen)
        return [Prefilled(slot, logits[row]) for row, slot in enumerate(slots)]

    def begin(self, tokens: Sequence[int], configuration: str | None = None) -> Filling:
        """Take room for a prompt that `fill` takes in piece by piece; `release` of its slot gives it up.

        Raises:
            ModelError: no slot is free, too few pages are, or the row would be longer than `max_length`.
            UsageError: there is no token, or one is not in the vocabulary; there is no such configuration.
        """
        self.check_prompt(tokens)
        converted = self.converted(configuration)
        on_device, cache = torch.tensor([list(tokens)], device=self.device), self.plan.prefiller_of(converted).cache()
        return Filling(self._open(len(tokens), converted), on_device, cache)

    @torch.no_grad()
    def fill(self, filling: Filling, count: int) -> Prefilled | None:
        """Take in the next `count` tokens of a prompt, or as many as are left.

        Between two pieces the rows of other slots may go on. A piece that failed leaves what is remembered undefined:
        release the slot and begin anew.

        Returns:
            The row, once all of it was taken in; else `None`.
        """
        part = filling.tokens[:, filling.seen : filling.seen + count]
        prefiller = self._prefiller(filling.slot)
        logits = prefiller.forward(part, filling.cache, filling.seen)
        filling.seen += part.shape[1]
        if filling.seen < filling.tokens.shape[1]:
            return None
        self.slots.positions[filling.slot] = filling.seen
        prefiller.store(filling.cache, 0, filling.slot, filling.seen)
        return Prefilled(filling.slot, logits[0])

    def occupy(self, rows: int, position: int, configuration: str | None = None) -> list[int]:
        """Take slots for rows that pretend to have seen `position` tokens, all states zero: for measuring steps.

        Raises:
            ModelError: too few slots or pages are free, or the rows would be longer than `max_length`.
            UsageError: there is no such configuration.
        """
        self._check_lengths([position])
        converted = self.converted(configuration)
        taken = [self._open(position, converted) for _ in range(rows)]
        for slot in taken:
            self.slots.positions[slot] = position
            self.plan.clear(slot)
            self.pages.clear(slot)
        return taken

    def reserve(self, slots: Sequence[int], tokens: int) -> None:
        """Take pages for rows that are to have so many tokens, so that steps need no more of the host until then.

        Raises:
            ModelError: a slot holds no row, too few pages are free, or the rows would be longer than `max_length`.
        """
        self.slots.check(slots)
        self._check_lengths([tokens])
        self.pages.grow(dict.fromkeys(slots, tokens))

    def copy(self, source: int, target: int) -> None:
        """Let a row hold what another one of as many tokens holds: for measuring steps of many rows alike."""
        self.plan.copy(source, target)
        self.pages.copy(source, target)

    @torch.no_grad()
    def step(self, tokens: Sequence[int] | Tensor, slots: Sequence[int] | None = None) -> Tensor:
        """Take one token of each row in.

        Args:
            tokens: `[B]`, one for each of `slots`.
            slots: the rows, each once; default: all, in the order of their slots.

        Returns:
            Logits `[B, vocabulary]`, in the dtype that the model gives them; valid until the next step.

        Raises:
            ModelError: a slot holds no row, or the row has no room left, or too few pages are free.
            UsageError: there are not as many tokens as rows, or a row twice.
        """
        slots = sorted(self.slots.positions) if slots is None else list(slots)
        self._ready(tokens, slots, 1)
        logits = self.steps.run(len(slots), "logits", longest=self._longest(slots))
        for slot in slots:
            self.slots.positions[slot] += 1
        return logits

    @torch.no_grad()
    def decode(
        self,
        tokens: Sequence[int] | Tensor,
        steps: int,
        slots: Sequence[int] | None = None,
        mode: Mode = "greedy",
        *,
        watch: Callable[[Tensor, Tensor], None] | None = None,
        at_least: int = 1,
    ) -> Tensor:
        """Run many steps, each on the tokens that the one before chose, without waiting for the host.

        Args:
            tokens: `[B]`, the first tokens to take in.
            steps: how many.
            slots: the rows; default: all.
            mode: how tokens are chosen; other than `greedy` reads `steps.choices`.
            watch: given each step's logits `[B, vocabulary]` and the tokens chosen, which the next step overwrites.
            at_least: rows that a step is run for, so that few rows need no graph of their own.

        Returns:
            The tokens chosen, `[steps, B]`, on the device.

        Raises:
            ModelError: a slot holds no row, or a row has no room for so many steps, or too few pages are free.
            UsageError: there are not as many tokens as rows, a row twice, or `mode` chooses nothing.
        """
        if mode == "logits":
            raise UsageError("decode chooses tokens: greedy, draw or filtered")
        slots = sorted(self.slots.positions) if slots is None else list(slots)
        self._ready(tokens, slots, steps)
        found = torch.empty(steps, len(slots), dtype=torch.int64, device=self.device)
        rows = max(len(slots), min(at_least, self.max_rows))
        for number in range(steps):
            logits = self.steps.run(rows, mode, longest=self._longest(slots))
            found[number] = self.steps.tokens[: len(slots)]
            if watch is not None:
                watch(logits[: len(slots)], found[number])
            for slot in slots:
                self.slots.positions[slot] += 1
        return found

    def release(self, slot: int) -> None:
        """End a row; its slot may be taken again, and nothing of it remains for the next.

        Raises:
            ModelError: the slot holds no row.
        """
        self.slots.give_back(slot)
        self.pages.close(slot)
        self.plan.forget(slot)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | Sequence[GenerationSettings],
        tokenizer: Any = None,
    ) -> Iterator[Event]:
        """Continue prompts, as many at once as there is room for, and yield what comes as it comes.

        Args:
            prompts: token ids of each.
            settings: of all, or of each.
            tokenizer: for text and stop texts.

        Yields:
            Events; the last one of each row says why it ended.

        Raises:
            ModelError: a prompt does not fit.
            UsageError: a prompt is empty, or a stop text is given without a tokenizer.
        """
        from lapcli.runtime.batch import Batch

        batch = Batch(self, tokenizer)
        each = [settings] * len(prompts) if isinstance(settings, GenerationSettings) else list(settings)
        for tokens, wanted in zip(prompts, each, strict=True):
            batch.add(tokens, wanted)
        while batch.unfinished:
            yield from batch.advance()

    def warm_up(self, rows: Sequence[int], settings: GenerationSettings) -> None:
        """Capture what steps for so many rows with such settings will need, before any row waits for it.

        Of a model in several configurations: steps of rows of each, and of rows of all. Other mixtures are captured
        when they first come.
        """
        mode = mode_of(settings.temperature, settings.top_k, settings.top_p)
        numbers = [configuration.converted for configuration in self.configurations]
        spans: list[Span] = [None] if self._convertible is None else [(number, number) for number in numbers]
        if len(numbers) > 1:
            spans.append((numbers[0], numbers[-1]))
        self.steps.warm_up(rows, [mode], spans)

    def warm_up_for_all(self) -> None:
        """Capture for each number of rows the step that is enough for any, and from now on others when they come.

        The first step of a kind that has no graph of its own has to wait until it is captured, but for no longer than
        that, and not while captures would take more than a twentieth of the time: then it runs as the one for any rows.
        """
        self.steps.seldom = True
        # The largest first: others find room in the memory that it leaves, and not the other way round.
        self.steps.warm_up(self.steps.buckets[::-1], ["filtered"], [self.widest])

    @property
    def widest(self) -> Span:
        """What any step's rows are within."""
        if self._convertible is None:
            return None
        return self.configurations[0].converted, self.configurations[-1].converted

    def nbytes(self) -> dict[str, int]:
        """Bytes on the device: `weights`, and of all rows `states`, `convolutions` and `attention`, keys and values.

        States of layers that are attention in other configurations lie among keys and values.
        Where projections lie beside the device, `offloaded` says how many bytes those are, and `weights` has the places
        that they come to.
        """
        tensors = (*self.model.parameters(), *self.model.buffers())
        beside: dict[str, int] = {}
        if self._convertible is not None:
            tensors = tuple(self._convertible.tensors())
            if self._convertible.offload is not None:
                beside["offloaded"] = self._convertible.offload.nbytes
        recurrent = self.plan.recurrent.values()
        return {
            "weights": storage_bytes(tensors),
            "states": sum(tensor.nbytes for pool in recurrent for tensor in pool.tensors()[:1]),
            "convolutions": sum(tensor.nbytes for pool in recurrent for tensor in pool.tensors()[1:]),
            "attention": self.pages.content.nbytes,
            **beside,
        }

    @property
    def convertible(self) -> Convertible | None:
        """The model's configurations, where it may come in several."""
        return self._convertible

    @property
    def layer_bytes(self) -> tuple[int, int]:
        """Bytes of the weights of a layer as attention, and as states; none where no layer is both."""
        return (0, 0) if self._convertible is None else self._convertible.layer_bytes

    def converted(self, configuration: str | None) -> int:
        """The number of converted layers of a configuration, of the first one for `None`.

        Raises:
            UsageError: there is none of this name.
        """
        if configuration is None:
            return self.configurations[0].converted
        for each in self.configurations:
            if each.name == configuration:
                return each.converted
        raise UsageError(
            f"no configuration {configuration!r}; there are {', '.join(each.name for each in self.configurations)}"
        )

    def set_rows(self, tokens: Sequence[int] | Tensor, slots: Sequence[int]) -> None:
        """Say to the device which rows the next steps are for."""
        positions = [self.slots.positions[slot] for slot in slots]
        mix = None if self._convertible is None else [self.slots.converted[slot] for slot in slots]
        self.steps.set_rows(tokens, slots, positions, mix, self.pages.blocks_of(slots))

    @property
    def memory(self) -> Memory:
        """What rows may take, and what is free of it."""
        slot, page = self.slot_bytes, self.pages.page_bytes
        total = self.max_rows * slot + self.pages.count * page
        return Memory(total, self.slots.free * slot + self.pages.free * page)

    def row_bytes(self, tokens: int, configuration: str | None = None) -> int:
        """Bytes of a row of so many tokens: its slot, and whole pages; of a configuration, of the first for `None`."""
        return self.slot_bytes + self.pages_of(tokens, configuration) * self.pages.page_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row's slot, which it has whatever its configuration and however few its tokens."""
        return sum(pool.slot_bytes for pool in self.plan.recurrent.values())

    def pages_of(self, tokens: int, configuration: str | None = None) -> int:
        """Pages of a row of so many tokens; of a configuration, of the first for `None`."""
        return self.pages.need(tokens, self._kinds[self.converted(configuration)])

    def blocks_of(self, configuration: str | None = None) -> int:
        """Blocks of pages for the states of a row of a configuration, of the first for `None`."""
        return len(self._kinds[self.converted(configuration)].states)

    def _kinds_of_rows(self) -> dict[int, Kind]:
        if self._convertible is None:
            return {0: ALL}
        order, attention = self._convertible.order, self.plan.attention
        return {
            number: Kind([layer for layer in attention if layer not in order[:number]], order[:number])
            for number in self._convertible.numbers
        }

    @property
    def limited(self) -> bool:
        """Whether a row may have `max_length` tokens at most."""
        return bool(self.plan.attention)

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Refuse a prompt that cannot become a row.

        Raises:
            UsageError: it has no token, or one that is not in the vocabulary.
            ModelError: it is longer than a row may be.
        """
        self._check_tokens(tokens)
        self._check_lengths([len(tokens)])

    def _fused_path(self, impl: str, graphs: bool) -> DecodePath:
        """What is fused, in a few words."""
        parts = [
            _counted(len(pools), *names)
            for pools, names in (
                (self.plan.recurrent, ("layer with a state", "layers with a state")),
                (self.plan.attention, ("attention layer", "attention layers")),
            )
            if pools
        ]
        why = "" if self.device.type == "cuda" else "; without a GPU they run in PyTorch"
        if self._convertible is not None:
            why += f"; rows in any of {len(self._convertible.numbers)} configurations"
        return DecodePath("fused", self._step_kernel(impl), graphs, ", ".join(parts) + why)

    def _step_kernel(self, impl: str) -> str:
        """What runs the steps of states, or of attention where nothing has a state; the slowest where they differ."""
        if impl != "auto":
            return impl
        assert isinstance(self.plan, Plan)
        found = {select(self.device, self.dtype).name for select in self.plan.kernels}
        return next(iter(found)) if len(found) == 1 else "reference"

    def _longest(self, slots: Sequence[int]) -> int:
        return max(self.slots.positions[slot] for slot in slots) + 1

    def _ready(self, tokens: Sequence[int] | Tensor, slots: Sequence[int], steps: int) -> None:
        """Check the rows of a step and say them to the device."""
        if len(tokens) != len(slots):
            raise UsageError(f"{len(tokens)} tokens for {len(slots)} rows; each row takes one")
        if len(set(slots)) != len(slots):
            raise UsageError("a row is in the step twice")
        self.slots.check(slots)
        positions = [self.slots.positions[slot] for slot in slots]
        after = [position + steps for position in positions]
        self._check_lengths(after)
        self.pages.grow(dict(zip(slots, after, strict=True)))
        self.set_rows(tokens, slots)

    def _prefiller(self, slot: int) -> Any:
        """The forward pass of a row's configuration."""
        return self.plan.prefiller_of(self.slots.converted[slot])

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        longest = max(lengths, default=0)
        if self.limited and longest > self.max_length:
            raise ModelError(
                f"a row of {longest} tokens; the attention layers have room for {self.max_length}",
                "shorten the prompt, or make the engine with a larger max_length",
            )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise UsageError("a prompt without a token; it takes one at least (a BOS token, say)")
        if not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise UsageError(
                f"a prompt has the token ids {min(tokens)} to {max(tokens)}; the model embeds 0 to "
                f"{self.vocabulary - 1}"
            )


def longest_row(config: Any) -> int:
    """Tokens of a row where nobody says: what the model was made for, at most `DEFAULT_LENGTH`."""
    made_for = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(DEFAULT_LENGTH, made_for) if isinstance(made_for, int) and made_for > 1 else DEFAULT_LENGTH


def _counted(count: int, one: str, many: str) -> str:
    return f"1 {one}" if count == 1 else f"{count} {many}"


def prefill_kernel(kernel: str) -> str:
    """What of `--kernel` is for the prefill of lapcli's own models."""
    return "auto" if kernel == "triton" else kernel
