"""Time the products of a decode step of 16 to 64 rows by many ways, and what reading their matrices must take.

`PYTHONPATH=kernels python -m benchmarks.few_rows --output FILE.jsonl [--budget SECONDS] [--warm N] [--groups ...]`, in
the repository's root, on a GPU. The layers are those of the Gated DeltaNet of `lapcli bench decode`, half of whose keys
are gone. A time is that of one of a chain of products in a CUDA graph, each of which waits for the one before, as in a
model, with matrices that no cache holds; ours may ask for their matrix before that. A way that is wrong, on two
matrices, has no time. The groups run one after the other in processes of their own, so that one that fails or hangs
costs its own rows alone:

cublas  F.linear, other settings of it, its operands swapped, splits by `torch.bmm`, pieces on streams, padding
lt      every kernel that cuBLASLt's heuristics would choose from
triton  `lapkernels.few_linear` in Triton: its choice, and other configurations
gluon   the same in Gluon
block   blocks' four products with norms and activations between, as the runtime has them, by `few_linear` and F.linear;
        with and without the activation in the product of gate and up
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lapkernels import timing
from lapkernels._triton import is_interpreted
from lapkernels.few_linear.configs import FEWEST, PROCESSORS, FewConfig, choose
from lapkernels.testing import poisoned

ROWS = (64, 16, 32)
GROUPS = ("cublas", "triton", "lt", "gluon", "block")
SHARES = {"cublas": 0.22, "triton": 0.27, "lt": 0.16, "gluon": 0.27, "block": 0.08}
"""Of the budget; what a group does not use is left to the next ones."""
_ALLOWED = 2**-8
"""Relative error in the mean square: a result that is rounded to bf16 once has at most 2^-9."""
_LONGEST = 10.0
"""Seconds past its budget that a group may take before it counts as hung."""
_START = 90.0
"""Seconds in which a group must be ready to begin."""

_NORMED = ("output", "down")
"""Layers whose results go into the stream, which a norm reads next."""
_BLOCKS = 8
"""In a chain: their matrices together are far more than a cache holds."""

Way = Callable[[Tensor, Tensor], Tensor]


class Layer(NamedTuple):
    """`outputs x width`; `real` of its rows are no padding."""

    name: str
    outputs: int
    width: int
    real: int


class Cell(NamedTuple):
    """One layer and number of rows: x, as many matrices as no cache holds, and the truth of the first two.

    The matrices have more rows than the layer, for ways that read padding.
    """

    layer: Layer
    x: Tensor
    weights: list[Tensor]
    truths: list[Tensor]

    def whole(self) -> list[Tensor]:
        """The layer's matrices."""
        return [weight[: self.layer.outputs] for weight in self.weights]


def layers() -> list[Layer]:
    """Of the model that `lapcli bench` measures, as its runtime fuses them: those read most first."""
    from lapcli.benchmarks.speed.configs import CONFIGS, subject
    from lapcli.models.decoder import mlp_width
    from lapcli.models.gated_deltanet import GatedDeltaNetConfig

    model = subject("gdn", CONFIGS["gdn"], "0.5")
    config: Any = GatedDeltaNetConfig(**model.config)
    width, inner = config.hidden_size, mlp_width(config)
    values = model.value_heads * model.value_width
    inputs = 2 * model.key_heads * model.key_width + 2 * values + 2 * model.value_heads
    return [
        Layer("gate and up", 2 * inner, width, 2 * inner),
        Layer("down", width, inner, width),
        Layer("output", width, values, width),
        Layer("inputs", _up(inputs, 64), width, inputs),
        Layer("head", config.vocab_size, width, config.vocab_size),
    ]


TOY = [
    Layer("gate and up", 320, 64, 320),
    Layer("down", 64, 160, 64),
    Layer("output", 64, 640, 64),
    Layer("inputs", 704, 64, 700),
]

SHAPES = [(64, 64, 100), (128, 64, 100), (128, 64, 200), (64, 128, 200), (64, 64, 200)]
"""Of the configurations beside the choice: rows of the matrix, depth of a step, KiB."""
FILLS = (1, 0.5)
"""Programs for each processor, about, which splits bring about."""
LANGUAGES = ("triton", "gluon")


def main() -> int:
    """Read the arguments and run the groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, written as they are made")
    parser.add_argument(
        "--budget", type=float, default=70.0, help="seconds of measuring; starting takes some 15 more (70)"
    )
    parser.add_argument("--warm", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile")
    parser.add_argument("--groups", default=",".join(GROUPS), help="comma-separated, in their order")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of x, comma-separated, the first ones first")
    parser.add_argument("--layers", help="by name, comma-separated; default: all")
    parser.add_argument("--toy", action="store_true", help="small layers, wherever kernels can run")
    options = parser.parse_args()
    options.output.write_text("")
    groups, rows = options.groups.split(","), [int(each) for each in options.rows.split(",")]
    if unknown := [each for each in groups if each not in GROUPS]:
        parser.error(f"--groups {','.join(unknown)}: there are {', '.join(GROUPS)}")
    if not (torch.cuda.is_available() or options.toy):
        sys.exit("no CUDA device; set TRITON_INTERPRET=1 and pass --toy to try the script on a CPU")
    known = TOY if options.toy else layers()
    chosen = [each for each in known if options.layers is None or each.name in options.layers.split(",")]
    if not chosen:
        parser.error(f"--layers {options.layers}: there are {', '.join(each.name for each in known)}")
    _in_processes(groups, chosen, rows, options)
    return summary(options.output)


def _in_processes(groups: list[str], chosen: list[Layer], rows: list[int], options: argparse.Namespace) -> None:
    """Each group in a process of its own, which waits, ready, for its turn; kernels are compiled beside them."""
    spawn = multiprocessing.get_context("spawn")
    running = {}
    for group in groups:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_run_group, args=(group, chosen, rows, options.output, theirs), daemon=True)
        process.start()
        running[group] = process, ours
    pool = _compile_ahead(options.warm, [(each, chosen, rows) for each in groups if each in LANGUAGES])
    ready = [group for group in groups if _answer(running[group], _START) == "ready"]
    begun = time.monotonic()
    for place, group in enumerate(groups):
        process, connection = running[group]
        share = SHARES[group] / sum(SHARES[each] for each in groups[place:])
        # One that hung before leaves the others half of what they would have had, at least.
        left = (options.budget - (time.monotonic() - begun)) * share
        budget = max(left, options.budget * SHARES[group] / 2)
        answer = "it never was ready"
        if group in ready:
            connection.send(budget)
            answer = _answer((process, connection), budget + _LONGEST)
        if answer != "done":
            _write(options.output, {"group": group, "failed": f"the group did not end: {answer}"})
        process.kill()
    if pool is not None:
        pool.shutdown(wait=False, cancel_futures=True)


def _compile_ahead(processes: int, work: list[tuple[str, list[Layer], list[int]]]) -> ProcessPoolExecutor | None:
    """Begin to compile what will be launched, in the order in which it will be."""
    if is_interpreted() or not torch.cuda.is_available() or processes < 1:
        return None
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin_compiling)
    for language, chosen, rows in work:
        for number in rows:
            for layer in chosen:
                for apart, config in plans(language, layer):
                    pool.submit(_compile, language, apart, config, layer, number)
    return pool


def _answer(of: tuple[Any, Any], seconds: float) -> str:
    """What a group's process says within so many seconds, or what became of it."""
    process, connection = of
    try:
        if connection.poll(seconds):
            return connection.recv()
    except (EOFError, OSError):
        process.join(5)
        return f"its process ended with {process.exitcode}"
    return f"nothing for {seconds:.0f} s"


def _begin_compiling() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    from lapkernels.offline import compile_only

    compile_only(90)


def plans(language: str, layer: Layer) -> list[tuple[bool, FewConfig]]:
    """Whether the sum is left to the reader, and how the product is cut: the choices of both kinds first."""
    found = [(apart, choose(language, layer.outputs, layer.width, apart)) for apart in (False, True)]
    for outputs, depth, room in SHAPES:
        tiles, steps = -(-layer.outputs // outputs), -(-layer.width // depth)
        splits = [max(1, min(int(PROCESSORS * fill / tiles), steps // FEWEST)) for fill in FILLS]
        found += [(False, FewConfig(outputs, depth, room))]
        found += [(True, FewConfig(outputs, depth, room, number)) for number in splits]
    return [plan for plan in dict.fromkeys(found) if plan[0] <= (plan[1].splits > 1)]


def _compile(language: str, apart: bool, config: FewConfig, layer: Layer, rows: int) -> None:
    """Into triton's cache; what fails here fails again where it is measured, and is reported there."""
    x = torch.empty(rows, layer.width, dtype=torch.bfloat16)
    weight = torch.empty(layer.outputs, layer.width, dtype=torch.bfloat16)
    with suppress(Exception):
        _product(language, apart, config)(x, weight)


def _product(language: str, apart: bool, config: FewConfig) -> Way:
    if language == "gluon":
        from lapkernels.few_linear.gluon_few import few_linear_gluon

        return lambda x, weight: few_linear_gluon(x, weight, None, 1.0, apart, True, config)
    from lapkernels.few_linear.triton_few import few_linear_triton

    return lambda x, weight: few_linear_triton(x, weight, None, 1.0, apart, config)


def _activated(language: str) -> Way:
    if language == "gluon":
        from lapkernels.few_linear.gluon_few import few_swiglu_gluon

        return lambda x, weight: few_swiglu_gluon(x, weight, None, True)
    from lapkernels.few_linear.triton_few import few_swiglu_triton

    return lambda x, weight: few_swiglu_triton(x, weight, None)


def _run_group(group: str, chosen: list[Layer], rows: list[int], output: Path, connection: Any) -> None:
    """Measure a group, in this process, once the other end of the connection says for how many seconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # bf16 products of the interpreter are wrong (triton issue 11584).
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    matrices = {layer: _matrices(layer, device, dtype) for layer in chosen}
    timing.synchronize(device)
    connection.send("ready")
    budget = connection.recv()
    begun, rate = time.monotonic(), timing.copy_bandwidth(device)

    def left() -> float:
        return budget - (time.monotonic() - begun)

    facts = {"group": group, "copy": rate, "torch": torch.__version__, "cuda": torch.version.cuda}
    _write(output, facts | {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"})
    if group == "block":
        for number in rows:
            if left() > 0:
                _blocks(number, matrices, output, rate)
    else:
        # A way's first rows on all layers tell more than all ways on one.
        cells = [_cell(layer, matrices[layer], number) for number in rows for layer in chosen]
        turns = [_ways(group, cell) for cell in cells]
        while turns and left() > 0:
            for cell, ways in zip(list(cells), list(turns), strict=True):
                if left() <= 0:
                    break
                try:
                    found = next(ways, None)
                except Exception as error:
                    named = {"group": group, "layer": cell.layer.name, "rows": len(cell.x)}
                    _write(output, named | {"failed": _brief(error)})
                    found = None
                if found is None:
                    cells.remove(cell)
                    turns.remove(ways)
                else:
                    _measure(group, cell, *found, output, rate)
    seconds = time.monotonic() - begun
    _write(output, {"group": group, "seconds": seconds, "budget": budget, "all": left() > 0})
    connection.send("done")


def _matrices(layer: Layer, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """With rows to spare for ways that read padding."""
    count = max(2, timing.copies(2 * layer.outputs * layer.width, device))
    generator = torch.Generator(device).manual_seed(layer.outputs)
    shape = (max(_up(layer.outputs, 256), _balanced(layer)), layer.width)
    scale = layer.width**-0.5
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale) for _ in range(count)]


def _cell(layer: Layer, weights: list[Tensor], rows: int) -> Cell:
    generator = torch.Generator(weights[0].device).manual_seed(rows)
    x = torch.randn(rows, layer.width, generator=generator, device=weights[0].device).to(weights[0].dtype)
    truths = [x.float() @ weight[: layer.outputs].float().T for weight in weights[:2]]
    return Cell(layer, x, weights, truths)


def _ways(group: str, cell: Cell) -> Iterator[tuple[str, Way, list[Tensor], dict[str, Any]]]:
    """Ways by name, the matrices that each reads, and what else is to be known of it."""
    if group == "cublas":
        for name, way, weights in _by_cublas(cell):
            yield name, way, weights, {}
    elif group == "lt":
        yield from _by_lt(cell)
    else:
        layer = cell.layer
        for apart, config in plans(group, layer):
            name = f"{config.outputs}x{config.depth} {config.room}K splits {config.splits}{' apart' if apart else ''}"
            if config == choose(group, layer.outputs, layer.width, apart):
                name += ", the choice"
            yield name, _product(group, apart, config), cell.whole(), {"apart": apart, "config": config._asdict()}


def _by_cublas(cell: Cell) -> Iterator[tuple[str, Way, list[Tensor]]]:
    layer, weights = cell.layer, cell.whole()
    rows = len(cell.x)
    yield "linear", F.linear, weights
    yield "swapped", lambda x, w: torch.mm(w, x.t()).t(), weights
    if cell.x.is_cuda:
        for splits in (2, 4):
            yield f"bmm {splits}, summed", partial(_split, splits, True), weights
            yield f"bmm {splits}, apart", partial(_split, splits, False), weights
        other = not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        yield f"linear, sums in {'bf16' if other else 'fp32'}", _set(_sums(other), F.linear), weights
        yield "linear, library cublaslt", _set(_library("cublaslt"), F.linear), weights
        for pieces in (2, 3):
            yield f"{pieces} streams", partial(_on_streams, [torch.cuda.Stream() for _ in range(pieces - 1)]), weights
    if layer.real < layer.outputs:
        yield f"{layer.real} columns", F.linear, [each[: layer.real] for each in weights]
    for padded in sorted({_up(layer.outputs, 256), _balanced(layer)} - {layer.outputs}):
        yield f"padded to {padded} columns", F.linear, [each[:padded] for each in cell.weights]
    if rows < 64:
        more = torch.cat([cell.x, cell.x.new_zeros(64 - rows, layer.width)])
        yield "64 rows", lambda x, w: F.linear(more, w)[:rows], weights


def _split(splits: int, summed: bool, x: Tensor, weight: Tensor) -> Tensor:
    """D cut into parts, each a product of a batch, in fp32."""
    parts = x.unflatten(1, (splits, -1)).transpose(0, 1)
    shares = torch.bmm(parts, weight.unflatten(1, (splits, -1)).permute(1, 2, 0), out_dtype=torch.float32)
    return shares.sum(0).to(x.dtype) if summed else shares


def _on_streams(streams: list[Any], x: Tensor, weight: Tensor) -> Tensor:
    """Columns in equal pieces, at the same time; they are not put together, as their reader could do without."""
    now = torch.cuda.current_stream()
    pieces = weight.split(_up(-(-len(weight) // (len(streams) + 1)), 64))
    found = []
    for stream, piece in zip(streams, pieces[1:], strict=True):
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            found.append(F.linear(x, piece))
    found.insert(0, F.linear(x, pieces[0]))
    for stream in streams:
        now.wait_stream(stream)
    return Pieces(found)  # pyright: ignore[reportReturnType]


class Pieces(list):  # pyright: ignore[reportMissingTypeArgument]
    """Columns of a result, apart."""


def _sums(reduced: bool) -> Callable[[], Any]:
    """Whether cuBLAS may add in less than fp32."""

    @contextmanager
    def chosen() -> Iterator[None]:
        matmul: Any = torch.backends.cuda.matmul
        before = matmul.allow_bf16_reduced_precision_reduction
        matmul.allow_bf16_reduced_precision_reduction = reduced
        try:
            yield
        finally:
            matmul.allow_bf16_reduced_precision_reduction = before

    return chosen


def _library(name: str) -> Callable[[], Any]:
    @contextmanager
    def chosen() -> Iterator[None]:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(name)
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return chosen


def _set(setting: Callable[[], Any], way: Way) -> Way:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        with setting():
            return way(x, weight)

    return call


def _by_lt(cell: Cell) -> Iterator[tuple[str, Way, list[Tensor], dict[str, Any]]]:
    from benchmarks._few_rows_lt import LtProduct

    product = LtProduct(len(cell.x), cell.layer.outputs, cell.layer.width, cell.x.stride(0))
    for number, found in enumerate(product.found):
        facts = {"waves": found.waves, "workspace": found.workspace, "kernels": len(product.found)}
        yield product.name(number), partial(product, number), cell.whole(), facts


def _measure(
    group: str, cell: Cell, name: str, way: Way, weights: list[Tensor], more: dict[str, Any], output: Path, rate: float
) -> None:
    """Check one way and time it."""
    device = cell.x.device
    floor = cell.whole()[0].nbytes / rate
    facts: dict[str, Any] = {"group": group, "layer": cell.layer.name, "rows": len(cell.x), "way": name, **more}
    try:
        errors = []
        for weight, truth in zip(weights[:2], cell.truths, strict=True):
            with poisoned():
                first = _joined(way(cell.x, weight), truth)
                again = _joined(way(cell.x, weight), truth)
            facts["repeatable"] = facts.get("repeatable", True) and torch.equal(first, again)
            errors.append(float((first - truth[:, : first.shape[1]]).norm() / truth.norm()))
        facts["error"] = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
        # Written so that NaN is wrong.
        if not facts["error"] <= _ALLOWED:
            facts["failed"] = "wrong"
        else:
            calls = [partial(way, cell.x, weight) for weight in _around(weights, 12)]
            took = _timed(calls, device)
            facts |= {"us": 1e6 * took.seconds, "spread": took.spread}
            facts |= {"floor_us": 1e6 * floor, "of_floor": took.seconds / floor}
    except Exception as error:
        facts["failed"] = _brief(error)
    _write(output, facts)
    if device.type == "cuda":
        # An error that the device keeps would be every later way's: it ends the process here.
        torch.cuda.synchronize()


def _timed(calls: list[Callable[[], Any]], device: torch.device) -> timing.Timing:
    """A chain in one graph; elsewhere than on a GPU only whether it runs is of interest."""
    if device.type != "cuda":
        return timing.measure(calls[:1], device, warmup=0, repeats=1, trials=1)
    return timing.measure(calls, device, warmup=2, repeats=12, trials=2, graph=True)


def _joined(found: Any, truth: Tensor) -> Tensor:
    """A result in fp32, as far as there is truth: pieces side by side, shares summed, padding left out."""
    if isinstance(found, Pieces):
        found = torch.cat(found, 1)
    if found.dim() == 3:
        found = found.sum(0)
    return found[:, : truth.shape[1]].float()


def _around(weights: list[Tensor], least: int) -> list[Tensor]:
    """All of them, as often as it takes to be so many: a chain whose ends count little."""
    return weights * -(-least // len(weights))


def _blocks(rows: int, matrices: dict[Layer, list[Tensor]], output: Path, rate: float) -> None:
    """Blocks without what is between their first two products, a slice of the one as the other's input."""
    by_name = {layer.name: [each[: layer.outputs] for each in found] for layer, found in matrices.items()}
    parts = ("inputs", "output", "gate and up", "down")
    if not all(part in by_name for part in parts):
        return
    blocks = [{part: by_name[part][number % len(by_name[part])] for part in parts} for number in range(_BLOCKS)]
    device = blocks[0]["down"].device
    nbytes = sum(weight.nbytes for weight in blocks[0].values())
    start = torch.randn(rows, len(blocks[0]["down"]), device=device).to(blocks[0]["down"].dtype)
    gain = torch.ones(start.shape[1], device=device, dtype=start.dtype)
    truth = _cublas_blocks(blocks, start, gain).float()
    ways: list[tuple[str, Callable[[], Tensor]]] = [("linear", partial(_cublas_blocks, blocks, start, gain))]
    for language in LANGUAGES:
        for everything, gated in product((True, False), (True, False)):
            name = f"{language}{'' if everything else ', where faster'}{'' if gated else ', activations apart'}"
            ways.append((name, _own_blocks(language, everything, gated, blocks, start, gain)))
    for name, run in ways:
        facts: dict[str, Any] = {"group": "block", "layer": "block", "rows": rows, "way": name}
        try:
            with poisoned():
                found = run().float()
            facts["error"] = float((found - truth).norm() / truth.norm())
            # The two round in other places: each of the products and sums of a few blocks, once or twice.
            if not facts["error"] <= 0.02:
                facts["failed"] = "wrong"
            else:
                took = _timed([run], device).seconds / _BLOCKS
                floor = nbytes / rate
                facts |= {"us": 1e6 * took, "floor_us": 1e6 * floor, "of_floor": took / floor}
        except Exception as error:
            facts["failed"] = _brief(error)
        _write(output, facts)


def _cublas_blocks(blocks: list[dict[str, Tensor]], start: Tensor, gain: Tensor) -> Tensor:
    """As the runtime has it."""
    from lapkernels.norm import rms_norm, swiglu

    stream, normed = start, rms_norm(start, gain).output
    for block in blocks:
        mixed = F.linear(normed, block["inputs"])[:, : block["output"].shape[1]]
        normed, stream = rms_norm(F.linear(mixed, block["output"]), gain, residual=stream)
        inner = swiglu(F.linear(normed, block["gate and up"]))
        normed, stream = rms_norm(F.linear(inner, block["down"]), gain, residual=stream)
    return stream


def _own_blocks(
    language: str, everything: bool, gated: bool, blocks: list[dict[str, Tensor]], start: Tensor, gain: Tensor
) -> Callable[[], Tensor]:
    """The same by our kernels, all of the products or those that `few_linear` has for faster; norms add the splits."""
    from lapkernels.few_linear.configs import beats_cublas
    from lapkernels.norm import rms_norm, swiglu

    def ours(part: str, gated: bool = False) -> bool:
        (outputs, width), apart = blocks[0][part].shape, part in _NORMED
        return everything or beats_cublas(language, len(start), outputs, width, apart, gated=gated)

    products: dict[str, Way] = {}
    for part, weight in blocks[0].items():
        apart = part in _NORMED
        config = choose(language, len(weight), weight.shape[1], apart)
        products[part] = _product(language, apart, config) if ours(part) else F.linear
    whole = products["gate and up"]
    activated = _activated(language) if gated and ours("gate and up", True) else lambda x, w: swiglu(whole(x, w))

    def run() -> Tensor:
        stream, normed = start, rms_norm(start, gain).output
        for block in blocks:
            mixed = products["inputs"](normed, block["inputs"])[:, : block["output"].shape[1]]
            added = products["output"](mixed, block["output"])
            normed, stream = rms_norm(added, gain, residual=stream, shares=added.ndim == 3, dtype=start.dtype)
            inner = activated(normed, block["gate and up"])
            added = products["down"](inner, block["down"])
            normed, stream = rms_norm(added, gain, residual=stream, shares=added.ndim == 3, dtype=start.dtype)
        return stream

    return run


def _read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def summary(output: Path) -> int:
    """Print each layer's best of each group; 1 when something was wrong."""
    rows = _read(output)
    timed = [row for row in rows if "us" in row]
    print(f"\n{'rows':>4} {'layer':12} {'floor':>7} {'linear':>7}  best of each group, us (of F.linear): way")
    for number, layer in dict.fromkeys((row["rows"], row["layer"]) for row in timed):
        here = [row for row in timed if (row["rows"], row["layer"]) == (number, layer)]
        linear = next((row["us"] for row in here if row["way"] == "linear"), math.nan)
        print(f"{number:4d} {layer:12} {here[0]['floor_us']:7.2f} {linear:7.2f}")
        for group in dict.fromkeys(row["group"] for row in here):
            mine = [row for row in here if row["group"] == group]
            apart = [row for row in mine if "apart" in row["way"]]
            kinds = [[row] for row in mine] if group == "block" else [[row for row in mine if row not in apart], apart]
            for best in (min(kind, key=lambda row: row["us"]) for kind in kinds if kind):
                print(f"{'':26}{group:7} {best['us']:7.2f} ({best['us'] / linear:4.2f}): {best['way']}")
    for row in rows:
        if "failed" in row:
            print(
                "failed:", " ".join(str(row[key]) for key in ("group", "rows", "layer", "way", "failed") if key in row)
            )
    bad = [row for row in rows if row.get("failed") == "wrong" or ("failed" in row and "way" not in row)]
    return 1 if bad else 0


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _write(output: Path, row: dict[str, Any]) -> None:
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    shown = [f"{row[key]:.2f} {key}" for key in ("us", "of_floor") if key in row]
    print(*(row.get(key, "") for key in ("group", "rows", "layer", "way", "failed")), *shown, sep="  ", flush=True)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _balanced(layer: Layer) -> int:
    """Columns that are as many tiles of 64 for each of 132 processors, where that is no more than a tenth added."""
    padded = _up(layer.outputs, 64 * 132)
    return padded if padded <= 1.1 * layer.outputs else layer.outputs


if __name__ == "__main__":
    sys.exit(main())
